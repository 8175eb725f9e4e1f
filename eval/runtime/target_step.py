"""The target's step: prompts and trees through its cached decoder, and what it chooses.

Letters: B rows, N nodes of a step, C tokens of a prefill chunk, E slots shown to attention, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from eval.runtime.distribution import RowSampling
from heads.backends.base import Backend, CachedDecoder
from heads.backends.huggingface import HFDecoder
from heads.backends.slot_mapping import CacheSpec, Observed, Verified, ancestors, round_up
from heads.errors import UserError, warn_once
from heads.target.frozen import Features, FrozenTarget
from heads.tree import Acceptance, Proposal

CHUNK = 256
"""Maximum number of prompt tokens in one prefill step."""
ALIBI_FAMILIES = {"bloom", "mpt"}
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}  # and 0.15 for all narrower types
"""Relative error of hidden states above which a decoder is taken to ignore its mask: far above rounding."""


class TargetStep:
    """The frozen target with the caches of one batch."""

    def __init__(self, target: FrozenTarget, decoder: CachedDecoder, *, pads: bool = False) -> None:
        """`pads`: whether prompts are padded to few shapes, which kernels and graphs want; a CPU would only compute in
        vain."""
        self.target, self.decoder, self.pads = target, decoder, pads
        self.batch_size, self.capacity = decoder.spec.batch_size, decoder.spec.capacity
        # One more than there are, so that what a padded chunk has beyond them goes to the last, which no prompt fills.
        self.slot = torch.arange(self.capacity + 1, device=target.device)

    def chunk_size(self, remaining: int) -> int:
        """Return the number of slots of the next prefill step; with padding a power of two, less than half of it
        unused. An encoder reads a prompt at once."""
        size = max(16, 1 << (remaining - 1).bit_length()) if self.pads else remaining
        return size if self.target.start_token is not None else min(CHUNK, size)

    def prefill(self, row: int, tokens: Tensor, start: int) -> Features:
        """Take one chunk of a prompt, tokens (1, C) at positions start .., into a row's cache.

        One row at a time: what a request computes then cannot depend on its neighbours. Tokens past the prompt's end
        are padding whose keys later tokens overwrite before anything may see them.
        """
        C = tokens.shape[1]
        places = Observed(self.slot[start : start + 1], None, self.slot, C)
        extent = min(round_up(start + C), self.capacity)
        return self.decoder.forward(tokens, places, extent=extent, row=row, prompt=True)

    def verify(self, proposal: Proposal, above: Tensor | None, length: Tensor, extent: int, depth: int) -> Features:
        """Run one pass over a tree: node j of row b is in slot length[b] + j, at position length[b] + its depth.

        above (B, N, N): `heads.backends.slot_mapping.ancestors`, None for a chain and where the decoder reads no masks;
        length (B,): tokens in the cache; extent: slots shown, at least length + N of every row; depth: the most levels
        that the trees have.
        """
        places = Verified(length, proposal.parents, proposal.depths, above, depth, self.slot)
        return self.decoder.forward(proposal.tokens, places, extent=extent)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) hidden states after the final norm -> (..., V) logits, float32 or wider."""
        return self.decoder.logits(hidden)

    def choose(self, hidden: Tensor, positions: Tensor, sampling: RowSampling) -> Tensor:
        """hidden (B, N, D); positions (B, N) of the tokens to be chosen -> (B, N) token ids.

        Rows with filters need the whole distribution; what the others choose must not depend on there being such rows.
        """
        fused = None
        if not sampling.filtered or len(hidden) > 1:
            fused = self.decoder.choose(hidden, positions, sampling.temperature, sampling.seed, random=sampling.random)
        if fused is not None and not sampling.filtered:
            return fused
        chosen = sampling.choose(self.logits(hidden), positions)
        return chosen if fused is None else torch.where(sampling.filters()[:, None], chosen, fused)

    def compact(self, start: Tensor, acceptance: Acceptance) -> None:
        """Move the accepted nodes to the slots they will keep: the first behind `start` (B,), in order."""
        self.decoder.compact(start, acceptance.path, acceptance.accepted)


def open_step(target: FrozenTarget, backend: Backend, spec: CacheSpec) -> TargetStep:
    """The target's step by a backend, or, where that was not asked for by name and is found to be wrong, by the Hugging
    Face model."""
    check_family(target)
    step = TargetStep(target, backend.decoder(target, spec), pads=not backend.on_host)
    try:
        check_masks(step)
    except UserError as error:
        if step.decoder.native is None or backend.is_required:
            raise
        warn_once(f"{error}; its Hugging Face model is used instead of the native decoder")
        step = TargetStep(target, HFDecoder(target, spec), pads=not backend.on_host)
        check_masks(step)
    return step


def check_family(target: FrozenTarget) -> None:
    """Refuse targets whose attention takes no mask from the caller. Recurrent families are no `FrozenTarget` to begin
    with."""
    config = target.config
    if getattr(config, "alibi", False) or config.model_type in ALIBI_FAMILIES:
        raise UserError(
            f"{target.name}: the runtime cannot verify drafts on {config.model_type}: its alibi position biases "
            "are built from a 2-D mask; use a target with rotary or learned positions"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise UserError(f"{target.name}: attention {attention!r} takes no 4-D mask; load the target with sdpa or eager")


def check_masks(step: TargetStep) -> None:
    """Verify a small tree and compare it with the model's own forward pass over each path.

    No list of families is ever complete, and a decoder that ignores the positions or the mask it is given raises
    nothing: its output would merely be wrong. Leaves padding in the first slots of every row.
    """
    target, P = step.target, 4
    device = target.device
    ids = target.sample(P + 5, starts=(P - 1,))[0]
    prompt, nodes = ids[:P], ids[P:]
    parents = torch.tensor([[0, 0, 0, 1, 2]], device=device)  # a root, two children, a child of each
    depths = torch.tensor([[0, 1, 1, 2, 2]], device=device)
    B = step.batch_size
    for row in range(B):
        step.prefill(row, prompt[None], 0)
    proposal = Proposal(nodes.expand(B, -1), parents.expand(B, -1), depths.expand(B, -1), torch.zeros(B, 5))
    length = torch.full((B,), P, device=device)
    extent = min(round_up(P + 5), step.capacity)
    features = step.verify(proposal, ancestors(proposal.parents, 2), length, extent, 2)
    paths = torch.stack([torch.cat([prompt, nodes[path]]) for path in torch.tensor([[0, 1, 3], [0, 2, 4]])])
    true = target.alone(paths)[:, -3:]  # (2, 3, D)
    found = features.hidden[:, [[0, 1, 3], [0, 2, 4]]].double()  # (B, 2, 3, D)
    error = ((found - true.double()).norm(dim=-1) / true.double().norm(dim=-1)).max().item()
    if not error < TOLERANCE.get(target.dtype, 0.15):
        raise UserError(
            f"{target.name}: {target.config.model_type} does not take tree masks and positions as they are given "
            f"(hidden states off by {error:.1%}); it cannot be a target here"
        )
