"""The target's step: static caches, masks and positions of our own, through the target's native decoder where there is
one, else through its Hugging Face model.

Letters: B rows, N nodes of a step, C tokens of a prefill chunk, E slots shown to attention, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from eval.runtime.distribution import RowSampling
from eval.runtime.triton_step import TritonTargetStep, kernels_fit
from heads.backends.cpu.stack import CpuKVCache
from heads.backends.huggingface import HFCache
from heads.backends.slot_mapping import ancestors, round_up
from heads.backends.torch.architectures import native_decoder, why_not_native
from heads.backends.torch.cache import KVCache
from heads.backends.torch.decoder import NativeDecoder
from heads.errors import UserError, warn_once
from heads.target.encoder_decoder import cache_layers
from heads.target.frozen import Features, FrozenTarget
from heads.tree import Acceptance, Proposal

CHUNK = 256
"""Maximum number of prompt tokens in one prefill step."""
ALIBI_FAMILIES = {"bloom", "mpt"}
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}  # and 0.15 for all narrower types
"""Relative error of hidden states above which a decoder is taken to ignore its mask: far above rounding."""


class TargetStep:
    """The frozen target with the caches of one batch."""

    cache: HFCache | KVCache | CpuKVCache

    def __init__(
        self,
        target: FrozenTarget,
        *,
        batch_size: int,
        capacity: int,
        aux_layer_ids: tuple[int, ...],
        decoder: NativeDecoder | None = None,
        nodes: int = 1,
        strict: bool = False,
    ) -> None:
        """`decoder`: the target's native one; None takes its Hugging Face model. `nodes` of a row in a verify step, and
        `strict`, matter to kernels only (`TritonTargetStep`)."""
        self.target, self.aux_layer_ids, self.decoder, self.batch_size = target, aux_layer_ids, decoder, batch_size
        self.capacity = round_up(capacity)
        self.kernels: TritonTargetStep | None = None
        device = target.device
        if decoder is not None and kernels_fit(target):
            self.kernels = TritonTargetStep(
                target,
                decoder,
                batch_size=batch_size,
                capacity=self.capacity,
                aux_layer_ids=aux_layer_ids,
                nodes=nodes,
                strict=strict,
            )
            self.cache = self.kernels.cache
        elif decoder is None:
            check_family(target)
            layers = cache_layers(target.base, target.config)
            self.cache = HFCache(num_layers=layers, batch_size=batch_size, capacity=self.capacity, device=device)
        else:
            self.cache = decoder.new_cache(batch_size=batch_size, capacity=self.capacity)
            self.cos_sin_table = decoder.cos_sin_table(self.capacity)
        self.slot = torch.arange(self.capacity, device=device)  # (S,)
        self.pads = device.type != "cpu"
        """Whether prompts are padded to few shapes, which kernels and graphs want; a CPU would only compute in vain."""

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
        extent = min(round_up(start + C), self.capacity)
        positions = self.slot[start : start + C] if start + C <= self.capacity else self._clamped(start, C)
        if self.kernels is not None:
            return self.kernels.prefill(row, tokens, positions)
        key = self.slot[:extent]
        if isinstance(self.cache, HFCache):
            self.cache.aim(positions[None], extent=extent, row=row, prompt=True)
        else:
            self.cache.aim(positions[None], extent=extent, row=row)
        if self.decoder is not None:
            return self._features(tokens, positions[None], None, None)
        visible = key[None, None] <= positions[None, :, None]
        return self._features(tokens, positions[None], visible, key[None])

    def verify(self, proposal: Proposal, above: Tensor | None, length: Tensor, extent: int, depth: int) -> Features:
        """Run one pass over a tree: node j of row b is in slot length[b] + j, at position length[b] + its depth.

        above (B, N, N): `heads.backends.slot_mapping.ancestors`, None for a chain and wherever kernels run; length
        (B,): tokens in the cache; extent: slots shown, at least length + N of every row; depth: the most levels that
        the trees have.
        """
        if self.kernels is not None:
            return self.kernels.verify(proposal.tokens, proposal.parents, proposal.depths, length, depth)
        B, N = proposal.tokens.shape
        slots = length[:, None] + self.slot[:N]  # (B, N)
        key = self.slot[:extent]
        visible: Tensor | None
        key_positions: Tensor | None
        self.cache.aim(slots, extent=extent)
        if above is None and self.decoder is not None:
            positions, visible, key_positions = slots, None, None
        elif above is None:
            positions, key_positions = slots, key.expand(B, extent)
            visible = key <= slots[:, :, None]
        else:
            positions = length[:, None] + proposal.depths
            key_positions = key.repeat(B, 1).scatter_(1, slots, positions)
            visible = (key < length[:, None])[:, None].repeat(1, N, 1)
            visible.scatter_(2, slots[:, None].expand(B, N, N), above)
        return self._features(proposal.tokens, positions, visible, key_positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) hidden states after the final norm -> (..., V) logits, float32 or wider."""
        made = None
        if self.kernels is not None:
            made = self.kernels.logits(hidden)
        elif self.decoder is not None:
            made = self.decoder.logits(hidden)
        return self.target.shared.lm_head(hidden) if made is None else made

    def choose(self, hidden: Tensor, positions: Tensor, sampling: RowSampling) -> Tensor:
        """hidden (B, N, D); positions (B, N) of the tokens to be chosen -> (B, N) token ids."""
        chosen = None if self.kernels is None else self.kernels.choose(hidden, positions, sampling)
        return sampling.choose(self.logits(hidden), positions) if chosen is None else chosen

    def compact(self, length: Tensor, acceptance: Acceptance) -> None:
        """Move the accepted nodes to the slots they will keep: the first after `length` (B,), in order."""
        if self.kernels is not None:
            self.kernels.compact(length, acceptance.path, acceptance.accepted)
            return
        path = acceptance.path
        kept = path.shape[1]
        self.cache.compact(length[:, None] + path, length[:, None] + self.slot[:kept])

    def _features(
        self, tokens: Tensor, positions: Tensor, visible: Tensor | None, key_positions: Tensor | None
    ) -> Features:
        if self.decoder is not None:
            assert not isinstance(self.cache, HFCache)
            return self.decoder.features(
                tokens,
                positions=positions,
                visible=visible,
                key_positions=key_positions,
                cache=self.cache,
                cos_sin_table=self.cos_sin_table,
                aux_layer_ids=self.aux_layer_ids,
            )
        assert isinstance(self.cache, HFCache) and visible is not None and key_positions is not None
        return self.target.features(
            tokens,
            positions=positions,
            visible=visible,
            key_positions=key_positions,
            cache=self.cache,
            aux_layer_ids=self.aux_layer_ids,
        )

    def _clamped(self, start: int, C: int) -> Tensor:
        # The padding tail of a padded chunk may reach past the capacity; it all goes to the last slot, which no prompt
        # fills.
        return torch.arange(start, start + C, device=self.slot.device).clamp_(max=self.capacity - 1)


def open_step(
    target: FrozenTarget,
    *,
    batch_size: int,
    capacity: int,
    aux_layer_ids: tuple[int, ...],
    native: bool = True,
    nodes: int = 1,
    strict: bool = False,
) -> TargetStep:
    """The fastest step that was found to be right: native where the architecture is known, unless told otherwise."""
    decoder = native_decoder(target) if native else None
    if decoder is not None:
        step = TargetStep(
            target,
            batch_size=batch_size,
            capacity=capacity,
            aux_layer_ids=aux_layer_ids,
            decoder=decoder,
            nodes=nodes,
            strict=strict,
        )
        try:
            check_masks(step)
            return step
        except UserError as error:
            warn_once(f"{error}; its Hugging Face model is used instead of the native decoder")
    elif native:
        warn_once(f"{target.name}: decoded by its Hugging Face model, slower: {why_not_native(target)}")
    step = TargetStep(target, batch_size=batch_size, capacity=capacity, aux_layer_ids=aux_layer_ids)
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
