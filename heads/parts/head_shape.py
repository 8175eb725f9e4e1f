"""The settings that a head takes from its target: its shape, auxiliary layers and mask token.

Auxiliary layers are the residual streams of the target that a head reads. The mask token is a placeholder for tokens
not yet drafted: an id of the target's embedding that no text contains.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from heads.core.errors import UserError, expect
from heads.parts.rotary import LENGTH, check_scaling
from heads.targets.families import layer_setting, rope_scaling, rope_theta
from heads.targets.frozen_target import FrozenTarget
from heads.targets.target_files import load_tokenizer


def check_one_width(target: FrozenTarget, kind: str) -> None:
    """Refuse a target whose output head is not as wide as its layers, for heads that start with a copy of its output
    matrix. Raises UserError."""
    width = target.lm_head_weight.shape[1]
    if width != target.hidden_size:
        raise UserError(
            f"{target.name}: its embeddings are {width} wide and its hidden states {target.hidden_size}; "
            f"{kind} needs one width, use another target"
        )


def block_settings(
    target: FrozenTarget,
    num_heads: int | None = None,
    scaling: dict[str, Any] | None = None,
    head_dim: int | None = None,
) -> dict[str, object]:
    """Return the settings of a `BlockConfig` of the target's shape, with its scaling of rotary positions. The arguments
    override the target's. Raises UserError for an invalid scaling."""
    config = target.config
    D = target.hidden_size
    heads = num_heads or layer_setting(config, "num_attention_heads")
    key_heads = layer_setting(config, "num_key_value_heads") or heads
    if num_heads is None and heads % key_heads:  # latent attention has no key heads, whatever its config says
        key_heads = heads
    head_dim = head_dim or layer_setting(config, "head_dim") or D // heads
    own = rope_scaling(config) or {}
    longest = getattr(config, "max_position_embeddings", None) or target.context_length
    for name in ("short_factor", "long_factor"):  # of LongRoPE, one for each frequency of a head
        if len(own.get(name, ())) not in (0, head_dim // 2):
            own = own | {name: resampled(own[name], head_dim // 2)}
    if scaling is not None and scaling != own:
        check_scaling(scaling)
        if scaling["rope_type"] != "longrope":  # its factor is computed from `max_position_embeddings`
            # Plain positions hold for the length that the target was trained for before its own were scaled.
            first = (scaling if LENGTH in scaling else own).get(LENGTH, longest)
            longest = min(longest, int(first * scaling.get("factor", 1)))
    return {
        "hidden_size": D,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "max_position_embeddings": longest,
        "intermediate_size": layer_setting(config, "intermediate_size") or 4 * D,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": rope_theta(config),
        "rope_scaling": (own or None) if scaling is None else scaling,
    }


def resampled(factors: Sequence[float], count: int) -> list[float]:
    """Return the factors of `count` rotary frequencies, from those of a target whose heads turn another number: by
    linear interpolation between the target's frequencies, both lists being spread evenly over their logarithms."""
    ours = np.arange(count) / count
    theirs = np.arange(len(factors)) / len(factors)
    resampled_factors: list[float] = np.interp(ours, theirs, factors).tolist()
    return resampled_factors


def low_middle_high(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's auxiliary layers h_2, h_{n//2}, h_{n-3} (arXiv 2503.01840, section 3.1), which engines use if a
    head names none."""
    return 2, num_layers // 2, num_layers - 3


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's auxiliary layers. UserError if the target is too shallow for three."""
    aux_layer_ids = low_middle_high(num_layers)
    if num_layers == 1:
        raise UserError("a target of one layer has no two residual streams that engines capture; use another head")
    if not 0 < aux_layer_ids[0] < aux_layer_ids[1] < aux_layer_ids[2]:
        raise UserError(
            f"a target of {num_layers} layers is too shallow for the default auxiliary layers {list(aux_layer_ids)}: "
            f"name them, as in head.aux_layer_ids: {shallow_aux_layer_ids(num_layers)} (0 = embeddings; "
            f"engines take two or more below {num_layers})"
        )
    return aux_layer_ids


def shallow_aux_layer_ids(num_layers: int) -> list[int]:
    """Return auxiliary layers for a shallow target, spread over its depth: three, or two if it has only two or three
    layers. All are before the last layer's output, where every engine captures them."""
    return sorted({min(1, num_layers - 2), num_layers // 2, num_layers - 1})


def check_aux_layer_ids(aux_layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the auxiliary layers in ascending order. UserError if one is invalid. Training also works with a single
    layer and with the last layer's output, although no engine serves them (`heads.formats.engine_folder`)."""
    for k in aux_layer_ids:
        if not 0 <= k <= num_layers:
            raise UserError(
                f"head.aux_layer_ids: {k} is not a residual stream of a target with {num_layers} layers; "
                f"use 0 to {num_layers}"
            )
    if len(set(aux_layer_ids)) != len(aux_layer_ids) or not aux_layer_ids:
        raise UserError(f"head.aux_layer_ids: {list(aux_layer_ids)} must name at least one layer, each once")
    return tuple(sorted(aux_layer_ids))


def spread_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the default auxiliary layers of the published DFlash heads, numbered by the layer that a stream enters
    (their configs use the layer that it leaves). UserError if the target is too shallow."""
    n = num_target_layers
    if n < 4:
        raise UserError(
            f"head.aux_layer_ids: a target of {n} layers is too shallow for the default ones; name them, such as "
            f"[{n // 2}]"
        )
    if num_layers == 1:
        return (n // 2 + 1,)
    left = (round(1 + i * (n - 4) / (num_layers - 1)) for i in range(num_layers))
    return tuple(sorted({layer + 1 for layer in left}))


RESERVED = re.compile(r"<\|?(reserved|unused|extra_id|mask)[\w ]*\|?>|\[(MASK|unused\d+)\]", re.IGNORECASE)
"""Tokens that a tokenizer reserves."""
NO_TEXT = {True: ("À", "Á", "õ", "ÿ"), False: ("<0xC0>", "<0xC1>", "<0xF5>", "<0xFF>")}
"""Bytes that no UTF-8 text contains, as written by byte-level tokenizers (True) and by those that fall back to bytes
(False)."""


def unused_id(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> int | None:
    """Return an id that no text contains, for a target with this number of embeddings: the first id after the
    tokenizer's own, as in published heads, else a reserved token, else a byte that is not valid UTF-8, else the unknown
    token, else None."""
    vocabulary = tokenizer.get_vocab()
    if len(tokenizer) < embeddings and max(vocabulary.values()) < embeddings - 1:
        return max(vocabulary.values()) + 1
    reserved = [i for token, i in vocabulary.items() if RESERVED.fullmatch(token) and i < embeddings]
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    if free := sorted(set(reserved) - used):
        return free[0]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    of_bytes = backend is not None and "ByteLevel" in str(backend.pre_tokenizer)
    last: int | None = None if tokenizer.unk_token_id in used else tokenizer.unk_token_id
    return next((vocabulary[token] for token in NO_TEXT[of_bytes] if token in vocabulary), last)


def mask_token(target: FrozenTarget, mask_token_id: int | None) -> int:
    """Return the id of the mask token; chosen by `unused_id` if None. UserError if it has no embedding, or if
    there is none to choose."""
    if mask_token_id is None:
        tokenizer = load_tokenizer(
            target.name,
            trust_remote_code=target.trust_remote_code,
            gguf_file=target.gguf_file,
            adapter=target.merged_adapter,
            fix_mistral_regex=target.fix_mistral_regex,
        )
        mask_token_id = unused_id(tokenizer, target.vocab_size)
        if mask_token_id is None:
            raise UserError(
                f"head.mask_token_id: {target.name} has a use for each of its {target.vocab_size} tokens; name one "
                "that your data does not have"
            )
    what = f"an id below {target.vocab_size}, the rows of the target's embedding"
    expect(0 <= mask_token_id < target.vocab_size, "head.mask_token_id", what, mask_token_id)
    return mask_token_id
