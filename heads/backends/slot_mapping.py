"""The slots of one step's tokens in the cache, and the slots that they see.

A token at position p has its key in slot p. Tokens that became known go there at once. Drafted ones go behind the slots
that are observed, in the order in which they are expanded: node i of those to slot length + i, whatever its depth. In a
chain that is where its key stays if it is accepted.

What a step needs of all this differs: masks and positions are made where they are asked for, since on a GPU each of
them is a launch.

Letters: B batch, M observed tokens, W nodes of one level, N nodes of a tree, S cache slots, E of them shown.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PAGE = 64
"""Slots are shown to attention in multiples of this, so that shapes are few while short sequences do not pay for the
capacity."""


def round_up(slots: int) -> int:
    """The next multiple of a page."""
    return -(-slots // PAGE) * PAGE


def ancestors(parents: Tensor, depth: int) -> Tensor:
    """(B, N, N) bool: [b, i, j] is True where node j is node i or stands above it; trees of at most `depth` levels."""
    B, N = parents.shape
    above = torch.eye(N, dtype=torch.bool, device=parents.device).repeat(B, 1, 1)
    node = torch.arange(N, device=parents.device).expand(B, N)
    for _ in range(depth):
        node = parents.gather(1, node)
        above.scatter_(2, node[..., None], True)
    return above


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The size of a decoder's cache, and of the passes over it."""

    batch_size: int
    capacity: int
    """Slots of a row, a multiple of 64."""
    aux_layer_ids: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    """Tokens of a row in the passes that every round makes, whose products are worth being measured."""
    depth: int = 0
    """Positions behind the capacity that may be asked for."""
    scratch: int = 0
    """Drafted nodes that have slots behind the observed ones."""
    vocab_size: int | None = None
    """Tokens that logits are formed of, the first of the vocabulary; None for all."""
    draft: bool = False
    """True if the target judges what is computed, so that bfloat16 weights will do, and weights may be in training."""
    strict: bool = False
    """True if trees must be bit-identical to plain decoding on a GPU, too."""


@dataclass(frozen=True, eq=False)
class Observed:
    """M tokens in a row, the first `count` of them true; each sees the slots up to its own."""

    start: Tensor  # (B,) int64, where the first of them stands
    count: Tensor | None  # (B,) int64; None if all are true
    slot: Tensor  # (S,) int64, 0 .. S - 1
    number: int
    """M"""

    @cached_property
    def positions(self) -> Tensor:
        """(B, M)."""
        return (self.start[:, None] + self.slot[: self.number]).clamp_max(len(self.slot) - 2)

    def slots(self, padding_slot: int) -> Tensor:
        """(B, M); what is not true goes `padding_slot`."""
        if self.count is None:
            return self.positions
        return torch.where(self.slot[: self.number] < self.count[:, None], self.positions, padding_slot)

    def visible(self, module: int, extent: int) -> Tensor | None:
        """(B, M, E) bool; None where tokens see the slots up to their own.

        At the first `module` tokens of a text a module's slot would lie before the text, and what it makes of them is
        padding, which later tokens may not see. Such a token sees itself, so that the padding is finite.
        """
        if module == 0:
            return None
        key, own = self.slot[:extent], self.positions[..., None]
        return (key <= own) & (key >= own.clamp_max(module))

    def key_positions(self, extent: int) -> Tensor:
        """(B, E): slots are positions."""
        return self.slot[:extent].expand(len(self.start), -1)


@dataclass(frozen=True, eq=False)
class Drafted:
    """W nodes of one level; each sees what was observed, its ancestors and itself."""

    length: Tensor  # (B,) int64, the slots observed
    paths: Tensor  # (B, W, level) int64, of `heads.growth.Expand`
    slot: Tensor  # (S,) int64, 0 .. S - 1
    chain: bool
    """True if one node is expanded in a level, so that it sees all slots up to its own."""

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
        """(B, W, E) bool, or None, as `Observed.visible` says."""
        if self.chain and module == 0:
            return None
        key = self.slot[:extent]
        if module == 0:  # nothing is hidden of what was observed
            seen = (key < self.length[:, None])[:, None].repeat(1, self.paths.shape[1], 1)
            return seen.scatter_(2, self.length[:, None, None] + self.paths, True)
        first = self.place.clamp_max(module)
        if self.chain:
            return ((key <= self.place) & (key >= first))[:, None]
        seen = ((key < self.length[:, None]) & (key >= first))[:, None].repeat(1, self.paths.shape[1], 1)
        above = self.length[:, None] + self.slot[: self.paths.shape[2]] >= first  # (B, level)
        return seen.scatter_(2, self.length[:, None, None] + self.paths, above[:, None].expand(self.paths.shape))

    def key_positions(self, extent: int) -> Tensor:
        """(B, E): of what stands in each slot that any of the nodes sees."""
        above = self.length[:, None] + self.slot[: self.paths.shape[2]]  # (B, level)
        slots = (self.length[:, None, None] + self.paths).flatten(1)
        positions = above[:, None].expand(self.paths.shape).flatten(1)
        return self.slot[:extent].repeat(len(self.length), 1).scatter_(1, slots, positions)


@dataclass(frozen=True, eq=False)
class Verified:
    """N nodes of whole trees; each sees what was observed, its ancestors and itself.

    Node j stands in slot length + j, at the position length + its depth.
    """

    length: Tensor  # (B,) int64, the slots observed
    parents: Tensor  # (B, N) int64
    depths: Tensor  # (B, N) int64
    above: Tensor | None  # (B, N, N) bool, `ancestors`; None for a chain, and where nothing reads a mask
    levels: int
    """The most levels that a tree has."""
    slot: Tensor  # (S,) int64, 0 .. S - 1

    @cached_property
    def positions(self) -> Tensor:
        """(B, N); of a chain its slots."""
        return self.slots() if self.above is None else self.length[:, None] + self.depths

    def slots(self, padding_slot: int = 0) -> Tensor:
        """(B, N)."""
        return self.length[:, None] + self.slot[: self.parents.shape[1]]

    def visible(self, module: int, extent: int) -> Tensor | None:
        """(B, N, E) bool, or None for a chain, as `Observed.visible` says."""
        if self.above is None:
            return None
        seen = (self.slot[:extent] < self.length[:, None])[:, None].repeat(1, self.parents.shape[1], 1)
        return seen.scatter_(2, self.slots()[:, None].expand(self.above.shape), self.above)

    def key_positions(self, extent: int) -> Tensor:
        """(B, E): of what stands in each slot."""
        return self.slot[:extent].repeat(len(self.length), 1).scatter_(1, self.slots(), self.positions)


SlotMapping = Observed | Drafted | Verified
"""Where the tokens of a pass stand."""
