"""Opening of the target's step: the choice of its form, and the checks of what it computes.

A decoder that ignores its positions or its mask, or a kernel that is wrong on some card, raises no error: its output is
only wrong, and plain decoding is wrong with it. So every engine compares passes with the model's own, and kernels with
torch's operations, before the first request.

Letters: B rows, N nodes, P prompt tokens.
"""

import math

import torch
from torch import Tensor

from eval.runtime.round import TargetStep
from heads.core.errors import UserError, first_line, warn_once
from heads.core.tree import Proposal
from heads.targets.cache import HFCache
from heads.targets.cached_decoder import CachedDecoder, CacheSpec
from heads.targets.decoder import NativeDecoder, why_not_native
from heads.targets.hf import HFDecoder
from heads.targets.mixers import single_steps
from heads.targets.model import FrozenTarget, why_not_finite
from heads.targets.slots import TreeSlots, ancestors, round_up

ALIBI_FAMILIES = {"bloom", "mpt"}
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}  # and 0.15 for all narrower types
"""Relative error of hidden states above which a decoder is assumed to ignore its mask: far above rounding errors."""
KERNEL_TOLERANCE = {torch.float32: 1e-4}  # and 0.02 for 16-bit types
"""Relative error above which a kernel is assumed to be wrong."""


def open_step(target: FrozenTarget, spec: CacheSpec) -> TargetStep:
    """Return the target's step: on the native decoder if it has one that passes the checks, else on the Hugging Face
    model. UserError if neither takes what it is given."""
    check_family(target)
    pads = target.device.type != "cpu" and not target.is_recurrent  # padding would pass through a recurrent state
    if (reason := why_not_native(target)) is None:
        step = TargetStep(target, NativeDecoder(target, spec), pads=pads)
        check_kernels(step)
        if (fault := mask_fault(step)) is None:
            return step
        warn_once(f"{fault}; its Hugging Face model is used instead of the native decoder")
    else:
        warn_once(f"{target.name}: decoded by its Hugging Face model, slower: {reason}")
    step = TargetStep(target, HFDecoder(target, spec), pads=pads)
    check_kernels(step)
    if fault := mask_fault(step):
        raise UserError(f"{fault}; it cannot be a target here")
    return step


def check_family(target: FrozenTarget) -> None:
    """Raise UserError for a target whose attention accepts no mask from the caller."""
    config = target.config
    if getattr(config, "alibi", False) or config.model_type in ALIBI_FAMILIES:
        raise UserError(
            f"{target.name}: the runtime cannot verify drafts on {config.model_type}: its alibi position biases "
            "are built from a 2-D mask; use a target with rotary or learned positions"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise UserError(f"{target.name}: attention {attention!r} takes no 4-D mask; load the target with sdpa or eager")


def mask_fault(step: TargetStep) -> str | None:
    """Verify a small tree, and compare the result with the model's own forward pass over each path. Return the fault,
    if there is one. For a recurrent target, which accepts no trees, verify the paths one after the other. UserError for
    a model whose own states are not finite.

    The check runs for every model, because a list of known families is never complete and a decoder that ignores its
    positions or its mask raises no error: its output is only wrong. Leaves padding in the first slots of every row.
    """
    target, P = step.target, 4
    device = target.device
    ids = target.sample(P + 5, starts=(P - 1,))[0]
    prompt, nodes = ids[:P], ids[P:]
    paths, tree = [[0, 1, 3], [0, 2, 4]], ([0, 0, 0, 1, 2], [0, 1, 1, 2, 2])  # a root, two children, a child of each
    B = step.batch_size
    pieces = (prompt[:2], prompt[2:]) if target.is_recurrent else (prompt,)
    for row in range(B):
        for number, piece in enumerate(pieces):
            step.prefill(row, piece[None], 2 * number)

    def verify(tokens: Tensor, parents: list[int], depths: list[int]) -> Tensor:
        links = torch.tensor([parents, depths], device=device)[:, None].expand(-1, B, -1)
        proposal = Proposal(tokens.expand(B, -1), links[0], links[1], torch.zeros(B, len(tokens)))
        length, extent = torch.full((B,), P, device=device), min(round_up(P + 5), step.capacity)
        return step.verify(proposal, ancestors(links[0], 2), length, extent).hidden

    if target.is_recurrent:
        count = min(3, step.decoder.spec.nodes)  # a decoder keeps only the states that its rounds need
        paths = [path[:count] for path in paths]
        found = torch.stack([verify(nodes[path], [0, 0, 1][:count], [0, 1, 2][:count]) for path in paths], dim=1)
    else:
        found = verify(nodes, *tree)[:, paths]  # (B, 2, 3, D)
    texts, count = torch.stack([torch.cat([prompt, nodes[path]]) for path in paths]), len(paths[0])
    true = (
        single_steps(target.base, texts, count) if target.is_recurrent else target.alone(texts)[:, -count:]
    ).double()
    if not bool(true.isfinite().all()):
        raise UserError(f"{target.name}: {why_not_finite(target.model, target.layers, target.arguments(texts))}")
    error = ((found.double() - true).norm(dim=-1) / true.norm(dim=-1)).max().item()
    if error < TOLERANCE.get(target.dtype, 0.15):
        return None
    off = "not finite" if math.isnan(error) else f"off by {error:.1%}"
    return (
        f"{target.name}: {target.config.model_type} does not take tree masks, positions and states as they are given "
        f"(hidden states {off})"
    )


def check_kernels(step: TargetStep) -> None:
    """Compare passes with kernels with passes by torch's operations, three times, over random caches whose lengths
    cross the kernels' splits. If they differ, or if a kernel fails, warn once and take torch's operations."""
    decoder = step.decoder
    if step.target.start_token is not None:  # its passes need a prompt first
        decoder.in_tiles = False
    if decoder.reads_masks and not decoder.in_tiles:
        return
    try:
        reason = _difference(decoder)
    except Exception as error:  # whatever a compiler or a card raises
        reason = first_line(error)
    for store in stores_of(decoder):
        store.zero_()
    if reason is not None:
        warn_once(f"{step.target.name}: kernels are left out ({reason}): torch's operations decode, slower")
        decoder.reads_masks, decoder.in_tiles = True, False


def stores_of(decoder: CachedDecoder) -> list[Tensor]:
    """Return the tensors of keys and values that the passes so far have allocated."""
    cache = decoder.cache
    return [*cache.stores["keys"], *cache.stores["values"]] if isinstance(cache, HFCache) else [cache.store]


def _difference(decoder: CachedDecoder) -> str | None:
    """Return how the kernels' results differ from torch's, or None."""
    B, N, capacity = decoder.spec.batch_size, decoder.spec.nodes, decoder.spec.capacity
    limit = KERNEL_TOLERANCE.get(decoder.model.dtype, 2e-2)
    device, draw = decoder.slot.device, torch.Generator(decoder.slot.device).manual_seed(0)
    parents = ((torch.arange(N, device=device) - 1) // 2).clamp_min(0).expand(B, -1)
    above = ancestors(parents, N.bit_length())
    kernels = decoder.reads_masks
    for length in {0, *(n for n in (1022, capacity - N) if 0 < n <= capacity - N)}:
        tokens = torch.randint(decoder.model.head.weight.shape[0], (B, N), generator=draw, device=device)
        mapping = TreeSlots(torch.full((B,), length, device=device), parents, above.sum(-1) - 1, above, decoder.slot)
        decoder.forward(tokens, mapping, extent=capacity)  # a Hugging Face model's cache is allocated by its first pass
        for store in stores_of(decoder):
            store.normal_(generator=draw)
        made = [decoder.forward(tokens, mapping, extent=capacity).hidden for _ in range(3)]
        if any(not torch.equal(one, made[0]) for one in made):
            return f"tree_attention repeats itself differently at {length} tokens"
        decoder.reads_masks = True
        expected = decoder.forward(tokens, mapping, extent=capacity).hidden.double()
        decoder.reads_masks = kernels
        error = ((made[0].double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
        if not error < limit:
            return f"tree_attention is off by {error:.1%} at {length} tokens"
        zeros = torch.zeros(B, device=device)
        chosen = decoder.choose(made[0], mapping.positions, zeros, zeros.long(), random=False)
        if chosen is not None:
            logits = decoder.model.lm_head(made[0])
            short = (logits.amax(-1) - logits.gather(-1, chosen[..., None])[..., 0]) / logits.abs().amax(-1)
            if not short.max().item() < limit:
                return f"choose takes a token {short.max().item():.1%} below the best"
    return None
