"""Opening of a target: a folder or Hub id becomes a FrozenTarget and its tokenizer, or one line says why not."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import peft
from transformers.models.auto import auto_factory
from transformers.utils import logging as transformers_logging

from heads.core.errors import UserError, warn_once
from heads.targets.encoder_decoder import find_head, give_template
from heads.targets.frozen_target import FrozenTarget, Opening, Place
from heads.targets.hub import (
    is_here,
    repo_and_revision,
    tokenizer_key,
)
from heads.targets.merge_adapter import merge_adapter
from heads.targets.target_files import (
    ADAPTER_ALONE,
    ADAPTER_CONFIG,
    check_generation_config,
    check_index,
    holds,
    is_adapter,
    load_config,
    load_end_ids,
    load_tokenizer,
    unreadable,
)

CPU = torch.device("cpu")


def load_target(path: str, **how: Any) -> FrozenTarget:
    """Load a target without its tokenizer: its texts end at the tokens of its configs alone. `how`: as of
    `open_target`."""
    return open_target(path, with_tokenizer=False, **how)[0]


def open_target(
    path: str,
    *,
    with_tokenizer: bool,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    quantize: str | None = None,
    place: Place | None = None,
    adapter: str | None = None,
    gguf_file: str | None = None,
    fix_mistral_regex: bool | None = None,
    template: Mapping[str, object] = MappingProxyType({}),
) -> tuple[FrozenTarget, PreTrainedTokenizerBase | None]:
    """Load a target from a folder or the Hub (OWNER/NAME or OWNER/NAME@REVISION), in its stored dtype unless `dtype` is
    given. `with_tokenizer`: also load its tokenizer, which may name further tokens that end a text.

    `adapter`: a folder or Hub id of a peft adapter, which is merged into the weights. `gguf_file`: the name of a GGUF
    file at `path`, whose weights are dequantised. After that, the target is as any other. `template`: arguments of its
    chat template.

    `place`: a function of `heads.targets.layer_placement`, which moves the weights instead of `Module.to`. Weights in
    their stored dtype are memory-mapped from their files and shared by all processes of a machine, so `place` also
    converts them to a wider dtype.

    Raises UserError if `path` does not exist, if it is damaged, or if it is not a causal LM with readable auxiliary
    hidden states and replaceable masks.
    """
    config = load_config(path, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    check_generation_config(path)
    if gguf_file is None:
        check_index(path)
    what = "no causal language model with safetensors weights can be loaded"
    stored = config.get_text_config().dtype
    widens = place is not None and dtype is not None and stored is not None and stored.itemsize < dtype.itemsize
    how: dict[str, object] = {"dtype": "auto" if widens else dtype or "auto"}
    how |= {"use_safetensors": True, "output_loading_info": True, "trust_remote_code": trust_remote_code}
    how["ignore_mismatched_sizes"] = True  # they are rejected below, where both shapes are known
    if gguf_file is not None:
        how["gguf_file"] = gguf_file
        if hasattr(transformers, "GgufConfig"):  # versions before it always dequantise
            how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        repo, how["revision"] = repo_and_revision(path)
        with without_adapters():
            loaded = auto_class(config).from_pretrained(repo, config=config, **how)
    except Exception as error:  # transformers, safetensors and torch raise many kinds of errors
        if is_adapter(path):
            raise UserError(f"{path}: {ADAPTER_ALONE}") from error
        remedy = "install the package" if isinstance(error, ImportError) else "name a folder or Hub id of one"
        if is_here(path) and any(Path(path).glob("*.bin")) and not any(Path(path).glob("*.safetensors")):
            raise UserError(
                f"{path}: pickled weights (.bin) are not read, since loading them can run code; convert them: load the "
                "model with transformers and call save_pretrained(FOLDER)"
            ) from error
        raise unreadable(path, what, error, remedy) from error
    model, info = loaded
    if holds(path, ADAPTER_CONFIG):
        warn_once(
            f"{path}: the adapter beside its weights ({ADAPTER_CONFIG}) is not read, as engines read the weights "
            f"alone; target.adapter={path} merges one"
        )
    for key, held, described in sorted(info["mismatched_keys"]):
        raise UserError(
            f"{path}: {key} is {list(held)} in its weights, and config.json describes {list(described)}; "
            "fix config.json"
        )
    absent = sorted(info["missing_keys"])
    if absent:  # transformers initialises them at random, with a warning
        architecture = " ".join(config.architectures or ["?"])
        raise UserError(
            f"{path}: a {architecture} that lacks {len(absent)} weights of {type(model).__name__}, {absent[0]} first; "
            "expected a whole causal language model"
        )
    layers = model.config.get_text_config().num_hidden_layers
    if unused := unused_weights(info["unexpected_keys"], layers):
        raise UserError(
            f"{path}: {len(unused)} of its weights have no place in the {type(model).__name__} of {layers} layers that "
            f"its config.json describes, {unused[0]} first; fix config.json, or take them out of the checkpoint"
        )
    two_tables = gguf_file is None and break_tie(model, config, path)
    if adapter is not None:
        model = merge_adapter(model, path, adapter)
        config.get_text_config().vocab_size = model.config.get_text_config().vocab_size
    opening = Opening(config, trust_remote_code, adapter, gguf_file, two_tables, fix_mistral_regex, template=template)
    tokenizer = None
    if with_tokenizer:
        files: dict[str, Any] = {"trust_remote_code": trust_remote_code, "gguf_file": gguf_file}
        tokenizer = load_tokenizer(path, adapter=adapter, fix_mistral_regex=fix_mistral_regex, **files)
        ends = load_end_ids(path, tokenizer, **files)
        opening = replace(opening, tokenizer=tokenizer_key(tokenizer), eos_token_ids=ends)
    target = FrozenTarget(model, path, quantize=quantize, opening=opening)  # on the CPU: no device holds it whole
    target.move(torch.device(device), dtype, place)
    if target.placement != "absent":
        target.check()
    return target, tokenizer


@contextmanager
def without_adapters() -> Iterator[None]:
    """Keep transformers from merging an adapter that lies beside a model's weights, which engines do not read. It has
    no switch for that, and looks for adapters only where peft is installed."""
    places: list[Any] = [auto_factory, peft]
    known = [place.is_peft_available for place in places]
    try:
        for place in places:
            place.is_peft_available = lambda: False
        yield
    finally:
        for place, is_available in zip(places, known, strict=True):
            place.is_peft_available = is_available


def load_target_and_tokenizer(
    path: str, *, dtype: str = "auto", device: torch.device = CPU, **how: Any
) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """Return a target and the tokenizer of the same path. Texts end at the tokens that either names. dtype `auto`
    is that of the checkpoint, but float32 on a CPU, where narrower types are slower. `how`: as of `open_target`."""
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    transformers_logging.disable_progress_bar()
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report of missing weights is long; ours is one line
    try:
        number_type = getattr(torch, dtype, None)
        target, tokenizer = open_target(path, with_tokenizer=True, dtype=number_type, device=device, **how)
    finally:
        transformers_logging.set_verbosity(level)
    assert tokenizer is not None
    if tokenizer.vocab_size > target.vocab_size:  # added tokens may be outside: they do not count, and are not used
        raise UserError(
            f"{path}: its tokenizer has {tokenizer.vocab_size} tokens and its output head {target.vocab_size}; use the "
            "model's own tokenizer"
        )
    if target.start_token is not None:
        give_template(tokenizer, target.start_token)
    return target, tokenizer


def break_tie(model: PreTrainedModel, whole: PreTrainedConfig, path: str) -> bool:
    """Let the configs of a loaded model, from which drafts are made, tie no tables that differ in its checkpoint, both
    of which transformers loads. Return True, and say so, if config.json ties them. `whole`: the config of the whole
    checkpoint."""
    untyped: Any = model
    embed = untyped.get_input_embeddings()
    head = find_head(model)
    if head is None or embed.weight is head.weight:
        return False
    repo, revision = repo_and_revision(path)
    # The whole config's flag counts only if the file has it: some multimodal classes tie by default.
    file, _ = PreTrainedConfig.get_config_dict(repo, revision=revision)
    is_said = bool(file.get("tie_word_embeddings") or getattr(whole.get_text_config(), "tie_word_embeddings", False))
    for config in (whole, whole.get_text_config(), model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    if is_said:
        warn_once(
            f"{path}: its config.json ties the embeddings and the output head, and its checkpoint holds two tables "
            "that differ: both are used here; engines may tie them, so set tie_word_embeddings to false in config.json"
        )
    return is_said


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class that loads a language model of this config. Some multimodal models have only a
    class for text and images, and none for text alone."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if reads_images and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


OTHER_PARTS = re.compile(
    r"(^|\.)(mtp|nextn|visual|vision|image|audio|speech|multi_modal|mm_|talker|token2wav|code2wav)\w*\."
    r"|rotary_emb\.inv_freq$|\.position_ids$|\.(attn|attention)\.(bias|masked_bias)$"
)
MODULE = re.compile(r"(.*\blayers\.(\d+)\.)")
PREDICTION = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Names that occur in multi-token prediction modules and in no decoder layer. Some families number such modules after
their layers."""


def unused_weights(unexpected: Iterable[str], num_layers: int) -> list[str]:
    """Return the checkpoint's unused weights that matter: the model, with `num_layers` decoder layers, is wrong without
    them.

    `unexpected`: names that the model's class does not use and does not itself list as ignored. Multi-token prediction
    modules of any family, parts for other modalities, and the masks and frequencies in old checkpoints do not matter.
    """
    names = sorted(unexpected)
    modules = {match[0] for name in names if (match := MODULE.match(name)) and int(match[2]) >= num_layers}

    def is_prediction(module: str) -> bool:
        return any(f"{module}{part}" in names for part in PREDICTION)

    prediction = set(filter(is_prediction, modules))
    return [
        name
        for name in names
        if not OTHER_PARTS.search(name) and not ((match := MODULE.match(name)) and match[0] in prediction)
    ]
