"""Cache slots of one step's tokens, and the slots that these tokens see.

The key of a token at position p is in slot p. Known tokens are written there at once. Draft tokens go after the
observed slots, in the order in which they are expanded: the i-th expanded node to slot length + i, at any depth. In a
chain, an accepted token's key is then already in its final slot.

Masks are computed on demand, since each of them costs a launch on a GPU.

Letters: B batch, M observed tokens, W nodes of one level, N nodes of a tree, S cache slots, E visible slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

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


@dataclass(eq=False)
class VisibleSlots:
    """Slots that each token of a pass sees, for a kernel: all before `length`, and those after it by bits."""

    length: Tensor  # (B,) int64
    words: Tensor  # (B, N, W) int64: bit j % 64 of word j // 64 is set if the token sees slot length + j
    depths: Tensor  # (B, N) int64: token n is at position length + depth
    behind: int
    """Number P of slots after the length that any token may see."""
    by_slot: bool = False
    """True if sliding windows take a slot for the position of its token; else slot length + j is token j's."""
    counters: Tensor | None = None
    """Counters of `tree_attention`, shared by all layers of a pass."""

    def of(self, rows: slice) -> "VisibleSlots":
        return VisibleSlots(self.length[rows], self.words[rows], self.depths[rows], self.behind, self.by_slot)


def bits(seen: Tensor) -> Tensor:
    """Pack booleans (B, N, P) into words (B, N, W) of 64 bits."""
    padded = pad(seen, (0, -seen.shape[2] % 64)).unflatten(2, (-1, 64)).long()
    words: Tensor = padded << torch.arange(64, device=seen.device)
    return words.sum(-1)


@dataclass(eq=False)
class PrefillSlots:
    """M consecutive tokens, the first `count` of them valid. Each sees the slots up to its own."""

    start: Tensor  # (B,) int64, the position of the first token
    count: Tensor | None  # (B,) int64; None if all are valid
    slot: Tensor  # (S,) int64, 0 .. S - 1; tokens beyond `count` go to slot S - 1
    number: int
    """The number of tokens M."""

    def __post_init__(self) -> None:
        offset = self.slot[: self.number]
        self.positions = (self.start[:, None] + offset).clamp_max(len(self.slot) - 2)  # (B, M)
        self.slots = self.positions  # (B, M)
        if self.count is not None:
            self.slots = torch.where(offset < self.count[:, None], self.positions, len(self.slot) - 1)

    def visible(self, module: int, extent: int) -> Tensor:
        """Return (B, M, E) bool: the slots that each token sees.

        A module has no valid state for the first `module` tokens of a text, since its slot would be before the text.
        Their states are padding, which later tokens may not see. Such a token sees itself, so that padding is finite.
        """
        key = self.slot[:extent]
        last = self.positions[..., None]
        visible = key <= last
        return visible & (key >= last.clamp_max(module)) if module else visible

    def key_positions(self, extent: int) -> Tensor:
        """Return (B, E): the slots are the positions."""
        return self.slot[:extent].expand(len(self.start), -1)

    def visible_slots(self) -> VisibleSlots:
        """Return what the tokens see, for a kernel."""
        offset = self.slot[: self.number].expand(len(self.start), -1)
        return VisibleSlots(self.start, bits(offset[:, None] <= offset[..., None]), offset.contiguous(), self.number)


@dataclass(eq=False)
class DraftSlots:
    """W nodes of one level. Each sees the observed slots, its ancestors and itself."""

    length: Tensor  # (B,) int64, the number of observed slots
    paths: Tensor  # (B, W, level) int64, as in `heads.parts.tree_growth.Expand`
    slot: Tensor  # (S,) int64, 0 .. S - 1
    chain: bool
    """True if each level expands one node, which then sees all slots up to its own."""
    scratch: int
    """Number of nodes that a tree expands, each with a slot after the observed ones."""

    def __post_init__(self) -> None:
        self.position = self.length[:, None] - 1 + self.paths.shape[2]  # (B, 1), of the whole level
        self.positions = self.position.expand(-1, self.paths.shape[1])  # (B, W)
        self.slots = self.positions if self.chain else self.length[:, None] + self.paths[..., -1]  # (B, W)

    def visible(self, module: int, extent: int) -> Tensor:
        """Return (B, W, E) bool, as in `PrefillSlots.visible`."""
        key = self.slot[:extent]
        visible = key <= self.position if self.chain else key < self.length[:, None]  # (B, E)
        if module:
            first = self.position.clamp_max(module)
            visible = visible & (key >= first)
        if self.chain:
            return visible[:, None]
        visible = visible[:, None].repeat(1, self.paths.shape[1], 1)
        if module == 0:
            return visible.scatter_(2, self.length[:, None, None] + self.paths, True)
        above = self.length[:, None] + self.slot[: self.paths.shape[2]] >= first  # (B, level)
        return visible.scatter_(2, self.length[:, None, None] + self.paths, above[:, None].expand(self.paths.shape))

    def key_positions(self, extent: int) -> Tensor:
        """Return (B, E): the position of the token in each slot that any of the nodes sees."""
        if self.chain:
            return self.slot[:extent].expand(len(self.length), -1)
        above = self.length[:, None] + self.slot[: self.paths.shape[2]]  # (B, level)
        slots = (self.length[:, None, None] + self.paths).flatten(1)
        positions = above[:, None].expand(self.paths.shape).flatten(1)
        return self.slot[:extent].repeat(len(self.length), 1).scatter_(1, slots, positions)

    def visible_slots(self) -> VisibleSlots:
        """Return what the nodes see, for a kernel."""
        B, W, level = self.paths.shape
        visible = torch.zeros(B, W, self.scratch, dtype=torch.bool, device=self.paths.device)
        depths = self.slot[level - 1].expand(B, W).contiguous()
        return VisibleSlots(
            self.length, bits(visible.scatter_(2, self.paths, True)), depths, self.scratch, by_slot=True
        )


@dataclass(eq=False)
class TreeSlots:
    """N nodes of whole trees. Each sees the observed slots, its ancestors and itself.

    Node j is in slot length + j, at position length + its depth.
    """

    length: Tensor  # (B,) int64, the number of observed slots
    parents: Tensor  # (B, N) int64
    depths: Tensor  # (B, N) int64
    above: Tensor | None  # (B, N, N) bool, `ancestors`; None for a chain
    slot: Tensor  # (S,) int64, 0 .. S - 1

    def __post_init__(self) -> None:
        self.slots = self.length[:, None] + self.slot[: self.parents.shape[1]]  # (B, N)
        self.positions = self.slots if self.above is None else self.length[:, None] + self.depths  # (B, N)

    def visible(self, module: int, extent: int) -> Tensor:
        """Return (B, N, E) bool, as in `PrefillSlots.visible`, for a target, which has no modules."""
        if self.above is None:
            return self.slot[:extent] <= self.positions[..., None]
        visible = (self.slot[:extent] < self.length[:, None])[:, None].repeat(1, self.parents.shape[1], 1)
        return visible.scatter_(2, self.slots[:, None].expand(self.above.shape), self.above)

    def key_positions(self, extent: int) -> Tensor:
        """Return (B, E): the position of the token in each slot."""
        if self.above is None:
            return self.slot[:extent].expand(len(self.length), -1)
        return self.slot[:extent].repeat(len(self.length), 1).scatter_(1, self.slots, self.positions)

    def visible_slots(self) -> VisibleSlots:
        """Return what the nodes see, for a kernel."""
        N = self.parents.shape[1]
        above = self.above
        if above is None:
            node = self.slot[:N]
            above = (node <= node[:, None]).expand(len(self.length), -1, -1)
        return VisibleSlots(self.length, bits(above), self.depths.contiguous(), N)


SlotMapping = PrefillSlots | DraftSlots | TreeSlots
"""Slots of the tokens of a pass."""
