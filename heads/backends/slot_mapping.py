"""Cache slots of one step's tokens, and the slots that these tokens see.

The key of a token at position p is in slot p. Known tokens are written there at once. Draft tokens go after the
observed slots, in the order in which they are expanded: the i-th expanded node to slot length + i, at any depth. In a
chain, an accepted token's key is then already in its final slot.

Steps need different parts of this. Masks and positions are computed on demand, since each of them costs a launch on a
GPU.

Letters: B batch, M observed tokens, W nodes of one level, N nodes of a tree, S cache slots, E visible slots.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PAGE = 64
"""Attention reads slots in multiples of this, so that there are few shapes and short sequences do not pay for the full
capacity."""


def round_up(slots: int) -> int:
    """Return the number of slots, rounded up to a multiple of a page."""
    return -(-slots // PAGE) * PAGE


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """Return (B, N, N) bool: [b, i, j] is True if node j is node i or its ancestor. Trees have at most `depth`
    levels."""
    B, N = parents.shape
    above = torch.eye(N, dtype=torch.bool, device=parents.device).repeat(B, 1, 1)
    node = torch.arange(N, device=parents.device).expand(B, N)
    for _ in range(depth):
        node = parents.gather(1, node)
        above.scatter_(2, node[..., None], True)
    return above


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Sizes of a decoder's cache and of the passes over it."""

    batch_size: int
    capacity: int
    """Slots per row, a multiple of 64."""
    aux_layer_ids: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    """Tokens per row in the passes of every round. Only products of these sizes are worth timing."""
    depth: int = 0
    """Number of positions beyond the capacity that a pass may use."""
    scratch: int = 0
    """Number of drafted nodes that have slots after the observed ones."""
    vocab_size: int | None = None
    """Number of tokens, the first of the vocabulary, for which logits are computed; None for all."""
    draft: bool = False
    """True for a draft. The target verifies its output, so bfloat16 weights suffice. The weights may be in training."""
    strict: bool = False
    """True if trees must be bit-identical to plain decoding on a GPU as well."""


@dataclass(frozen=True, eq=False)
class Observed:
    """M consecutive tokens, the first `count` of them valid. Each sees the slots up to its own."""

    start: Tensor  # (B,) int64, the position of the first token
    count: Tensor | None  # (B,) int64; None if all are valid
    slot: Tensor  # (S,) int64, 0 .. S - 1
    number: int
    """The number of tokens M."""

    @cached_property
    def positions(self) -> Tensor:
        """(B, M)."""
        return (self.start[:, None] + self.slot[: self.number]).clamp_max(len(self.slot) - 2)

    def slots(self, padding_slot: int) -> Tensor:
        """Return the slots (B, M). Tokens beyond `count` go to `padding_slot`."""
        if self.count is None:
            return self.positions
        return torch.where(self.slot[: self.number] < self.count[:, None], self.positions, padding_slot)

    def visible(self, module: int, extent: int) -> Tensor | None:
        """Return (B, M, E) bool; None if tokens see the slots up to their own.

        A module has no valid state for the first `module` tokens of a text, since its slot would be before the text.
        Their states are padding, which later tokens may not see. Such a token sees itself, so that padding is finite.
        """
        if module == 0:
            return None
        key, own = self.slot[:extent], self.positions[..., None]
        return (key <= own) & (key >= own.clamp_max(module))

    def key_positions(self, extent: int) -> Tensor:
        """Return (B, E): the slots are the positions."""
        return self.slot[:extent].expand(len(self.start), -1)


@dataclass(frozen=True, eq=False)
class Drafted:
    """W nodes of one level. Each sees the observed slots, its ancestors and itself."""

    length: Tensor  # (B,) int64, the number of observed slots
    paths: Tensor  # (B, W, level) int64, as in `heads.growth.Expand`
    slot: Tensor  # (S,) int64, 0 .. S - 1
    chain: bool
    """True if each level expands one node, which then sees all slots up to its own."""

    @cached_property
    def place(self) -> Tensor:
        """(B, 1): one position for the whole level."""
        return self.length[:, None] - 1 + self.paths.shape[2]

    @cached_property
    def positions(self) -> Tensor:
        """(B, W)."""
        return self.place.expand(-1, self.paths.shape[1])

    def slots(self, padding_slot: int) -> Tensor:
        """(B, W)."""
        return self.positions if self.chain else self.length[:, None] + self.paths[..., -1]

    def visible(self, module: int, extent: int) -> Tensor | None:
        """Return (B, W, E) bool, or None, as in `Observed.visible`."""
        if self.chain and module == 0:
            return None
        key = self.slot[:extent]
        if module == 0:  # all observed slots are visible
            seen = (key < self.length[:, None])[:, None].repeat(1, self.paths.shape[1], 1)
            return seen.scatter_(2, self.length[:, None, None] + self.paths, True)
        first = self.place.clamp_max(module)
        if self.chain:
            return ((key <= self.place) & (key >= first))[:, None]
        seen = ((key < self.length[:, None]) & (key >= first))[:, None].repeat(1, self.paths.shape[1], 1)
        above = self.length[:, None] + self.slot[: self.paths.shape[2]] >= first  # (B, level)
        return seen.scatter_(2, self.length[:, None, None] + self.paths, above[:, None].expand(self.paths.shape))

    def key_positions(self, extent: int) -> Tensor:
        """Return (B, E): the position of the token in each slot that any of the nodes sees."""
        above = self.length[:, None] + self.slot[: self.paths.shape[2]]  # (B, level)
        slots = (self.length[:, None, None] + self.paths).flatten(1)
        positions = above[:, None].expand(self.paths.shape).flatten(1)
        return self.slot[:extent].repeat(len(self.length), 1).scatter_(1, slots, positions)


@dataclass(frozen=True, eq=False)
class Verified:
    """N nodes of whole trees. Each sees the observed slots, its ancestors and itself.

    Node j is in slot length + j, at position length + its depth.
    """

    length: Tensor  # (B,) int64, the number of observed slots
    parents: Tensor  # (B, N) int64
    depths: Tensor  # (B, N) int64
    above: Tensor | None  # (B, N, N) bool, `ancestors`; None for a chain, and if nothing reads a mask
    levels: int
    """Maximum number of levels of a tree."""
    slot: Tensor  # (S,) int64, 0 .. S - 1

    @cached_property
    def positions(self) -> Tensor:
        """(B, N); for a chain, its slots."""
        return self.slots() if self.above is None else self.length[:, None] + self.depths

    def slots(self, padding_slot: int = 0) -> Tensor:
        """(B, N)."""
        return self.length[:, None] + self.slot[: self.parents.shape[1]]

    def visible(self, module: int, extent: int) -> Tensor | None:
        """Return (B, N, E) bool, or None for a chain, as in `Observed.visible`."""
        if self.above is None:
            return None
        seen = (self.slot[:extent] < self.length[:, None])[:, None].repeat(1, self.parents.shape[1], 1)
        return seen.scatter_(2, self.slots()[:, None].expand(self.above.shape), self.above)

    def key_positions(self, extent: int) -> Tensor:
        """Return (B, E): the position of the token in each slot."""
        return self.slot[:extent].repeat(len(self.length), 1).scatter_(1, self.slots(), self.positions)


SlotMapping = Observed | Drafted | Verified
"""Slots of the tokens of a pass."""
