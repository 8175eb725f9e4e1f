"""Forward passes of a Hugging Face decoder: with a mask, by a tree's shape, and over packed rows of documents.

transformers' decoders pass a mask of four dimensions to their attention function unchanged. So attention functions of
our own, registered in its `AttentionInterface`, get what they need in the mask's place:

* A cached pass with the kernel: `by_tree` calls `tree_attention`, which reads the tree's shape on the device. A pass
  has no mask and does not depend on the number of slots that are in use, so that one CUDA graph holds it.
* Packed rows: a FlexAttention block mask instead of a tensor of (T, T). `by_flex` on a GPU, `by_tiles` elsewhere.

Letters: B batch, T tokens, N queries, S key slots, D hidden, H query heads, d head dimension, E keys that a tile sees.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.flex_attention import flex_attention_forward

from heads.kernels.slots import VisibleSlots
from heads.kernels.tree_attention import tree_attention
from heads.targets.cache import cache_name
from heads.targets.encoder_decoder import EncoderDecoder
from heads.targets.families import RECURRENT_LAYERS
from heads.targets.masks import TILE, attention_masks, many_shapes, masks_by_kind, packed_mask, packed_visible

FLEX, TILES, TREE = "draftsmith_flex", "draftsmith_tiles", "draftsmith_tree"
"""Names of the attention functions in transformers' interface."""


def decode(
    base: nn.Module,
    config: object,
    dtype: torch.dtype,
    tokens: Tensor,
    *,
    positions: Tensor,
    visible: Tensor,
    key_positions: Tensor,
    cache: Cache | None = None,
) -> Tensor:
    """Return the states of a Hugging Face decoder after its final norm, (B, N, D). Arguments as in
    `FrozenTarget.features`."""
    if isinstance(base, EncoderDecoder):
        hidden: Tensor = base(tokens, positions=positions, visible=visible, key_positions=key_positions, cache=cache)
        return hidden
    return _run(base, tokens, attention_masks(config, dtype, visible, positions, key_positions), positions, cache)


def _run(base: nn.Module, tokens: Tensor, masks: object, positions: Tensor, cache: Cache | None = None) -> Tensor:
    hidden: Tensor = base(
        input_ids=tokens,
        attention_mask=masks,
        position_ids=positions,
        use_cache=cache is not None,
        **{cache_name(base): cache},
    ).last_hidden_state
    return hidden


def decode_tree(
    base: nn.Module, config: object, tokens: Tensor, *, positions: Tensor, visible_slots: VisibleSlots, cache: Cache
) -> Tensor:
    """Return what `decode` returns, with the kernel's attention: each token sees its `visible_slots`."""

    def mask(window: int | None) -> object:
        carrier: Any = positions.new_zeros(1, 1, 1, 1)
        carrier.visible_slots = visible_slots
        carrier.window = window
        return carrier

    with attention_function(base, TREE):
        return _run(base, tokens, masks_by_kind(config, mask), positions, cache)


def decode_packed(
    base: nn.Module,
    config: object,
    dtype: torch.dtype,
    tokens: Tensor,
    *,
    positions: Tensor,
    documents: Tensor,
    attention: str | None = None,
) -> Tensor:
    """Return the states of packed rows after the final norm, (B, T, D). Attention is causal and stays inside each
    document. All arguments (B, T). `attention` is the name of the attention function; None chooses one by device.

    Families that only support tensor masks according to transformers get a mask of (T, T).
    """
    if not takes_block_masks(base, config):
        visible = packed_visible(documents)
        return decode(base, config, dtype, tokens, positions=positions, visible=visible, key_positions=positions)
    masks = masks_by_kind(config, lambda window: packed_mask(documents, window))
    is_long = tokens.shape[1] > TILE  # compiling kernels does not pay for short rows
    with attention_function(base, attention or (FLEX if tokens.is_cuda and is_long else TILES)):
        return _run(base, tokens, masks, positions)


def takes_block_masks(base: Any, config: Any) -> bool:
    """Return True if a decoder passes block masks to its attention functions. Hybrids do, although transformers denies
    it because of their recurrent layers. Gemma-4's small models do not: they slice the masks of layers that share keys,
    which block masks do not support."""
    if isinstance(base, EncoderDecoder):
        return False
    if hasattr(base, "_maybe_slice_kv_shared_inputs") and config.num_kv_shared_layers:
        return False
    return bool(base._supports_flex_attn) or bool(
        RECURRENT_LAYERS.intersection(getattr(config, "layer_types", None) or ())
    )


@contextmanager
def attention_function(base: nn.Module, name: str) -> Iterator[None]:
    """Make the layers of a decoder call the attention function `name`. Their configs name it: the decoder's own, or, if
    it borrows layers as an early exit does, that of another. Passes may be nested, but not run in two threads."""
    configs: list[Any] = [config for module in base.modules() if (config := vars(module).get("config")) is not None]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def by_tree(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers' interface, by the kernel: query (B, H, N, d), key and value
    (B, Hkv, S, d), views of the cache -> (B, N, H, d)."""
    if softcap is not None or s_aux is not None or query.shape[3] != value.shape[3]:
        raise NotImplementedError("tree_attention has no soft caps, sinks, or values of another width than the keys")
    q, k, v = (x.transpose(1, 2) for x in (query.to(value.dtype), key, value))
    return tree_attention(q, k, v, attention_mask.visible_slots, scale=scaling, window=attention_mask.window), None


def by_flex(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: BlockMask, **settings: Any
) -> tuple[Tensor, object]:
    """Run transformers' FlexAttention in one dtype, since some families rotate in float32 under autocast."""
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    with many_shapes():
        out: tuple[Tensor, object] = flex_attention_forward(module, query, key, value, attention_mask, **settings)
    return out


def by_tiles(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers' interface, one tile of queries at a time. Each tile attends to the keys from
    the first to the last tile that any of its rows sees. query (B, H, T, d), key and value (B, Hkv, T, d) -> (B, T, H,
    d).

    Some models pass the mask as a keyword. `softcap` caps scores smoothly; `s_aux` (H,) are the scores of attention
    sinks. The backward pass recomputes each tile's weights.
    """
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    first = attention_mask.kv_indices[:, 0, :, 0].amin(0).tolist()  # a tile sees itself and earlier tiles
    outs = []
    for i, tile in enumerate(first):
        start = i * TILE
        stop = min((i + 1) * TILE, query.shape[2])
        seen = slice(tile * TILE, stop)
        parts = query[:, :, start:stop], key[:, :, seen], value[:, :, seen]
        given = (*parts, attention_mask.mask_mod, stop, scaling, softcap, s_aux)
        if torch.is_grad_enabled():
            outs.append(checkpoint(_tile, *given, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(_tile(*given))
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


def _tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Callable[..., Tensor],
    stop: int,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of the queries q over the keys k. Both end before slot `stop`."""
    row, key = (torch.arange(stop - x.shape[2], stop, device=q.device) for x in (q, k))
    batch = torch.arange(len(q), device=q.device)[:, None, None]
    visible = mask(batch, batch, row[:, None], key)  # (B, rows, E)
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=visible[:, None], scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    G = q.shape[1] // k.shape[1]
    E = k.shape[2]
    k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights: Tensor = scores.softmax(-1)[..., :E].to(v.dtype)
    return weights @ v


AttentionInterface.register(FLEX, by_flex)
AttentionInterface.register(TILES, by_tiles)
AttentionInterface.register(TREE, by_tree)
