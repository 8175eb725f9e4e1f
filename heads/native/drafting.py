"""Heads that recycle their state, on the CPU kernels: what `heads.recurrent.Memory` does, a step of it one call.

Weights are held in bfloat16, as heads are trained: they are a draft's, which the target judges, and half the bytes.

Letters: B batch, W tokens of each, R = B * W rows, D hidden, L taps, Vd draft vocabulary, S cache slots, E of them
shown, d head dimension.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import Observation
from heads.families import additive
from heads.native.attention import GroupedAttention
from heads.native.feedforward import GatedMLP
from heads.native.kernels import ModuleStruct, PassStruct, ProductStruct, load
from heads.native.linear import Norm, Product
from heads.native.stack import KernelStack
from heads.tree import CompiledPick, Proposal


@dataclass(frozen=True)
class KernelModule:
    """One module of a head as the kernels take it, and the tensors it points into."""

    struct: ModuleStruct
    stack: KernelStack
    held: tuple[object, ...]


@dataclass(frozen=True)
class KernelDraft:
    """A whole head, from its weights as they were when this was made."""

    modules: Sequence[KernelModule]
    start: Callable[[Tensor, Tensor], Tensor]
    """The target's features, (R, L * D) and (R, D) -> the state that the first step recycles (R, D) float32."""
    vocab_size: int
    """Vd"""


def kernel_module(
    attention: Any,
    mlp: Any,
    norm: nn.Module,
    output: Tensor,
    *,
    token_norm: nn.Module,
    state_norm: nn.Module,
    input_norm: nn.Module | None = None,
    project: nn.Linear | None = None,
    leave_norm: nn.Module | None = None,
    read_norm: nn.Module | None = None,
    state_first: bool = False,
) -> KernelModule | None:
    """A head's module for the kernels; None where they are not for its weights' device and dtype.

    Token and state are normed each by its own and put side by side (`state_first`: the other way round). A layer with
    an `input_norm` takes their projection for its stream; one without attends from the two, its stream the state.
    What leaves the layer is normed by `leave_norm` if there is one, and by `read_norm` before `output` (Vd, D).
    """
    weight: Tensor = attention.q_proj.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or load() is None:
        return None
    norms = [None if n is None else Norm(n) for n in (token_norm, state_norm, leave_norm, read_norm)]
    entering = None if input_norm is None else Norm(input_norm)
    rest = GroupedAttention(attention, "full_attention", draft=True), Norm(norm), GatedMLP(mlp, draft=True)
    stack = KernelStack.of([(entering, *rest)])
    projection = None if project is None else Product.of(project, draft=True).packed
    reading = Product(output.float(), draft=True).packed
    if stack is None or reading is None:
        return None
    struct = ModuleStruct(
        stack.structs[0],
        ProductStruct() if projection is None else projection.struct,
        reading.struct,
        *(None if n is None else n.weight.data_ptr() for n in norms),
        *(0.0 if n is None else n.eps for n in norms),
        state_first,
    )
    return KernelModule(struct, stack, (norms, projection, reading))


class KernelMemory:
    """What the modules keep of a batch, and a step over it; arguments as `heads.recurrent.Memory` takes them."""

    nowhere = -1
    """The slot of junk: the kernels write it nowhere."""

    def __init__(
        self,
        draft: KernelDraft,
        embed: Callable[[Tensor], Tensor],
        turns: tuple[Tensor, Tensor],
        batch_size: int,
    ) -> None:
        library = load()
        assert library is not None
        cos, sin = (table[0, 0] for table in turns)  # (S, d) each
        half = cos.shape[1] // 2
        self.library, self.draft, self.embed = library, draft, embed
        plain = type(embed) is nn.Embedding and embed.weight.dtype == torch.float32
        self.table: Tensor | None = embed.weight.detach() if plain else None  # type: ignore[attr-defined]
        self.turns = cos.contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], dim=1)
        self.where = [table.data_ptr() for table in self.turns]
        self.references = [ctypes.byref(module.struct) for module in draft.modules]
        self.caches = [m.stack.new_cache(batch_size=batch_size, capacity=len(cos)) for m in draft.modules]
        self.rooms: dict[tuple[int, ...], Tensor] = {}
        self.chains: dict[int, tuple[Tensor, Tensor]] = {}
        """By depth: the parents and depths (B, N) of a chain's nodes."""

    def start(self, taps: Tensor, hidden: Tensor) -> Tensor:
        """(B, W, L * D), (B, W, D) -> (B, W, D)."""
        states: Tensor = self.draft.start(taps.flatten(0, 1), hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return states

    def logits(self, recycled: Tensor) -> Tensor:
        """(B, W, D) -> (B, W, Vd)."""
        B, W, D = recycled.shape
        states = recycled.contiguous()
        room, logits = torch.empty_like(states), states.new_empty(B, W, self.draft.vocab_size)
        self.library.read_out(
            *(self.references[0], states.data_ptr(), room.data_ptr(), logits.data_ptr()),
            *(B * W, D, torch.get_num_threads()),
        )
        return logits

    def step(
        self,
        module: int,
        tokens: Tensor,
        state: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor | None,
        extent: int,
    ) -> Tensor:
        """(B, W, D) -> the state to recycle (B, W, D)."""
        B, W, D = state.shape
        reference, cache = self.references[module], self.caches[module]
        mask = None if visible is None else additive(visible, torch.float32)
        held = [tensor.contiguous() for tensor in (state, positions, slots)]
        states, at, to = (tensor.data_ptr() for tensor in held)
        made = torch.empty_like(held[0])
        step = self._pass(module, (B, W, D, extent), at, to, None if mask is None else mask.data_ptr())
        ids = tokens.contiguous() if self.table is not None else None
        rows = self.table if self.table is not None else self.embed(tokens).to(state.dtype).contiguous()
        self.library.recycle(
            *(reference, ctypes.byref(step), None if ids is None else ids.data_ptr(), rows.data_ptr()),
            *(states, made.data_ptr(), cache.where[0], cache.where[2]),
        )
        return made

    @property
    def single(self) -> bool:
        """Whether to observe and to draft a chain are one call each: for one module, where embeddings are a table's
        rows."""
        return len(self.references) == 1 and self.table is not None

    def draft_chain(
        self,
        pick: CompiledPick,
        kept: Tensor,
        recycled: Tensor,
        root: Tensor,
        length: Tensor,
        depth: int,
        extent: int,
    ) -> Proposal:
        """What `heads.tree.grow` makes of steps, in one call: a chain behind each root (B,), which stands at `length`
        (B,), from the states (B, D) that the first step recycles; kept (Vd,) the target's ids of the draft's."""
        assert self.single and self.table is not None
        (B, D), N = recycled.shape, depth + 1
        if depth not in self.chains:
            node = torch.arange(N).repeat(B, 1)
            self.chains[depth] = (node - 1).clamp_min(0), node
        tokens, scores, ids = root.new_empty(B, N), recycled.new_empty(B, N), root.new_empty(3, B)
        room = recycled.new_empty(B * (3 * D + len(kept) + 1))
        step = self._pass(0, (B, 1, D, extent))
        where = (tensor.data_ptr() for tensor in (kept, self.table, recycled, root, length))
        self.library.draft_chain(
            *(self.references[0], ctypes.byref(step), pick.function, pick.context, *where),
            *(depth, self.caches[0].where[0], self.caches[0].where[2], room.data_ptr(), ids.data_ptr()),
            *(tokens.data_ptr(), scores.data_ptr()),
        )
        return Proposal(tokens, *self.chains[depth], scores)

    def observe(self, observation: Observation, extent: int, recycled: Tensor, root: Tensor, length: Tensor) -> None:
        """Take in true features, in one call, and renew what is drafted from: recycled (B, D), root (B,), length
        (B,)."""
        assert self.single and self.table is not None
        (B, M), D = observation.hidden.shape[:2], recycled.shape[1]
        states = self.draft.start(observation.taps.flatten(0, 1), observation.hidden.flatten(0, 1)).contiguous()
        made, ids = torch.empty_like(states), root.new_empty(3, B, M)
        step = self._pass(0, (B, M, D, extent))
        told = [x.contiguous() for x in (observation.tokens, observation.start, observation.count)]
        self.library.observe(
            *(self.references[0], ctypes.byref(step)),
            *(tensor.data_ptr() for tensor in (*told, self.table, states, made, ids)),
            *(self.caches[0].where[0], self.caches[0].where[2]),
            *(tensor.data_ptr() for tensor in (recycled, root, length)),
        )

    def _pass(
        self,
        module: int,
        shape: tuple[int, int, int, int],
        positions: int | None = None,
        slots: int | None = None,
        mask: int | None = None,
    ) -> PassStruct:
        """A pass through a module, of shape (B, W, D, E); the addresses of where its tokens stand, and of its mask."""
        B, W, D, extent = shape
        room = self.rooms.get(shape)
        if room is None:
            room = self.rooms[shape] = torch.empty(self.library.module_room(self.references[module], *shape))
        return PassStruct(
            *(None, None, *self.where, positions, slots, mask, None, room.data_ptr()),
            *(B, 0, W, D, extent, self.caches[module].capacity, torch.get_num_threads()),
        )
