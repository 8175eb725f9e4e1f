"""Growth of a draft tree below a root, with the ancestors of each node.

Dynamic trees are EAGLE-2's (arXiv 2406.16858, section 4). Each level expands the `top_k` nodes with the highest product
of the draft's probabilities along their path, and the `nodes` - 1 likeliest of all candidates are kept. Static trees
are Medusa's (arXiv 2401.10774, section 2.1.2): the nodes are fixed in advance, as ranks of children.

Nodes are ranked by score, then by lowest index. A parent's score is never below its child's, and its index is lower, so
a parent is never dropped before its child. This includes scores that are both -inf, a child of draft probability 1, and
sums of logarithms so large that the depth penalty is lost in rounding. NaN log-probabilities count as -inf, so that
they cannot displace the root.

Letters: B batch, T nodes drawn including the root, N nodes kept, K children drawn per node and nodes expanded per level
of a dynamic tree, W nodes expanded at the level before, R children drawn for each, M nodes of a level of a static tree,
P of them expanded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from heads.core.tree import Pick, Proposal, TreeShape, is_chain
from heads.methods.rotary import CosSin
from heads.targets.cache import Forms, KVCache
from heads.targets.product import Product, ProductModule, with_products
from heads.targets.slots import round_up
from heads.targets.tree_attention import Attend, for_groups, masked_attention

DEPTH_PENALTY = 1e-4
"""Amount subtracted from a score for each level when nodes are ranked. It puts a parent before a child of draft
probability 1, whose logarithm may be rounded above 0."""

Draw = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""(logits (B, W, Vd), level, R) -> R children's target ids and log-probabilities, (B, W, R), best first."""
Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(tokens (B, W), parent rows (B, W) in the level before, paths (B, W, level), level) -> logits (B, W, Vd). A path
holds the indices of a node's ancestors, starting with the root's child, and ends with the node's own. Expanded nodes
are numbered from 0, level by level; the W nodes being expanded have the highest numbers."""


@dataclass(frozen=True)
class Level:
    """A static tree's nodes of one depth: M of them, P expanded."""

    first: int
    """Index of the level's first node. Its other nodes follow."""
    count: int
    """Children drawn for each node of the level above."""
    row: Tensor  # (M,) int64, index of each node's parent among the nodes expanded at the previous level
    rank: Tensor  # (M,) int64, rank of each node among its parent's children
    above: Tensor  # (M,) int64, each node's parent
    expanded: Tensor  # (P,) int64, which of the M nodes are expanded
    rows: Tensor  # (P,) int64, indices of their parents among the nodes expanded at the previous level
    paths: Tensor  # (P, level) int64, the expanded indices of their ancestors and their own


def grow(
    shape: TreeShape,
    root: Tensor,
    position: Tensor,
    logits: Tensor,
    pick: Pick,
    expand: Expand,
    token_ids: Tensor | None,
) -> Proposal:
    """Grow a tree below `root` (B,), which is at `position` (B,). `logits` (B, 1, Vd) are the draft's, of the token
    after the root. `pick` draws from logits whose columns are `token_ids` (Vd,).

    Levels count from 1, the root's children. `expand` is called depth - 1 times, with static shapes.
    """

    ahead = position[:, None] + constant(tuple(range(shape.depth + 1)), position.device)  # (B, K + 1)

    def draw(logits: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
        return pick(logits, ahead[:, level, None].expand(-1, logits.shape[1]), count, token_ids)

    grow_shape = _grow_static if shape.paths is not None else _grow_chain if is_chain(shape) else _grow_dynamic
    return grow_shape(shape, root, logits, draw, expand)


def _grow_chain(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    """Grow a tree of one node per level, without the operations that choose among several nodes."""
    B, K, device = len(root), shape.depth, root.device
    node = constant(tuple(range(K + 1)), device).expand(B, -1)
    tokens, steps, path = [root[:, None]], [constant((0.0,), device, torch.float32).expand(B, 1)], node[:, None]
    for level in range(1, K + 1):
        picked, logp = (part[:, 0] for part in draw(logits, level, 1))  # (B, 1)
        tokens.append(picked)
        steps.append(logp)
        if level < K:
            logits = expand(picked, node[:, :1], path[..., :level], level)
    parents = constant((0, *range(K)), device).expand(B, -1)
    return Proposal(torch.cat(tokens, 1), parents, node, torch.cat(steps, 1).cumsum(1))


def _grow_dynamic(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    B, K, N, device = len(root), shape.top_k, shape.nodes, root.device
    depths, penalties = _levels(shape.depth, K, device)
    T = len(depths)
    order = constant(tuple(range(T)), device).expand(B, -1)
    picked, logp = draw(logits, 1, K)  # (B, 1, K)
    # The beam: the K nodes that are expanded next. Of the root's children these are all, in the order drawn.
    beam, totals, nodes, paths = picked[:, 0], _ranked(logp[:, 0]), order[:, 1 : 1 + K], order[:, :K, None]
    rows = torch.zeros_like(nodes)
    drawn = [root[:, None], beam]
    summed = [torch.zeros_like(totals[:, :1]), totals]
    above, beams = [torch.zeros_like(order[:, : 1 + K])], []
    for level in range(2, shape.depth + 1):
        beams.append(nodes)
        picked, logp = draw(expand(beam, rows, paths, level - 1), level, K)  # (B, K, K)
        children, sums = picked.flatten(1), _ranked((totals[..., None] + logp).flatten(1))
        above.append(nodes[..., None].expand(-1, -1, K).flatten(1))
        drawn.append(children)
        summed.append(sums)
        if level < shape.depth:
            totals, best = (x[:, :K] for x in sums.sort(dim=1, descending=True, stable=True))
            beam, nodes, rows = children.gather(1, best), best + (1 + K + (level - 2) * K * K), best // K
            to_parent = paths.gather(1, rows[..., None].expand(-1, -1, level - 1))
            paths = torch.cat([to_parent, paths[..., -1:] + K], dim=2)
    tokens, parents, scores = (torch.cat(parts, 1) for parts in (drawn, above, summed))
    expanded = torch.full_like(parents, -1)
    if beams:
        expanded.scatter_(1, torch.cat(beams, 1), order[:, : K * len(beams)])
    by_depth = depths.expand(B, -1)
    if N < T:
        rank = scores - penalties
        rank[:, 0].fill_(torch.inf)
        kept = rank.sort(dim=1, descending=True, stable=True).indices[:, :N].sort(dim=1).values  # (B, N)
        place = torch.zeros_like(parents).scatter_(1, kept, order[:, :N])
        parents = place.gather(1, parents.gather(1, kept))
        tokens, scores, expanded, by_depth = (x.gather(1, kept) for x in (tokens, scores, expanded, by_depth))
    return Proposal(tokens, parents, by_depth, scores, expanded if beams else None)


def _ranked(scores: Tensor) -> Tensor:
    """Return scores with -inf in place of NaN."""
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


@cache
def _levels(depth: int, K: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the depths (T,) int64 of all candidates of a dynamic tree, and the amounts (T,) float32 subtracted from
    their scores."""
    levels = (0, *[1] * K, *(level for level in range(2, depth + 1) for _ in range(K * K)))
    penalties = DEPTH_PENALTY * torch.tensor(levels)
    return constant(levels, device), constant(tuple(penalties.tolist()), device, torch.float32)


def _grow_static(shape: TreeShape, root: Tensor, logits: Tensor, draw: Draw, expand: Expand) -> Proposal:
    assert shape.paths is not None
    B = len(root)
    levels, parents, depths, indices = _plan(shape.paths, root.device)
    picked, logp = draw(logits, 1, levels[0].count)  # (B, 1, R)
    tokens, scores = root.new_empty(B, shape.nodes), logp.new_empty(B, shape.nodes)
    beam = _place(tokens, scores, root, picked, logp, levels[0])  # (B, P)
    for k, (above, level) in enumerate(pairwise(levels), start=1):
        logits = expand(beam, above.rows.expand(B, -1), above.paths.expand(B, -1, -1), k)
        picked, logp = draw(logits, k + 1, level.count)  # (B, P, R)
        beam = _place(tokens, scores, root, picked, logp, level)
    return Proposal(tokens, parents.expand(B, -1), depths.expand(B, -1), scores, indices.expand(B, -1))


@cache
def _plan(paths: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[list[Level], Tensor, Tensor, Tensor]:
    """Return the levels of a static tree, and the parents, depths and expansion indices of its nodes, (1, N) each."""
    node_of = {(): 0, **{path: 1 + i for i, path in enumerate(paths)}}
    has_children = {path[:-1] for path in paths}
    expanded: list[tuple[int, ...]] = [()]  # the nodes expanded at the level before
    order: list[tuple[int, ...]] = []  # all nodes given to `expand`, in order
    levels = []
    for depth in range(1, 1 + max(map(len, paths))):
        nodes = [path for path in paths if len(path) == depth]
        parents = [path for path in nodes if path in has_children]
        order += parents
        levels.append(
            Level(
                first=node_of[nodes[0]],
                count=1 + max(path[-1] for path in nodes),
                row=constant(tuple(expanded.index(path[:-1]) for path in nodes), device),
                rank=constant(tuple(path[-1] for path in nodes), device),
                above=constant(tuple(node_of[path[:-1]] for path in nodes), device),
                expanded=constant(tuple(nodes.index(path) for path in parents), device),
                rows=constant(tuple(expanded.index(path[:-1]) for path in parents), device),
                paths=constant(
                    tuple(tuple(order.index(path[: i + 1]) for i in range(depth)) for path in parents), device
                ),
            )
        )
        expanded = parents
    return (
        levels,
        constant(((0, *(node_of[path[:-1]] for path in paths)),), device),
        constant(((0, *map(len, paths)),), device),
        constant(((-1, *(order.index(path) if path in has_children else -1 for path in paths)),), device),
    )


def _place(tokens: Tensor, scores: Tensor, root: Tensor, picked: Tensor, logp: Tensor, level: Level) -> Tensor:
    """Write the entries of picked and logp (B, W, R) that are nodes of a static tree's level to the tree's tokens and
    scores (B, N); at the first level also the root (B,). Return the tokens (B, P) of the expanded nodes."""
    if level.first == 1:
        tokens[:, 0] = root
        scores[:, 0].zero_()
    here, taken = slice(level.first, level.first + len(level.row)), picked[:, level.row, level.rank]
    tokens[:, here], scores[:, here] = taken, scores[:, level.above] + logp[:, level.row, level.rank]
    return taken[:, level.expanded]


@cache
def constant(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device, copied there only once, because a CUDA graph cannot capture a copy from
    the host."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


@dataclass
class SlotState:
    """Static tensors of one batch of sequences, for a head that drafts with a cache for each of its layers or modules.

    Slot p of the cache holds the key of one token; the last slot is for padding. Draft tokens use the slots after the
    observed ones; accepted tokens overwrite these slots later.
    """

    shape: TreeShape
    slot: Tensor  # (S,) int64, 0 .. S - 1
    root: Tensor  # (B,) int64
    length: Tensor  # (B,) int64, the root's position: slots before it are observed
    head: Any
    """The head, with products in place of linear layers."""
    lm_head: ProductModule  # (..., D) -> (..., Vd)
    embed: Callable[[Tensor], Tensor]
    cos_sin_table: Tensor  # (2, S, d)
    cache: KVCache

    @classmethod
    def open(
        cls,
        head: Any,
        shape: TreeShape,
        *,
        batch_size: int,
        slots: int,
        layers: int,
        forms: Forms,
        lm_head_weight: Tensor,
        embed: Callable[[Tensor], Tensor],
        **own: Any,
    ) -> Self:
        """Return the state of a head's `layers` before any token, with at least this many slots. `own`: fields of the
        subclass."""
        weight = next(head.parameters())
        slot = torch.arange(round_up(slots), device=weight.device)
        root, length = torch.zeros(2, batch_size, dtype=torch.int64, device=weight.device)
        return cls(
            shape=shape,
            slot=slot,
            root=root,
            length=length,
            head=with_products(head, without="lm_head"),
            lm_head=ProductModule(Product(lm_head_weight.to(weight.dtype))),
            embed=embed,
            cos_sin_table=torch.stack(head.cos_sin(slot[None], weight.dtype)).squeeze((1, 2)),
            cache=KVCache(
                num_layers=layers,
                batch_size=batch_size,
                capacity=len(slot),
                forms=forms,
                dtype=weight.dtype,
                device=weight.device,
            ),
            **own,
        )

    def cos_sin(self, positions: Tensor) -> CosSin:
        """Return the rows (B, 1, T, d) of the tables for positions (B, T)."""
        made = self.cos_sin_table.index_select(1, positions.flatten())
        cos, sin = made.view(2, len(positions), 1, positions.shape[1], -1)
        return cos, sin

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, Hkv, T, d) to the slots that the cache has set. Return those of all visible slots,
        (B, E, Hkv, d)."""
        made = torch.cat([k.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2)], dim=2)
        return self.cache.write(layer, made.flatten(0, 1))

    def attend(self, layer: int, mask: Tensor) -> Attend:
        """Return a layer's attention over the visible slots, with a mask (B, T, E) to add to scores."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.write(layer, k, v)
            folded = for_groups(mask, q.shape[1] // k.shape[1])
            return masked_attention(q.transpose(1, 2), keys, values, folded).transpose(1, 2)

        return attend

    def extent(self, tokens: int) -> int:
        """Return the number of slots that attention must read when `tokens` more follow the observed ones: all slots
        on a GPU, where the host would have to wait for the lengths."""
        if self.slot.device.type != "cpu":
            return len(self.slot)
        return min(round_up(int(self.length.max()) + tokens), len(self.slot))


def take_newest(
    tokens: Tensor,
    start: Tensor,
    count: Tensor,
    root: Tensor,
    length: Tensor,
    *,
    previous: Tensor | None = None,
    recycled: Tensor | None = None,
    made: Tensor | None = None,
) -> None:
    """Update root and length (B,) in rows with new tokens; also previous (B,), the token before the root, and recycled
    (B, D), from made (B, M, D), the states of all tokens except the first. tokens (B, M + 1) begin at position start
    (B,); the first count (B,) + 1 of them are valid."""
    live, last = count > 0, (count - 1).clamp_min(0)
    if previous is not None:
        previous.copy_(torch.where(live, tokens.gather(1, last[:, None])[:, 0], previous))
    if recycled is not None and made is not None:
        final = made.gather(1, last[:, None, None].expand(-1, 1, made.shape[2]))[:, 0]
        recycled.copy_(torch.where(live[:, None], final, recycled))
    root.copy_(torch.where(live, tokens.gather(1, count[:, None])[:, 0], root))
    length.copy_(torch.where(live, start + count, length))
