"""A language model smaller than its target: one from a path, some layers of the target, or a fresh one.

In each case, it gets as many vocabulary rows as the target has, and drafts only tokens that both had before.
"""

import copy
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from heads.core.errors import UserError, first_line, warn_once
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import auto_class, load_target
from heads.targets.shape_target import ShapeTarget, load_shape
from heads.targets.target_files import load_tokenizer

MAX_NAMED = 4
"""Tokens to name in a line."""
DECIDED = frozenset(
    {"model_type", "vocab_size", "architectures", "dtype", "transformers_version", "auto_map", "quantization_config"}
)
"""Config settings that `fresh` must not change."""


def load_smaller(path: str, target: FrozenTarget) -> PreTrainedModel:
    """Load the causal LM at `path` in float32. Its own Python code runs only if the target's may run. UserError if it
    does not accept the masks of a draft, or has another tokenizer."""
    how: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": target.trust_remote_code}
    loaded: FrozenTarget
    if isinstance(target, ShapeTarget):
        loaded = load_shape(path, **how)
    else:
        check_tokenizers(path, target)
        loaded = load_target(path, **how)
    if loaded.start_token not in (None, target.start_token):
        raise UserError(f"{path}: an encoder-decoder draft needs a target whose answers begin with the same token")
    return loaded.model.requires_grad_(True)


def check_tokenizers(path: str, target: FrozenTarget) -> None:
    """Reject a draft whose token ids differ from the target's. UserError names the first difference. Added tokens that
    one of the two lacks are said."""
    trusted = target.trust_remote_code
    tokenizers = (
        load_tokenizer(
            target.name,
            trust_remote_code=trusted,
            gguf_file=target.gguf_file,
            adapter=target.merged_adapter,
            fix_mistral_regex=target.fix_mistral_regex,
        ),
        load_tokenizer(path, trust_remote_code=trusted),
    )
    vocabularies = [each.get_vocab() for each in tokenizers]
    ours, theirs = (dict(zip(each.values(), each.keys(), strict=True)) for each in vocabularies)
    added = [each.added_tokens_decoder.keys() for each in tokenizers]
    alone = {number for number in ours.keys() - theirs.keys() if number in added[0]}
    alone |= {number for number in theirs.keys() - ours.keys() if number in added[1]}
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number) and number not in alone:
            raise UserError(
                f"{path}: its tokenizer is not that of {target.name}: token {number} is {theirs.get(number)!r} here "
                f"and {ours.get(number)!r} there; a draft model must share the target's tokenizer"
            )
    if alone:
        names = [f"{number} ({ours.get(number) or theirs[number]!r})" for number in sorted(alone)[:MAX_NAMED]]
        more = f" and {len(alone) - MAX_NAMED} more" if len(alone) > MAX_NAMED else ""
        warn_once(
            f"{path}: only one of its tokenizer and that of {target.name} has the tokens {', '.join(names)}{more}: "
            "they are drafted as the draft's rows for them say, or never; texts stay the target's"
        )


def keep_layers(target: FrozenTarget, layers: Sequence[int]) -> PreTrainedModel:
    """Return a copy of the target with only the decoder layers `layers`, and its embeddings, final norm and output
    head."""
    n = target.num_layers
    for k in layers:
        if not 0 <= k < n:
            raise UserError(f"head.layers: {k} is not a layer of a target with {n}; use 0 to {n - 1}")
    if not layers or list(layers) != sorted(set(layers)) or len(layers) == n:
        raise UserError(f"head.layers: expected some of the target's {n} layers, ascending, got {list(layers)}")
    config = _own_config(target)
    cut_layers(config, layers, target)
    model = _from_config(config)
    prefix = next(name for name, module in target.model.named_modules() if module is target.layers) + "."
    weights: dict[str, Tensor] = {}
    for name, tensor in target.model.state_dict().items():
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            if int(number) in layers:
                weights[f"{prefix}{list(layers).index(int(number))}.{rest}"] = tensor
        else:
            weights[name] = tensor
    model.load_state_dict(weights)
    return model


def cut_layers(config: Any, layers: Sequence[int], target: FrozenTarget) -> None:
    """Change a copy of the target's config, in place, to that of a decoder with only the layers `layers`."""
    for name, value in config.to_dict().items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == target.num_layers:
            setattr(config, name, [value[k] for k in layers])  # settings per layer
    if target.start_token is None:
        config.num_hidden_layers = len(layers)
    else:
        config.num_decoder_layers = len(layers)  # the encoder stays whole


def fresh_model(target: FrozenTarget, changes: dict[str, object]) -> PreTrainedModel:
    """Return a randomly initialised model of the target's family, with the target's config and `changes`."""
    config = _own_config(target)
    settings = config.to_dict()
    known = sorted(settings.keys() | (config.attribute_map or {}).keys())
    for name in changes:
        if name in DECIDED:
            raise UserError(f"head.fresh.{name}: decided by the target; leave it out")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"head.fresh.{name}: a {config.model_type} has no such setting{hint}")
    dropped = {"architectures", "transformers_version", "dtype"} | changes.keys()
    if "num_hidden_layers" in changes:
        dropped |= {
            name for name, value in settings.items() if name.endswith("layer_types") and isinstance(value, list)
        }
    if settings.get("head_dim") == config.hidden_size // config.num_attention_heads:
        dropped.add("head_dim")  # it follows from the width
    kwargs = {name: value for name, value in settings.items() if name not in dropped and name != "model_type"}
    try:
        return _from_config(AutoConfig.for_model(config.model_type, **kwargs, **changes))
    except Exception as error:  # each family's config raises its own errors
        raise UserError(f"head.fresh: no {config.model_type} can be made of it ({first_line(error)})") from error


def fit_vocabulary(model: PreTrainedModel, vocab_size: int) -> int:
    """Resize a model's input and output embeddings to `vocab_size` rows, in place. Return the number of rows, from the
    first, that it may draft.

    Families pad their vocabularies to different sizes. Tokens that only the target has are never drafted. Their rows
    are set to the mean of the model's own rows, because engines read them.
    """
    untyped: Any = model
    embeddings: tuple[object, Any] = untyped.get_input_embeddings(), untyped.get_output_embeddings()
    if getattr(embeddings[1], "bias", None) is not None:
        raise UserError(
            f"head: the output head of a {model.config.model_type} has a bias, which no draft here can have; "
            "use another"
        )
    rows: int = embeddings[1].weight.shape[0]
    if rows != vocab_size:
        untyped.resize_token_embeddings(vocab_size, mean_resizing=False)
        with torch.no_grad():
            for end in (untyped.get_input_embeddings(), untyped.get_output_embeddings()):
                end.weight[rows:] = end.weight[:rows].mean(0)
    return min(rows, vocab_size)


def empty_model(record: dict[str, Any]) -> PreTrainedModel:
    """Return the model described by the result of `model_record`. Its weights must be loaded later."""
    kwargs = {name: value for name, value in record.items() if name not in ("model_type", "transformers_version")}
    return _from_config(AutoConfig.for_model(record["model_type"], **kwargs))


def model_record(model: PreTrainedModel) -> dict[str, object]:
    record: dict[str, object] = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    for name in ("dtype", "_name_or_path"):
        record.pop(name, None)
    return record


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors by their Hugging Face names. A tied weight appears once."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            weights[name] = tensor.detach()
        seen.add(id(tensor))
    return weights


def _own_config(target: FrozenTarget) -> Any:
    if target.model.config is not target.config:
        raise UserError(
            f"{target.name}: a {type(target.model).__name__} holds more than a language model, so no draft can be made "
            "from it; name one with head.path"
        )
    return copy.deepcopy(target.config)


def _from_config(config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32)
    return model
