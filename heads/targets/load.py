"""Opening of a target: a folder or Hub id becomes a FrozenTarget and its tokenizer, or one line says why not."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import peft
from transformers.models.auto import auto_factory
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import LocalEntryNotFoundError, cached_file, is_offline_mode  # type: ignore[attr-defined]

from heads.core.errors import UserError, first_line, warn_once
from heads.targets.encoder_decoder import find_head, give_template
from heads.targets.families import eos_ids, register_mimo
from heads.targets.frozen_target import Features, FrozenTarget, Opening, Place
from heads.targets.hub import (
    INDEX,
    MODEL,
    TOKENIZER_CONFIG,
    find_file,
    has_file,
    is_here,
    repo_and_revision,
    tokenizer_key,
)
from heads.targets.merge_adapter import merge_adapter

CPU = torch.device("cpu")
ONLY = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_ALONE = (
    "holds a peft adapter and no model; name the model with target.path, and this adapter with target.adapter, which "
    "merges it"
)
CODE_SETTINGS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True, "use_cache": True}
"""Fields of a config that say how other programs run the model, and what they must be here."""


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
    template: Mapping[str, Any] = MappingProxyType({}),
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
    how: dict[str, Any] = {"dtype": "auto" if widens else dtype or "auto"}
    how |= {"use_safetensors": True, "output_loading_info": True, "trust_remote_code": trust_remote_code}
    how["ignore_mismatched_sizes"] = True  # they are rejected below, where both shapes are known
    if gguf_file is not None:
        how["gguf_file"] = gguf_file
        if hasattr(transformers, "GgufConfig"):  # versions before it always dequantise
            how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        repo, how["revision"] = repo_and_revision(path)
        with without_adapters():
            loaded: Any = auto_class(config).from_pretrained(repo, config=config, **how)
    except Exception as error:  # transformers, safetensors and torch raise many kinds of errors
        if is_adapter(path):
            raise UserError(f"{path}: {ADAPTER_ALONE}") from error
        remedy = "install the package" if isinstance(error, ImportError) else "name a folder or Hub id of one"
        if is_here(path) and any(Path(path).glob("*.bin")) and not any(Path(path).glob("*.safetensors")):
            raise UserError(
                f"{path}: pickled weights (.bin) are not read, since loading them can run code; convert them: load the "
                "model with transformers and call save_pretrained(FOLDER)"
            ) from error
        raise _fault(path, what, error, remedy) from error
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


def check_index(path: str) -> None:
    """Raise UserError for a folder with the weights of two checkpoints: transformers would read model.safetensors, and
    engines the files that the index names. Also for one whose index names files that are not there."""
    index = Path(path) / INDEX
    if not index.is_file():
        return
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, LookupError, AttributeError, TypeError):  # reported by the loader
        return
    if ONLY not in names and (Path(path) / ONLY).is_file():
        raise UserError(
            f"{path}: holds {ONLY} beside {INDEX}, which names {names[0]} and others: engines read those, transformers "
            f"the former; remove one of the two"
        )
    if absent := [name for name in names if not (Path(path) / name).is_file()]:
        raise UserError(f"{path}: lacks {len(absent)} of the files that {INDEX} names, {absent[0]} first; fetch them")


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


def break_tie(model: PreTrainedModel, whole: Any, path: str) -> bool:
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


def load_config(path: str, *, trust_remote_code: bool = False, gguf_file: str | None = None) -> Any:
    """Load the config of the model at `path`. UserError if it is missing or cannot be read."""
    if gguf_file is not None and find_spec("gguf") is None:
        raise UserError(f"{gguf_file}: needs the package gguf, which is not installed; pip install -e '.[gguf]'")
    name = gguf_file or "config.json"
    if is_here(path) and not (Path(path) / name).is_file():
        if is_adapter(path):
            raise UserError(f"{path}: {ADAPTER_ALONE}")
        raise UserError(f"{path}: expected a model folder, found no {name} in it")
    register_mimo()
    repo, revision = repo_and_revision(path)
    how = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        config: Any = AutoConfig.from_pretrained(
            repo, revision=revision, trust_remote_code=trust_remote_code, **how, attn_implementation=None
        )
    except Exception as error:  # OSError, ValueError, KeyError and the validators' own
        if is_adapter(path):
            raise UserError(f"{path}: {ADAPTER_ALONE}") from error
        raise _fault(path, "no model that can be read", error, "fix its config.json, or name another") from error
    for each in (config, config.get_text_config()):
        for setting, value in CODE_SETTINGS.items():
            setattr(each, setting, value)
    config._attn_implementation = config._experts_implementation = None  # also of its parts
    return config


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    adapter: str | None = None,
    fix_mistral_regex: bool | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model at `path`, or of its GGUF file, or that beside its adapter if there is one.
    `fix_mistral_regex`: whether transformers replaces the pattern by which it splits text; None: it stays, and a line
    says so if transformers doubts it. UserError if it cannot be loaded."""
    how: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        if adapter is not None and has_file(adapter, TOKENIZER_CONFIG):
            warn_once(f"{adapter}: brings a tokenizer and its chat template, which replace those of {path}")
            path = adapter
            how = {}
        if fix_mistral_regex is not None:
            how["fix_mistral_regex"] = fix_mistral_regex
        repo, revision = repo_and_revision(path)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            repo, revision=revision, trust_remote_code=trust_remote_code, **how
        )
    except Exception as error:  # the tokenizer backends raise bare Exception, TypeError and OSError alike
        is_there = is_here(path) and (Path(path) / "tokenizer.json").is_file()
        remedy = "replace its tokenizer files" if is_there else "put tokenizer.json beside config.json"
        raise _fault(path, "no tokenizer that can be loaded", error, remedy) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    doubted: bool | None = getattr(backend, "fix_mistral_regex", None)  # set by transformers where it warns
    if doubted is False and fix_mistral_regex is None:
        warn_once(
            f"{path}: its tokenizer may split text otherwise than the model was trained with: transformers takes its "
            "pattern for the wrong one of older Mistral files; target.fix_mistral_regex=true in the recipe, or "
            "--fix-mistral-regex true, replaces it, and false says that it is right; engines have the same choice"
        )
    if fix_mistral_regex and doubted is not True:
        raise UserError(
            f"{path}: fix_mistral_regex has no effect: its tokenizer is not one of Mistral's of before transformers 5; "
            "leave it out"
        )
    take_processor_template(tokenizer, path)
    return tokenizer


def is_adapter(path: str) -> bool:
    """Return True for a folder or a repository of a peft adapter without a model's weights."""
    return [holds(path, name) for name in (ADAPTER_CONFIG, ONLY, INDEX)] == [True, False, False]


def holds(path: str, name: str) -> bool:
    """Return True if a folder or a repository has a file, False also where that cannot be known."""
    try:
        return has_file(path, name)
    except (OSError, ValueError):
        return False


def take_processor_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Give a tokenizer the chat template of the processor of the model at `path`, which transformers' tokenizers do not
    read. A template of its own stays that of prompts with tools, as in vLLM."""
    found: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json", "chat_template.json"):
        try:
            if (file := find_file(path, name)) is not None:
                found[name] = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise _fault(path, f"no {name} that can be read", error, "fetch it again") from error
    place, template = next(((name, text) for name, text in found.items() if text), ("", None))
    own = tokenizer.chat_template
    has_processor = found.keys() != {"chat_template.json"}
    if template is None or template == own or (own is not None and not has_processor):
        return
    if own is not None:
        warn_once(
            f"{path}: {place} and its tokenizer have chat templates that differ: the former renders prompts, and the "
            "latter those with tools, as in vLLM"
        )
        own = own if isinstance(own, dict) else {"default": own}
        template = {"default": template, "tool_use": own.get("tool_use", own.get("default"))}
    tokenizer.chat_template = template


def load_end_ids(
    path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False, gguf_file: str | None = None
) -> tuple[int, ...]:
    """Return the tokens that end a text of the model at `path`, as engines do: its tokenizer's, and those of its
    generation config, or of its config if that names none. Say if the files disagree, or if none names a token."""
    config = load_config(path, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    check_generation_config(path)
    repo, revision = repo_and_revision(path)
    generation = file = None
    try:
        file = cached_file(repo, "generation_config.json", revision=revision)
        generation = GenerationConfig.from_pretrained(repo, revision=revision or "main")
    except Exception as error:  # the hub and its client raise many kinds
        # transformers gives no cause where there is no such file; offline, what is not cached counts as not there.
        offline = isinstance(error.__cause__, LocalEntryNotFoundError) and is_offline_mode()
        if file is not None or not isinstance(error, OSError) or not (error.__cause__ is None or offline):
            remedy = "fetch it again, or set HF_HUB_OFFLINE=1 to read what is cached"
            raise _fault(path, "no generation_config.json that can be read", error, remedy) from error
    from_tokenizer = eos_ids(tokenizer)
    generated = eos_ids(generation)
    described = eos_ids(config, config.get_text_config())
    ends = tuple(dict.fromkeys((*(generated or described), *from_tokenizer)))

    def names(ids: Iterable[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in ids) or "none"

    if not ends:
        warn_once(
            f"{path}: neither its tokenizer nor its configs name a token that ends a text: texts go on to their limit"
        )
    elif not {*from_tokenizer} <= {*(generated or described)} or not {*described} <= {*ends}:
        warn_once(
            f"{path}: its files disagree on the tokens that end a text: its tokenizer names {names(from_tokenizer)}, "
            f"generation_config.json {names(generated)}, config.json {names(described)}; here a text ends at "
            f"{names(ends)}"
        )
    return ends


def _fault(path: str, what: str, error: Exception, remedy: str) -> UserError:
    """Return a UserError of one line for an exception from a transformers loader."""
    if "trust_remote_code" in str(error):
        return UserError(
            f"{path}: comes with Python code of its own, which is not run unasked; read it, then set "
            "target.trust_remote_code=true in the recipe, or --trust-remote-code on the command line"
        )
    if not is_here(path) and not MODEL.fullmatch(repo_and_revision(path)[0]):
        return UserError(f"{path}: no such folder; expected one with config.json, or a Hub id (OWNER/NAME)")
    if not is_here(path):
        return UserError(
            f"{path}: neither a folder here nor found on the Hub ({first_line(error)}); check the name, and the network"
        )
    return UserError(f"{path}: {what} ({first_line(error)}); {remedy}")


def auto_class(config: Any) -> Any:
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
    prediction = {module for module in modules if any(f"{module}{part}" in names for part in PREDICTION)}
    return [
        name
        for name in names
        if not OTHER_PARTS.search(name) and not ((match := MODULE.match(name)) and match[0] in prediction)
    ]


def check_generation_config(path: str) -> None:
    """Raise UserError if the folder's generation_config.json is damaged. transformers would ignore it, including the
    tokens that end a text."""
    file = Path(path) / "generation_config.json"
    if not is_here(path) or not os.path.lexists(file):
        return
    remedy = "replace it, or delete it so that config.json alone says which tokens end a text"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)}); {remedy}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{file}: expected a JSON object, got {type(settings).__name__}; {remedy}")


class ShapeTarget(FrozenTarget):
    """A target whose tensors have shapes but no values. It accepts any head of its shape."""

    def __init__(self, model: PreTrainedModel, name: str, opening: Opening) -> None:
        super().__init__(model, name, opening=opening)
        self.fingerprint = ""
        untyped: Any = model
        untyped.to_empty(device="cpu").tie_weights()
        self.shared = replace(self.shared, lm_head_weight=self.lm_head_weight)

    def packed_features(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]
    ) -> Features:
        empty = torch.empty(*tokens.shape, self.hidden_size, dtype=self.dtype, device=self.device)
        return Features(empty.repeat(1, 1, len(aux_layer_ids)), empty)


def load_shape(
    path: str, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False, gguf_file: str | None = None
) -> ShapeTarget:
    """Return the shapes of a model from its config in a folder or on the Hub, in its stored dtype unless `dtype` is
    given. All work with it runs inside a mode in which tensors have no values."""
    config = load_config(path, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model: Any = auto_class(config).from_config(
                config, dtype=dtype or stored, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # each family's config and class raise their own errors
        raise UserError(
            f"{path}: its config.json describes no causal language model ({first_line(error)}); name another"
        ) from error
    return ShapeTarget(model, path, Opening(trust_remote_code=trust_remote_code))
