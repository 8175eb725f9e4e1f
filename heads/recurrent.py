"""What heads share that draft by recycling their own state: training through all steps, drafting over a cache.

A step reads the embedding of one token and a state, and gives the state to recycle. EAGLE-3 (arXiv 2503.01840) applies
one module at every step; DeepSeek's multi-token prediction (arXiv 2412.19437, section 2.2) has one for each of J steps,
and the last of them may be applied on and on (FastMTP, arXiv 2509.18362, has no other):

    a^i_t = module_j(e(x_{t+1+i}), a^{i-1}_t),  j = min(i, J - 1)      step i of slot t; a^{-1}_t: the target's features
    q_i   = softmax(head(normed(a^i_t)))                               predicts x_{t+2+i}

Drafting goes token by token. When x_{p+1} is decided, or drafted on a path, module j reads it beside what module j - 1
made of the token before, which is step j of slot p - j; all modules keep what they make of x_{p+1} in slot p of their
own caches, at rotary position p. So a module sees its own keys of the tokens before, and training lets it see the same:
at step j < J module j attends causally to its keys of the slots up to t; the last one, applied again, attends to its
first keys of the slots up to t and to its own later keys of slot t (the training-time test of EAGLE-3).

Letters: B batch, T tokens, M observed rows, D hidden, Vd draft vocabulary, K depth, J modules, W nodes of one level, S
cache slots, E of them shown, P tokens expanded in a round, d head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.attention import causal_attention
from heads.base import Batch, HeadLoss, Observation, Pick, TargetEnds
from heads.cache import round_up
from heads.errors import UserError
from heads.labels import chain_metrics, label_slots, supervised
from heads.layers import Attend, masked_attention
from heads.losses import draft_loss
from heads.native.drafting import KernelDraft, KernelMemory
from heads.tree import CompiledPick, Proposal, TreeShape, grow, is_chain, scratch_slots

AHEAD = 2
"""Step i of slot t predicts the token at t + AHEAD + i."""

Turn = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, (B, 1, T, d) each."""


@dataclass
class RecurrentState:
    """What one batch of sequences drafts with.

    Slot p of a module's cache holds its key of token x_{p+1}. Drafted tokens go to the slots behind the observed ones,
    which true tokens take over later.
    """

    shape: TreeShape
    memory: "Memory | KernelMemory"
    slot: Tensor  # (S,) int64, 0 .. S - 1
    root: Tensor  # (B,) int64
    length: Tensor  # (B,) int64, the root's position: slots before it are observed
    recycled: list[Tensor]  # by module, (B, D): what it made of the root

    def extent(self, tokens: int) -> int:
        """Slots that attention need look at when `tokens` more stand behind the observed ones; a device that the host
        would have to wait for looks at all."""
        if self.length.device.type != "cpu":
            return len(self.slot)
        return min(round_up(int(self.length.max()) + tokens), len(self.slot))


class Recurrent(nn.Module):
    """A head that recycles its state: the part that is the same whatever a step computes."""

    config: Any
    """Its `hidden_size`, `depth` (steps trained), `draft_vocab_size` and `loss` are read here."""
    kept: Tensor
    """(Vd,) int64, the target id of each draft id."""
    num_modules: int = 1

    def start(self, taps: Tensor, hidden: Tensor) -> Tensor:
        """The target's features, (..., L * D) and (..., D) -> the state that the first step recycles (..., D)."""
        raise NotImplementedError

    def step(self, module: int, embedding: Tensor, state: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """One step, the same in training and in drafting: (B, T, D) embeddings and states -> the state to recycle."""
        raise NotImplementedError

    def normed(self, recycled: Tensor) -> Tensor:
        """What the output head reads of a recycled state."""
        return recycled

    def readout(self, ends: TargetEnds) -> Tensor:
        """(Vd, D) the output head."""
        raise NotImplementedError

    def logits(self, normed: Tensor, readout: Tensor) -> Tensor:
        """(..., D) -> (..., Vd)."""
        return nn.functional.linear(normed, readout)

    def turn(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """Cosines and sines of rotary positions (B, T)."""
        raise NotImplementedError

    def counts(self, loss_mask: Tensor, documents: Tensor) -> Tensor:
        K = self.config.depth
        return torch.stack([supervised(loss_mask, documents, AHEAD + k).sum() for k in range(K)]).float()

    def unroll(self, batch: Batch, depth: int) -> list[Tensor]:
        """The normed states (B, T, D) of the first `depth` steps."""
        state = self.start(batch.taps, batch.hidden)
        normed = []
        for i in range(depth):
            if i < self.num_modules:
                attend = _attend_by_steps(batch.documents)
            embedding = batch.embeddings.roll(-1 - i, dims=1)  # slot t sees x_{t+1+i}; what wraps around has no label
            turn = self.turn(batch.positions + i, state.dtype)
            state = self.step(min(i, self.num_modules - 1), embedding, state, turn, attend)
            normed.append(self.normed(state))
        return normed

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        row, label, inside, valid = label_slots(batch, AHEAD, self.config.depth)
        unrolled = zip(self.unroll(batch, self.config.depth), inside, strict=True)
        states = torch.stack([state[row, slot] for state, slot in unrolled])  # (K, R, D)
        loss, sums, correct, overlap = draft_loss(
            states,
            self.readout(batch.ends),
            valid,
            batch.hidden[row, label - 1],
            batch.ends.logits,
            self.kept,
            scale,
            loss=self.config.loss,
        )
        return HeadLoss(loss, sums, chain_metrics(correct, valid, overlap, row, inside, batch.tokens.shape))

    def kernel_draft(self, readout: Tensor) -> KernelDraft | None:
        """The head on the CPU kernels, where they know how; readout (Vd, D)."""
        return None

    @torch.no_grad()
    def new_state(self, ends: TargetEnds, *, batch_size: int, capacity: int, shape: TreeShape) -> RecurrentState:
        config, weight = self.config, next(self.parameters())
        if shape.top_k > config.draft_vocab_size:
            raise UserError(
                f"tree {shape}: {shape.top_k} children of a node, the head drafts {config.draft_vocab_size}"
            )
        B, slots = batch_size, round_up(capacity + max(shape.depth, scratch_slots(shape)) + 1)
        ids = torch.zeros(2, B, dtype=torch.int64, device=weight.device)
        turns = self.turn(torch.arange(slots, device=weight.device)[None], weight.dtype)
        readout = self.readout(ends).to(weight.dtype)
        kernels = self.kernel_draft(readout)
        return RecurrentState(
            shape=shape,
            memory=Memory(self, ends.embed, readout, turns, B)
            if kernels is None
            else KernelMemory(kernels, ends.embed, turns, B),
            slot=torch.arange(slots, device=weight.device),
            root=ids[0],
            length=ids[1],
            recycled=[weight.new_zeros(B, config.hidden_size) for _ in range(self.num_modules)],
        )

    def reset_rows(self, state: RecurrentState, rows: Tensor) -> None:
        state.length.masked_fill_(rows, 0)

    @torch.no_grad()
    def observe(self, state: RecurrentState, observation: Observation) -> None:
        tokens, start, count, memory = observation.tokens, observation.start, observation.count, state.memory
        M = observation.hidden.shape[1]
        if isinstance(memory, KernelMemory) and memory.single:
            memory.observe(observation, state.extent(M), state.recycled[0], state.root, state.length)
            return
        positions = (start[:, None] + state.slot[:M]).clamp_max(len(state.slot) - 2)  # (B, M)
        slots = torch.where(state.slot[:M] < count[:, None], positions, memory.nowhere)
        extent = state.extent(M)
        live, last = count > 0, (count - 1).clamp_min(0)
        above = memory.start(observation.taps, observation.hidden)
        for module in range(self.num_modules):
            visible = None
            if module > 0:
                key = state.slot[:extent]
                visible = (key <= positions[..., None]) & _from_first_slot(key, positions[..., None], module)
            made = memory.step(module, tokens[:, 1:], above, positions, slots, visible, extent)
            newest = state.recycled[module]
            if module + 1 < self.num_modules:
                above = torch.cat([newest[:, None], made[:, :-1]], dim=1)  # what it made of the token before
            final = made.gather(1, last[:, None, None].expand(-1, 1, made.shape[2]))[:, 0]
            newest.copy_(torch.where(live[:, None], final, newest))
        state.root.copy_(torch.where(live, tokens.gather(1, count[:, None])[:, 0], state.root))
        state.length.copy_(torch.where(live, start + count, state.length))

    @torch.no_grad()
    def propose(self, state: RecurrentState, pick: Pick) -> Proposal:
        memory, J, chain = state.memory, self.num_modules, state.shape.top_k <= 1
        extent = state.extent(max(state.shape.depth, scratch_slots(state.shape)))
        if (
            is_chain(state.shape)
            and isinstance(pick, CompiledPick)
            and isinstance(memory, KernelMemory)
            and memory.single
        ):
            newest, depth = state.recycled[0], state.shape.depth
            return memory.draft_chain(pick, self.kept, newest, state.root, state.length, depth, extent)
        length = state.length[:, None]
        key = state.slot[:extent]
        places = key.repeat(len(length), 1)  # (B, E), the position of the token in each slot
        recycled = [made[:, None] for made in state.recycled]  # by module, (B, W, D) at the level above

        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            nonlocal recycled
            W = tokens.shape[1]
            positions = length - 1 + level  # (B, 1): one position for the whole level
            seen: Tensor | None = None
            if chain:  # a chain's tokens stand in the slots that they keep if they are accepted
                slots = positions
                if J > 1:
                    seen = (key <= positions)[:, None]
            else:
                slots, positions = length + paths[..., -1], positions.expand(-1, W)
                places.scatter_(1, slots, positions)
                seen = (key < length)[:, None].repeat(1, W, 1)
                seen.scatter_(2, length[..., None] + paths, True)
            made = list(recycled)
            for module in range(min(level, J - 1), J):
                above = recycled[module - 1 if level <= module else module]
                if not chain:
                    above = above.gather(1, rows[..., None].expand(-1, -1, above.shape[2]))
                if module > 0 and seen is not None:
                    seen = seen & _from_first_slot(places, positions[:, :1], module)[:, None]
                made[module] = memory.step(module, tokens, above, positions, slots, seen, extent)
            recycled = made
            return memory.logits(made[min(level, J - 1)])

        first = memory.logits(recycled[0])
        return grow(state.shape, state.root, state.length, first, pick, expand, self.kept)

    @torch.no_grad()
    def foresees(self, batch: Batch, depth: int) -> Tensor:
        readout = self.readout(batch.ends)
        guesses = [self.kept[self.logits(normed, readout).argmax(-1)] for normed in self.unroll(batch, depth)]
        return torch.stack([guess == batch.tokens.roll(-AHEAD - k, dims=1) for k, guess in enumerate(guesses)])


class Memory:
    """What the modules keep of a batch, and a step over it.

    (B, W) tokens, positions and slots, (B, W, D) states; visible (B, W, E) over the first E slots, None where
    each token sees the slots up to its own.
    """

    def __init__(
        self, head: Recurrent, embed: Callable[[Tensor], Tensor], readout: Tensor, turns: Turn, batch_size: int
    ) -> None:
        self.head, self.embed, self.readout = head, embed, readout  # (Vd, D)
        slots = turns[0].shape[2]
        self.nowhere = slots - 1  # the slot of junk: no token that is read ever stands there
        self.turns = turns[0][0, 0], turns[1][0, 0]  # (S, d) each
        self.slot = torch.arange(slots, device=turns[0].device)
        self.row = torch.arange(batch_size, device=turns[0].device)[:, None]
        forms = [self._form((turns[0][:, :, :1], turns[1][:, :, :1]), module) for module in range(head.num_modules)]
        new = next(head.parameters()).new_zeros
        self.keys = [new(batch_size, heads, slots, width) for (heads, width), _ in forms]
        self.values = [new(batch_size, heads, slots, width) for _, (heads, width) in forms]

    def _form(self, turn: Turn, module: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and width of a module's keys, and of its values: whatever its block hands to attention."""
        forms: list[tuple[int, int]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forms.extend((x.shape[1], x.shape[3]) for x in (k, v))
            return q.new_zeros(*q.shape[:3], v.shape[3])

        nothing = next(self.head.parameters()).new_zeros(1, 1, self.head.config.hidden_size)
        self.head.step(module, nothing, nothing, turn, attend)
        return forms[0], forms[1]

    def start(self, taps: Tensor, hidden: Tensor) -> Tensor:
        return self.head.start(taps, hidden)

    def logits(self, recycled: Tensor) -> Tensor:
        return self.head.logits(self.head.normed(recycled), self.readout)

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
        keys, values = self.keys[module], self.values[module]
        if visible is None:
            visible = self.slot[:extent] <= positions[..., None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[self.row, :, slots] = k.transpose(1, 2)
            values[self.row, :, slots] = v.transpose(1, 2)
            return masked_attention(q, keys[:, :, :extent], values[:, :, :extent], visible)

        turn = self.turns[0][positions][:, None], self.turns[1][positions][:, None]
        return self.head.step(module, self.embed(tokens), state, turn, attend)


def _attend_by_steps(documents: Tensor) -> Attend:
    """Training's attention of one module: causal at its first use; later uses see their slot's own keys too."""
    base: list[Tensor] = []
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if base:
            keys.append(k)
            values.append(v)
        else:
            base.extend((k, v))
        return causal_attention(q, base[0], base[1], documents, keys, values)

    return attend


def _from_first_slot(places: Tensor, own: Tensor, module: int) -> Tensor:
    """Which keys a module may see: at the first `module` tokens of a text its slot would lie before the text, and what
    it makes of them is junk. Such a token (its place is `own`) sees itself, so that the junk is finite."""
    return places >= own.clamp_max(module)
