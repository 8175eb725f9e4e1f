"""Heads that recycle their own state: training through all steps, and drafting with a KV cache.

A step reads a state and the embedding of one token, and returns the state to recycle. EAGLE-3 (arXiv 2503.01840) and
FastMTP (arXiv 2509.18362) apply one module at every step. DeepSeek's multi-token prediction (arXiv 2412.19437, section
2.2) has J modules, one per step; the last one is applied at any further steps:

    a^i_t = module_j(e(x_{t+1+i}), a^{i-1}_t),  j = min(i, J - 1)      step i of slot t; a^{-1}_t: the target's features
    q_i   = softmax(head(normed(a^i_t)))                               predicts x_{t+2+i}

Drafting goes token by token. When x_{p+1} is decided, or drafted on a path, module j reads it together with the
previous module's output for the token before; this is step j of slot p - j. Each module keeps its key of x_{p+1} in
slot p of its own cache, at rotary position p. So a module sees its own keys of all tokens before. Training shows it the
same keys: at step j < J module j attends causally to its keys of the slots up to t. When the last module is applied
again, it attends to its first keys of the slots up to t and to its later keys of slot t (EAGLE-3's training-time test).

Letters: B batch, T tokens, D hidden, Vd draft vocabulary, K depth, J modules, W nodes of one level.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heads.core.contract import (
    ACTIVATION_SHARE,
    Batch,
    DraftHead,
    HeadLoss,
    Observation,
    Rows,
    SharedLayers,
    StepCost,
)
from heads.core.errors import UserError
from heads.core.host_memory import total_memory
from heads.core.tree import Pick, Proposal, TreeShape, check_width, scratch_slots
from heads.kernels.slots import DraftSlots, PrefillSlots
from heads.kernels.tree_attention import Attend
from heads.parts.labels import counts_by_depth, label_slots, supervised
from heads.parts.losses import draft_loss
from heads.parts.rotary import CosSin, Rotary
from heads.parts.slot_state import SlotState, advance_root, copy_last
from heads.parts.step_cost import ATTENTION_PRODUCTS, Widths, flops
from heads.parts.tree_growth import grow
from heads.parts.ttt_attention import causal_attention
from heads.targets.cache import Forms
from heads.targets.masks import additive

AHEAD = 2
"""Step i of slot t predicts the token at t + AHEAD + i."""


def device_memory(device: torch.device) -> int:
    """Return the bytes of memory of the GPU, or of the machine or container for other devices."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return total_memory()


class RecyclingState(SlotState):
    """State of one batch. Slot p of a module's cache holds its key of token x_{p+1}."""

    recycled: list[Tensor]  # by module, (B, D): its output for the root


class Recycling(nn.Module, DraftHead):
    """Base class of heads that recycle their state. It implements all that does not depend on what a step computes."""

    config: Any
    """Config of the head. This class reads `hidden_size`, `draft_vocab_size` and `loss`."""
    draft_to_target: Tensor
    """(Vd,) int64, target id of each draft id."""
    num_modules: int = 1
    layers_per_module: int = 1
    """Number of attention layers that a step passes through."""
    sliding_window: int | None = None
    """Number of positions that attention sees, the token's own included. None: all."""
    cos_sin: Rotary
    kept_widths: tuple[int, int, int]
    """Arguments of `Widths.kept` for a step."""
    zero_first: bool = False
    """True if a step reads zeros in place of the token at position 0."""

    def shared_layers(self, shared: SharedLayers) -> SharedLayers:
        """Return the target's shared layers, with the head's own in their place if it has any."""
        return shared

    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        """Return the state (..., D) that the first step recycles, from the target's features (..., L * D) and
        (..., D)."""
        raise NotImplementedError

    def step(self, module: int, embedding: Tensor, state: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        """Run one step, the same in training and in drafting: embeddings and states (B, T, D) -> states to recycle
        (B, T, D). Every layer calls `attend` once, in order."""
        raise NotImplementedError

    def masked(self, embedding: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings (B, T, D) of tokens at rotary positions (B, T), as a step reads them."""
        return embedding.masked_fill((positions == 0)[..., None], 0.0) if self.zero_first else embedding

    def normed(self, recycled: Tensor) -> Tensor:
        """Return the input of the output head for a recycled state."""
        return recycled

    def lm_head_weight(self, shared: SharedLayers) -> Tensor:
        raise NotImplementedError

    def logits(self, normed: Tensor, lm_head_weight: Tensor) -> Tensor:
        """Return the logits of normed states: (..., D) -> (..., Vd)."""
        return nn.functional.linear(normed, lm_head_weight)

    def draw_later_slots(self, rows: Rows) -> Tensor | None:
        """Return the slots (N,), ascending, that go through the steps after a module's own first; None: all."""
        T = rows.tokens.shape[1]
        count = ceil(T * self.config.later_slots)
        if count == T:
            return None
        draw = torch.Generator().manual_seed(rows.seed)
        return torch.randperm(T, generator=draw)[:count].sort().values.to(rows.tokens.device)

    def counts(self, rows: Rows) -> Tensor:
        slots = self.draw_later_slots(rows)
        if slots is None:
            return counts_by_depth(rows, AHEAD, self.depth)
        chosen = torch.zeros_like(rows.loss_mask)
        chosen[:, slots] = True
        labels = (supervised(rows, AHEAD + k) for k in range(self.depth))  # by the label, AHEAD + k after its slot
        return torch.stack(
            [
                (each if k < self.num_modules else each & chosen.roll(AHEAD + k, 1)).sum()
                for k, each in enumerate(labels)
            ]
        ).float()

    def unroll(self, batch: Batch, depth: int, slots: Tensor | None = None) -> list[Tensor]:
        """Return the normed states (B, T, D) of the first `depth` steps; those after the modules' own first have only
        `slots` (N,), if there are any: (B, N, D)."""
        state = self.start(batch.aux_hidden_states, batch.hidden)
        shared = self.shared_layers(batch.shared)
        embeddings = batch.embeddings if shared is batch.shared else shared.embed_tokens(batch.tokens)
        step: Callable[..., tuple[Tensor, ...]] = self.step_of_slots
        if torch.is_grad_enabled() and self.recomputes(state, depth):
            step = partial(checkpoint, self.step_of_slots, use_reentrant=False, preserve_rng_state=False)
        normed = []
        earlier: list[Tensor] = []
        for i in range(depth):
            if i < self.num_modules:
                earlier = []
            of = slots if i >= self.num_modules else None
            if of is not None and i == self.num_modules:
                state = state[:, of]
            state, *keys_values = step(i, embeddings, batch.positions, batch.documents, of, state, *earlier)
            earlier += keys_values
            normed.append(self.normed(state))
        return normed

    def step_of_slots(
        self,
        i: int,
        embeddings: Tensor,
        positions: Tensor,
        documents: Tensor,
        slots: Tensor | None,
        state: Tensor,
        *earlier: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run step i for all slots, or for `slots` (N,), of which the state then is. `earlier`: keys and values of each
        layer in each of the module's previous steps. Returns the state, and keys and values of each layer.

        A module attends causally at its first step. Later steps also see their own slot's keys of the steps in between.
        """
        keys_values: list[Tensor] = []
        per_step = 2 * self.layers_per_module

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = [*earlier[len(keys_values) :: per_step], k]
            values = [*earlier[len(keys_values) + 1 :: per_step], v]
            keys_values.extend((k, v))
            return causal_attention(q, keys[0], values[0], documents, keys[1:], values[1:], self.sliding_window, slots)

        embedding = embeddings.roll(-1 - i, dims=1)  # slot t reads x_{t+1+i}; tokens that wrap around have no label
        if slots is not None:
            embedding, positions = embedding[:, slots], positions[:, slots]
        embedding = self.masked(embedding, positions + i)
        cos_sin = self.cos_sin(positions + i, state.dtype)
        state = self.step(min(i, self.num_modules - 1), embedding, state, cos_sin, attend)
        return state, *keys_values

    def recomputes(self, state: Tensor, depth: int) -> bool:
        """Return True if the backward pass should recompute the steps that begin with `state` (B, T, D).

        The answer depends only on shapes and the device, because processes that share a head's weights have to agree.
        """
        most: float | None = self.max_activation_bytes
        if most is None:
            most = ACTIVATION_SHARE * device_memory(state.device)
        return self.activation_bytes(state[..., 0].numel(), depth, state.element_size()) > most

    def activation_bytes(self, rows: int, depth: int, width: int) -> int:
        widths = 4 * self.config.intermediate_size + 10 * self.config.hidden_size
        return int(self.passes(depth) * rows * self.layers_per_module * widths * width)

    def passes(self, depth: int) -> float:
        """Return how many times all slots the slots of `depth` steps are."""
        later = max(0, depth - self.num_modules)
        return depth - later + later * float(self.config.later_slots)

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        row, label, inside, valid = label_slots(batch, AHEAD, self.depth)
        slots = self.draw_later_slots(batch)
        unrolled = self.unroll(batch, self.depth, slots)
        if slots is None:
            states = [state[row, slot] for state, slot in zip(unrolled, inside, strict=True)]
        else:
            place = torch.full_like(batch.tokens[0], -1)
            place[slots] = torch.arange(len(slots), device=place.device)
            inside[self.num_modules :] = place[inside[self.num_modules :]]
            valid = valid & (inside >= 0)
            each = zip(unrolled, inside, valid, strict=True)
            states = [state[row[found], slot[found]] for state, slot, found in each]
        return draft_loss(
            states,
            self.lm_head_weight(batch.shared),
            valid,
            batch.hidden[row, label - 1],
            batch.shared.lm_head,
            self.draft_to_target,
            scale,
            loss=self.config.loss,
        )

    def step_cost(self, batch_size: int, length: int, *, width: int, most: int) -> StepCost:
        N = batch_size * length
        K = self.passes(self.depth)
        config = self.config
        sizes = Widths.of(self.config)
        outputs = self.outputs
        start = flops(*self.starting)
        layers = self.layers_per_module
        work = N * K * (flops(self) - flops(*outputs) - start) / self.num_modules
        work += N * start * 2 / 3  # its input needs no gradient
        work += layers * K * N * length * 2 * ATTENTION_PRODUCTS * sizes.queries / 2  # half of all pairs: it is causal
        row = width * layers * sizes.kept(*self.kept_widths)
        kept, backward = K * N * (row + (4 - width) * config.hidden_size), 0  # embeddings stay in float32
        if self.activation_bytes(N, self.depth, width) > most:  # only states, keys and values of each step are kept
            kept = K * N * width * 2 * (config.hidden_size + layers * sizes.keys)
            backward = N * row
            work = work * 4 / 3
        backward += 2 * width * sizes.inner * N
        rows = round(N * K / self.depth)
        return StepCost(work, round(kept), rows, len(self.draft_to_target), N, N, round(backward), outputs)

    @property
    def outputs(self) -> Sequence[nn.Linear]:
        """The head's own output head, if it has one."""
        return ()

    @property
    def starting(self) -> Sequence[nn.Module]:
        """Modules that only `start` reads."""
        return ()

    def check_draft(self, shape: TreeShape) -> None:
        check_width(shape, self.config.draft_vocab_size)
        if self.sliding_window is not None and shape.depth >= self.sliding_window:
            raise UserError(
                f"tree {shape}: {shape.depth} levels, a head whose window is {self.sliding_window} drafts fewer tokens "
                "than that; ask for no more"
            )

    @torch.no_grad()
    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> RecyclingState:
        self.check_draft(shape)
        own = self.shared_layers(shared)
        weight = next(self.parameters())
        state = RecyclingState(
            self,
            shape,
            batch_size=batch_size,
            slots=capacity + max(shape.depth, scratch_slots(shape)) + 1,
            layers=self.num_modules * self.layers_per_module,
            forms=self.forms(),
            lm_head_weight=self.lm_head_weight(own),
            embed=own.embed_tokens,
        )
        state.recycled = [weight.new_zeros(batch_size, self.config.hidden_size) for _ in range(self.num_modules)]
        return state

    def forms(self) -> Forms:
        """Return the forms of the keys and values that a step passes to attention."""
        forms: list[tuple[int, int]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            forms.extend((x.shape[1], x.shape[3]) for x in (k, v))
            return q.new_zeros(*q.shape[:3], v.shape[3])

        weight = next(self.parameters())
        nothing = weight.new_zeros(1, 1, self.config.hidden_size)
        first = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
        self.step(0, nothing, nothing, self.cos_sin(first, weight.dtype), attend)
        return forms[0], forms[1]

    def draft_step(
        self,
        state: RecyclingState,
        module: int,
        tokens: Tensor,
        states: Tensor,
        mapping: PrefillSlots | DraftSlots,
        extent: int,
    ) -> Tensor:
        """Run one step over the cache, on tokens (B, W) and the states (B, W, D) that they recycle. Attention sees the
        first `extent` slots. Return the states to recycle (B, W, D)."""
        slot = state.slot[:extent]
        positions = mapping.positions
        visible = mapping.visible(module, extent)
        if self.sliding_window is not None:  # draft tokens only appear nearer: slot >= position
            visible = visible & (positions[..., None] - slot < self.sliding_window)
        mask = additive(visible, states.dtype)[:, 0]
        state.cache.set_slots(mapping.slots, extent=extent)
        embedding = self.masked(state.embed(tokens), positions)
        layers = count(module * self.layers_per_module)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return state.attend(next(layers), mask, q, k, v)

        recycled: Tensor = state.head.step(module, embedding, states, state.cos_sin(positions), attend)
        return recycled

    @torch.no_grad()
    def extend(self, state: RecyclingState, observation: Observation) -> None:
        mapping = PrefillSlots(observation.start, observation.count, state.slot, observation.hidden.shape[1])
        extent = state.extent(mapping.number)
        above = state.head.start(observation.aux_hidden_states, observation.hidden)
        for module, newest in enumerate(state.recycled):
            states = self.draft_step(state, module, observation.tokens[:, 1:], above, mapping, extent)
            above = torch.cat([newest[:, None], states[:, :-1]], dim=1)  # this module's state of the token before
            copy_last(newest, states, observation.count)
        advance_root(state, observation)

    @torch.no_grad()
    def propose(self, state: RecyclingState, pick: Pick) -> Proposal:
        J = self.num_modules
        scratch = scratch_slots(state.shape)
        chain = state.shape.top_k <= 1
        extent = state.extent(max(state.shape.depth, scratch))
        recycled = [states[:, None] for states in state.recycled]  # by module, (B, W, D) at the previous level

        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            nonlocal recycled
            mapping = DraftSlots(state.length, paths, state.slot, chain, scratch)
            before = recycled
            first = min(level, J - 1)
            recycled = list(before)
            for module in range(first, J):
                above = before[module - 1 if level <= module else module]
                if not chain:
                    above = above.gather(1, rows[..., None].expand(-1, -1, above.shape[2]))
                recycled[module] = self.draft_step(state, module, tokens, above, mapping, extent)
            return state.lm_head(state.head.normed(recycled[first]))  # type: ignore[no-any-return]

        first = state.lm_head(state.head.normed(recycled[0]))
        return grow(state.shape, state.root, state.length, first, pick, expand, self.draft_to_target)

    @torch.no_grad()
    def chain_hits(self, batch: Batch, depth: int) -> Tensor:
        lm_head_weight = self.lm_head_weight(batch.shared)
        guesses = [
            self.draft_to_target[self.logits(normed, lm_head_weight).argmax(-1)] for normed in self.unroll(batch, depth)
        ]
        return torch.stack([guess == batch.tokens.roll(-AHEAD - k, dims=1) for k, guess in enumerate(guesses)])
