"""Heads that recycle their state, as `heads.backends.torch.recurrent.TorchRecurrent`; the CPU kernels run each step in
one call.

Weights are stored in bfloat16, in which heads are trained. That halves the bytes, and the target verifies the output.

Letters: B batch, W tokens per row, R = B * W rows, D hidden, L auxiliary layers, Vd draft vocabulary, S cache slots, E
visible slots, d head dimension.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.backends.base import RecurrentSpec, RecurrentSteps
from heads.backends.cpu.draws import Chain, CompiledPick
from heads.backends.cpu.kernels import CompiledProduct, draft_product, in_c
from heads.backends.cpu.library import STRUCTS, loaded
from heads.backends.cpu.stack import CpuStack, signed
from heads.backends.recurrent_parts import HeadParts, ModuleParts
from heads.backends.slot_mapping import Drafted, Observed
from heads.backends.torch.attention import GroupedAttention
from heads.backends.torch.feedforward import GatedMLP
from heads.backends.torch.linear import Norm, Product
from heads.base import Observation
from heads.layers import FULL, SLIDING
from heads.target.families import additive
from heads.tree import Pick, Proposal


class CpuRecurrent(RecurrentSteps):
    """Batch state of the modules and a step over it, with the weights as they were at construction."""

    weight_bytes = 2
    padding_slot = -1
    """Slot number of padding, which the kernels do not write."""

    @classmethod
    def of(cls, spec: RecurrentSpec) -> "CpuRecurrent | None":
        """Return the steps of a head, or None if the kernels do not support it."""
        if spec.parts is None or spec.parts.weight.dtype != torch.float32:
            return None
        stacks = [stack_of(module) for module in spec.parts.modules]
        known = [stack for stack in stacks if stack is not None]
        return cls(spec.parts, known, spec) if len(known) == len(stacks) else None

    def __init__(self, parts: HeadParts, stacks: Sequence[CpuStack], spec: RecurrentSpec) -> None:
        embed, batch_size = spec.embed, spec.batch_size
        self.library, self.parts, self.embed = loaded(), parts, embed
        self.fuse = None if parts.fuse is None else draft_product(parts.fuse)
        self.output: CompiledProduct = in_c(Product(spec.lm_head_weight), draft=True)
        plain = type(embed) is nn.Embedding and embed.weight.dtype == torch.float32
        self.table: Tensor | None = embed.weight.detach() if plain else None  # type: ignore[attr-defined]
        cos, sin = (table[0, 0] for table in spec.cos_sin_table)  # (S, d) each
        self.cos_sin_table = signed((cos, sin))
        self.where = [table.data_ptr() for table in self.cos_sin_table]
        self.stacks, self.held = stacks, list[object]()
        self.structs = [self._struct(*module) for module in zip(parts.modules, stacks, strict=True)]
        self.references = [ctypes.byref(struct) for struct in self.structs]
        self.caches = [stack.new_cache(batch_size=batch_size, capacity=len(cos)) for stack in stacks]
        self.rooms: dict[tuple[int, ...], Tensor] = {}

    def _struct(self, parts: ModuleParts, stack: CpuStack) -> Any:
        """Return a module's struct for the kernels. Keeps the tensors that it points to alive."""
        norms = [
            None if norm is None else Norm(norm)
            for norm in (parts.token_norm, parts.state_norm, parts.leave_norm, parts.read_norm)
        ]
        project = None if parts.project is None else draft_product(parts.project)
        self.held += [norms, project]
        return STRUCTS["Module"](
            stack.structs[0],
            project.struct if isinstance(project, CompiledProduct) else STRUCTS["Product"](),
            self.output.struct,
            *(None if n is None else n.weight.data_ptr() for n in norms),
            *(0.0 if n is None else n.eps for n in norms),
            *(parts.state_first, parts.zero_first, parts.normed_residual),
        )

    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        """Same as `RecurrentSteps.start`: (B, W, L * D), (B, W, D) -> (B, W, D)."""
        made = self.parts.start(aux_hidden_states.flatten(0, 1), hidden.flatten(0, 1), self.fuse)
        return made.view(hidden.shape)

    def normed(self, recycled: Tensor) -> Tensor:
        """Return the state unchanged, since `logits` applies the norm."""
        return recycled

    def logits(self, recycled: Tensor) -> Tensor:
        """Return the logits (B, W, Vd) of recycled states (B, W, D)."""
        B, W, D = recycled.shape
        states = recycled.contiguous()
        room, logits = torch.empty_like(states), states.new_empty(B, W, len(self.output.weight))
        self.library.read_out(
            *(self.references[0], states.data_ptr(), room.data_ptr(), logits.data_ptr()),
            *(B * W, D, torch.get_num_threads()),
        )
        return logits

    def step(
        self, module: int, tokens: Tensor, states: Tensor, rows: Tensor | None, mapping: Observed | Drafted, extent: int
    ) -> tuple[Tensor, Tensor]:
        B, W = tokens.shape
        D = states.shape[2]
        if rows is not None:
            states = states.gather(1, rows[..., None].expand(-1, -1, D))
        visible, window = mapping.visible(module, extent), self.parts.modules[module].window
        if visible is not None and window is not None:  # draft tokens only appear nearer: slot >= position
            visible = visible & (mapping.positions[..., None] - torch.arange(extent) < window)
        reference, cache = self.references[module], self.caches[module]
        mask = None if visible is None else additive(visible, torch.float32)
        held = [tensor.contiguous() for tensor in (states, mapping.positions, mapping.slots(self.padding_slot))]
        given, at, to = (tensor.data_ptr() for tensor in held)
        made = torch.empty_like(held[0])
        step = self._pass(module, (B, W, D, extent), at, to, None if mask is None else mask.data_ptr())
        ids = tokens.contiguous() if self.table is not None else None
        rows = self.table if self.table is not None else self.embed(tokens).to(states.dtype).contiguous()
        self.library.recycle(
            *(reference, ctypes.byref(step), None if ids is None else ids.data_ptr(), rows.data_ptr()),
            *(given, made.data_ptr(), cache.where[0], cache.where[2]),
        )
        return made, made

    @property
    def single(self) -> bool:
        """True if extending and drafting a chain take one call each: with one module, and embeddings that are rows of a
        table."""
        return len(self.references) == 1 and self.table is not None

    def draft_chain(
        self, pick: Pick, kept: Tensor, recycled: Tensor, root: Tensor, length: Tensor, depth: int, extent: int
    ) -> Proposal | None:
        if not (self.single and self.table is not None and isinstance(pick, CompiledPick)):
            return None
        B, D = recycled.shape
        chain, room = Chain(pick, root, length, depth, len(kept), kept), recycled.new_empty(3, B, D)
        self.library.draft_chain(
            *(self.references[0], ctypes.byref(self._pass(0, (B, 1, D, extent))), chain.reference),
            *(tensor.data_ptr() for tensor in (self.table, recycled)),
            *(self.caches[0].where[0], self.caches[0].where[2], room.data_ptr()),
        )
        return chain.proposal()

    def extend(
        self, observation: Observation, slot: Tensor, extent: int, recycled: list[Tensor], root: Tensor, length: Tensor
    ) -> None:
        if not self.single or self.table is None:
            super().extend(observation, slot, extent, recycled, root, length)
            return
        B, M, D = observation.hidden.shape
        states = self.start(observation.aux_hidden_states, observation.hidden).contiguous()
        made, ids = torch.empty_like(states), root.new_empty(3, B, M)
        step = self._pass(0, (B, M, D, extent))
        accepted_tokens = [x.contiguous() for x in (observation.tokens, observation.start, observation.count)]
        self.library.extend(
            *(self.references[0], ctypes.byref(step)),
            *(tensor.data_ptr() for tensor in (*accepted_tokens, self.table, states, made, ids)),
            *(self.caches[0].where[0], self.caches[0].where[2]),
            *(tensor.data_ptr() for tensor in (recycled[0], root, length)),
        )

    def _pass(
        self,
        module: int,
        shape: tuple[int, int, int, int],
        positions: int | None = None,
        slots: int | None = None,
        mask: int | None = None,
    ) -> Any:
        """Return the struct of a pass of shape (B, W, D, E) through a module, given the addresses of its positions,
        slots and mask."""
        B, W, D, extent = shape
        room = self.rooms.get(shape)
        if room is None:
            room = self.rooms[shape] = torch.empty(self.library.module_room(self.references[module], *shape))
        return STRUCTS["Pass"](
            *(None, None, *self.where, positions, slots, mask, mask, room.data_ptr()),
            *(B, 0, W, D, extent, self.caches[module].capacity, torch.get_num_threads()),
        )


def stack_of(parts: ModuleParts) -> CpuStack | None:
    """Return a module's layer for the kernels, None if they do not support it."""
    entering = None if parts.input_norm is None else Norm(parts.input_norm)
    kind = FULL if parts.window is None else SLIDING
    attention = in_c(GroupedAttention(parts.attention, kind, draft=True), draft=True)
    mlp = in_c(GatedMLP(parts.mlp, draft=True), draft=True)
    return CpuStack.of([(entering, attention, Norm(parts.norm), mlp)], parts.window)
