"""Opening of the target's decoder: the choice of its form, and the checks of what it computes.

A decoder that ignores its positions or its mask, or a kernel that is wrong on some card, raises no error: its output is
only wrong, and plain decoding is wrong with it. So passes are compared with the model's own, and kernels with torch's
operations, before the first request, once for each target and shape.

Letters: B rows, N nodes, P prompt tokens.
"""

import math
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers import Cache

from heads.core.errors import UserError, first_line, warn_once
from heads.kernels.slots import TreeSlots, ancestors, round_up
from heads.kernels.triton_support import KERNEL_ERRORS
from heads.targets.cache import HFCache
from heads.targets.cached_decoder import CachedDecoder, CacheSpec
from heads.targets.frozen_target import FrozenTarget, why_not_finite
from heads.targets.hf_decoder import HFDecoder
from heads.targets.native_decoder import NativeDecoder, why_not_native
from heads.targets.recurrent_layers import single_steps

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}  # and 0.15 for all narrower types
"""Relative error of hidden states above which a decoder is assumed to ignore its mask: far above rounding errors."""
KERNEL_TOLERANCE = {torch.float32: 1e-4}  # and 0.02 for 16-bit types
"""Relative error above which a kernel is assumed to be wrong."""


_checked: "WeakKeyDictionary[FrozenTarget, dict[tuple[object, ...], tuple[str | None, bool, bool]]]" = (
    WeakKeyDictionary()
)
"""By target, and by form and sizes of the decoder: its fault, and whether it reads masks and chooses in tiles."""


def open_decoder(target: FrozenTarget, spec: CacheSpec) -> CachedDecoder:
    """Return the target's decoder: the native one if there is one that passes the checks, else the Hugging Face model.
    UserError if neither takes what it is given."""
    reason = why_not_native(target)
    if reason is None:
        native = NativeDecoder(target, spec)
        fault = check_decoder(target, native)
        if fault is None:
            return native
        warn_once(f"{fault}; its Hugging Face model is used instead of the native decoder")
    else:
        warn_once(f"{target.name}: decoded by its Hugging Face model, slower: {reason}")
    if target.is_recurrent and not hasattr(Cache, "get_conv_state"):
        raise UserError(
            f"{target.name}: expected transformers 5.21 or newer, with whose caches recurrent layers are decoded here, "
            f"got {transformers.__version__}; install a newer one"
        )
    decoder = HFDecoder(target, spec)
    fault = check_decoder(target, decoder)
    if fault is not None:
        raise UserError(f"{fault}; it cannot be a target here")
    return decoder


def check_decoder(target: FrozenTarget, decoder: CachedDecoder) -> str | None:
    """Check a decoder's kernels, which are turned off if they are wrong, and its masks. Return the fault of its masks,
    or None. Engines of one shape on one target are checked once."""
    results = _checked.setdefault(target, {})
    key = (type(decoder), replace(decoder.spec, aux_layer_ids=()), decoder.reads_masks, decoder.in_tiles)
    if key not in results:
        check_kernels(target, decoder)
        results[key] = (mask_fault(target, decoder), decoder.reads_masks, decoder.in_tiles)
    fault, decoder.reads_masks, decoder.in_tiles = results[key]
    return fault


def mask_fault(target: FrozenTarget, decoder: CachedDecoder) -> str | None:
    """Verify a small tree, and compare the result with the model's own forward pass over each path. Return the fault,
    if there is one. For a recurrent target, which accepts no trees, verify the paths one after the other. UserError for
    a model whose own states are not finite.

    The check runs for every model, because a list of known families is never complete and a decoder that ignores its
    positions or its mask raises no error: its output is only wrong. Leaves padding in the first slots of every row.
    """
    device = target.device
    B = decoder.spec.batch_size
    P = 4
    ids = target.sample(P + 5, starts=(P - 1,))[0]
    prompt = ids[:P]
    nodes = ids[P:]
    pieces = (prompt[:2], prompt[2:]) if target.is_recurrent else (prompt,)
    for row in range(B):
        for number, piece in enumerate(pieces):
            decoder.prefill(row, piece[None], 2 * number)

    def verify(tokens: Tensor, parents: list[int], depths: list[int]) -> Tensor:
        links = torch.tensor([parents, depths], device=device)[:, None].expand(-1, B, -1)
        length = torch.full((B,), P, device=device)
        mapping = TreeSlots(length, links[0], links[1], ancestors(links[0], 2), decoder.slot)
        extent = min(round_up(P + 5), decoder.spec.capacity)
        return decoder.forward(tokens.expand(B, -1), mapping, extent=extent).hidden

    paths = [[0, 1, 3], [0, 2, 4]]  # a root, two children, a child of each
    if target.is_recurrent:
        count = min(3, decoder.spec.nodes)  # a decoder keeps only the states that its rounds need
        paths = [path[:count] for path in paths]
        states = torch.stack([verify(nodes[path], [0, 0, 1][:count], [0, 1, 2][:count]) for path in paths], dim=1)
    else:
        states = verify(nodes, [0, 0, 0, 1, 2], [0, 1, 1, 2, 2])[:, paths]  # (B, 2, 3, D)
    texts = torch.stack([torch.cat([prompt, nodes[path]]) for path in paths])
    count = len(paths[0])
    expected = single_steps(target.base, texts, count) if target.is_recurrent else target.alone(texts)[:, -count:]
    if not bool(expected.isfinite().all()):
        raise UserError(f"{target.name}: {why_not_finite(target.model, target.layers, target.arguments(texts))}")
    error = relative_error(states, expected)
    if error < TOLERANCE.get(target.dtype, 0.15):
        return None
    off = "not finite" if math.isnan(error) else f"off by {error:.1%}"
    return (
        f"{target.name}: {target.config.model_type} does not take tree masks, positions and states as they are given "
        f"(hidden states {off})"
    )


def relative_error(states: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of states (..., D)."""
    expected = expected.double()
    return float(((states.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def check_kernels(target: FrozenTarget, decoder: CachedDecoder) -> None:
    """Compare passes with kernels with passes by torch's operations, three times, over random caches whose lengths
    cross the kernels' splits. If they differ, or if a kernel fails, warn once and take torch's operations."""
    if target.start_token is not None:  # its passes need a prompt first
        decoder.in_tiles = False
    if decoder.reads_masks and not decoder.in_tiles:
        return
    try:
        reason = kernel_fault(decoder)
    except KERNEL_ERRORS as error:
        reason = first_line(error)
    for store in stores_of(decoder):
        store.zero_()
    if reason is not None:
        warn_once(f"{target.name}: kernels are not used ({reason}): torch's operations decode, slower")
        decoder.reads_masks = True
        decoder.in_tiles = False


def stores_of(decoder: CachedDecoder) -> list[Tensor]:
    """Return the tensors of keys and values that the passes so far have allocated."""
    cache = decoder.cache
    return [*cache.stores["keys"], *cache.stores["values"]] if isinstance(cache, HFCache) else [cache.store]


def kernel_fault(decoder: CachedDecoder) -> str | None:
    """Return how the kernels' results differ from torch's, or None."""
    B = decoder.spec.batch_size
    N = decoder.spec.nodes
    capacity = decoder.spec.capacity
    limit = KERNEL_TOLERANCE.get(decoder.model.dtype, 2e-2)
    device = decoder.slot.device
    draw = torch.Generator(device).manual_seed(0)
    parents = ((torch.arange(N, device=device) - 1) // 2).clamp_min(0).expand(B, -1)
    above = ancestors(parents, N.bit_length())
    reads_masks = decoder.reads_masks
    for length in {0, *(n for n in (1022, capacity - N) if 0 < n <= capacity - N)}:
        tokens = torch.randint(decoder.model.head.weight.shape[0], (B, N), generator=draw, device=device)
        mapping = TreeSlots(torch.full((B,), length, device=device), parents, above.sum(-1) - 1, above, decoder.slot)
        decoder.forward(tokens, mapping, extent=capacity)  # a Hugging Face model's cache is allocated by its first pass
        for store in stores_of(decoder):
            store.normal_(generator=draw)
        runs = [decoder.forward(tokens, mapping, extent=capacity).hidden for _ in range(3)]
        if any(not torch.equal(hidden, runs[0]) for hidden in runs):
            return f"tree_attention repeats itself differently at {length} tokens"
        decoder.reads_masks = True
        expected = decoder.forward(tokens, mapping, extent=capacity).hidden
        decoder.reads_masks = reads_masks
        error = relative_error(runs[0], expected)
        if not error < limit:
            return f"tree_attention is off by {error:.1%} at {length} tokens"
        if decoder.in_tiles:
            zeros = torch.zeros(B, device=device)
            chosen = decoder.choose(runs[0], mapping.positions, zeros, zeros.long(), noisy=False)
            logits = decoder.model.lm_head(runs[0])
            short = (logits.amax(-1) - logits.gather(-1, chosen[..., None])[..., 0]) / logits.abs().amax(-1)
            if not short.max().item() < limit:
                return f"choose takes a token {short.max().item():.1%} below the best"
    return None
