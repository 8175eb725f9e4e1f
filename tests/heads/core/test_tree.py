"""Draft trees: grown as the papers say, closed under parents, whatever the draft's distribution is like."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from heads.core.tree import ROOT_ONLY, Proposal, TreeShape, parse_shape, scratch_slots, static_shape
from heads.parts.tree_growth import grow
from tests.support.refusals import refused
from tests.support.small_heads import token_paths

VOCAB = 11
Path = tuple[int, ...]


@pytest.mark.parametrize(
    ("text", "depth", "top_k", "nodes"),
    [
        ("none", 0, 0, 1),
        ("chain:1", 1, 1, 2),
        ("chain:7", 7, 1, 8),
        ("tree:1x4x5", 1, 4, 5),
        ("tree:5x8x32", 5, 8, 32),
        ("tree:3x2x11", 3, 2, 11),  # all of 1 + 2 + 4 + 4
        ("static:3", 1, 3, 4),
        ("static:3.2.1", 3, 3, 16),
        ("static:1.2", 2, 2, 4),
    ],
)
def test_shapes_are_read_and_written_back(text: str, depth: int, top_k: int, nodes: int) -> None:
    shape = parse_shape(text)
    assert (shape.depth, shape.top_k, shape.nodes, str(shape)) == (depth, top_k, nodes, text)


BAD = ["", "chain", "chain:0", "chain:1.5", " chain:5", "Chain:5", "tree:5x8", "tree:5x0x9", "static:", "static:3..1"]
TOO_LARGE = ["tree:1x4x6", "chain:100000", "static:1000.1000.1000.1000"]


@pytest.mark.parametrize("text", BAD + TOO_LARGE)
def test_bad_shapes_are_refused_in_one_line(text: str) -> None:
    message = refused(parse_shape, text)
    assert repr(text) in message and (text not in BAD or "chain:5" in message)  # an example of what is right


class Distribution:
    """A draft whose distribution depends on the whole path, and which sees only what `grow` shows it."""

    def __init__(self, shape: TreeShape, kind: str, batch: int) -> None:
        self.shape, self.kind, self.batch = shape, kind, batch
        self.expanded = torch.zeros(batch, 0, dtype=torch.int64)  # tokens of the expanded nodes, in order
        self.calls: list[tuple[int, ...]] = []
        self.before = torch.zeros(batch, 1, dtype=torch.int64)  # tokens of the level before

    def logits(self, b: int, path: Path) -> Tensor:
        seed = 1 + b + sum((token + 2) * 13**i for i, token in enumerate(path))
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
        if self.kind == "certain":  # one child of probability exactly 1, whose score ties with its parent's
            logits[logits.argmax()] = 1000.0
        if self.kind == "flat":
            logits.zero_()
        return 2 * logits

    def pick(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert positions.shape == logits.shape[:2] and (positions == len(self.calls) + 1).all()  # the root stands at 0
        best = logits.log_softmax(-1).topk(count, dim=-1)
        return best.indices, best.values

    def expand(self, tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
        B, W = tokens.shape
        self.calls.append((level, *tokens.shape, *paths.shape))
        self.expanded = torch.cat([self.expanded, tokens], dim=1)
        assert paths.shape == (B, W, level) and rows.shape == (B, W)
        assert (paths[..., -1] == torch.arange(self.expanded.shape[1])[-W:]).all()
        out = torch.zeros(B, W, VOCAB)
        for b, w in itertools.product(range(B), range(W)):
            path = tuple(self.expanded[b][paths[b, w]].tolist())  # what it attends to, in order, is its path
            assert len(path) == level and path[-1] == tokens[b, w]
            if level > 1:  # and the level before, at `rows`, is its parent
                assert self.before[b, rows[b, w]] == path[-2]
            out[b, w] = self.logits(b, path)
        self.before = tokens
        return out

    def grow(self) -> Proposal:
        first = torch.stack([self.logits(b, ()) for b in range(self.batch)])[:, None]
        root = torch.arange(self.batch)
        return grow(self.shape, root, torch.zeros_like(root), first, self.pick, self.expand, None)


def naive_dynamic(distribution: Distribution, b: int) -> dict[Path, float]:
    """EAGLE-2 as in its paper: path -> score of the nodes kept, the root's children and below."""
    K, candidates = distribution.shape.top_k, dict[Path, float]()
    beam: dict[Path, float] = {(): 0.0}
    for _ in range(distribution.shape.depth):
        level: dict[Path, float] = {}
        for path, score in beam.items():
            logp = distribution.logits(b, path).double().log_softmax(-1).tolist()
            for token in sorted(range(VOCAB), key=lambda t: -logp[t])[:K]:
                level[(*path, token)] = score + logp[token]
        candidates |= level
        beam = dict(sorted(level.items(), key=lambda item: -item[1])[:K])
    return dict(sorted(candidates.items(), key=lambda item: -item[1])[: distribution.shape.nodes - 1])


def check_form(proposal: Proposal, shape: TreeShape) -> None:
    """The order of nodes on which verification relies."""
    B, N = len(proposal.tokens), shape.nodes
    for field in (proposal.tokens, proposal.parents, proposal.depths, proposal.scores):
        assert field.shape == (B, N)
    assert proposal.scores.dtype == torch.float32 and not proposal.scores[:, 0].any()
    assert torch.equal(proposal.tokens[:, 0], torch.arange(B))
    assert not proposal.parents[:, 0].any() and not proposal.depths[:, 0].any()
    assert (proposal.parents[:, 1:] < torch.arange(1, N)).all()
    depth_of_parent = proposal.depths.gather(1, proposal.parents)
    assert torch.equal(proposal.depths[:, 1:], depth_of_parent[:, 1:] + 1) and int(proposal.depths.max()) <= shape.depth


@pytest.mark.parametrize("text", ["chain:4", "tree:1x3x4", "tree:4x3x12", "tree:3x4x9", "tree:4x3x31", "tree:5x1x4"])
def test_dynamic_trees_are_eagle_2s(text: str) -> None:
    distribution = Distribution(parse_shape(text), "random", 3)
    proposal = distribution.grow()
    check_form(proposal, distribution.shape)
    for b in range(3):
        wanted = naive_dynamic(distribution, b)
        found = dict(zip(token_paths(proposal, b)[1:], proposal.scores[b, 1:].tolist(), strict=True))
        assert found.keys() == wanted.keys()
        for path, score in wanted.items():
            assert math.isclose(found[path], score, abs_tol=1e-4)


@pytest.mark.parametrize("kind", ["certain", "flat"])
@pytest.mark.parametrize("text", ["tree:4x3x5", "tree:4x3x12", "tree:6x2x7", "tree:3x4x30"])
def test_trees_are_closed_where_scores_tie(kind: str, text: str) -> None:
    """A child of probability 1 ties with its parent; the parent is kept first, and no node is kept twice."""
    distribution = Distribution(parse_shape(text), kind, 2)
    proposal = distribution.grow()
    check_form(proposal, distribution.shape)
    for b in range(2):
        nodes = token_paths(proposal, b)
        assert len(set(nodes)) == len(nodes)
        for path, score in zip(nodes, proposal.scores[b].tolist(), strict=True):
            steps = [distribution.logits(b, path[:i]).log_softmax(-1)[path[i]].item() for i in range(len(path))]
            assert math.isclose(sum(steps), score, abs_tol=1e-3)
    if kind == "certain":  # the chain of certain tokens comes before anything else
        assert int(proposal.depths.max()) == distribution.shape.depth


RAGGED = static_shape([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 1)], "ragged")
"""Medusa's trees give good ranks more children than bad ones."""


@pytest.mark.parametrize(
    "shape", [*map(parse_shape, ("static:3", "static:3.2.1", "static:1.2.2")), RAGGED], ids=lambda shape: str(shape)
)
def test_static_trees_take_the_children_by_rank(shape: TreeShape) -> None:
    distribution = Distribution(shape, "random", 2)
    proposal = distribution.grow()
    check_form(proposal, shape)
    assert shape.paths is not None
    for b in range(2):
        wanted: list[Path] = [()]
        for ranks in shape.paths:
            tokens: Path = ()
            for rank in ranks:
                tokens = (*tokens, int(distribution.logits(b, tokens).argsort(descending=True)[rank]))
            wanted.append(tokens)
        assert sorted(token_paths(proposal, b)) == sorted(wanted)


@pytest.mark.parametrize("text", ["chain:1", "chain:6", "tree:1x5x6", "tree:4x3x12", "static:3", "static:3.2.1"])
def test_shapes_are_static_and_scratch_slots_hold_what_is_expanded(text: str) -> None:
    shape, calls = parse_shape(text), []
    for kind in ("random", "certain", "flat"):
        distribution = Distribution(shape, kind, 2)
        distribution.grow()
        assert distribution.expanded.shape[1] == scratch_slots(shape)
        calls.append(distribution.calls)
    assert calls[0] == calls[1] == calls[2] and len(calls[0]) == shape.depth - 1
    assert parse_shape("none") is ROOT_ONLY and scratch_slots(ROOT_ONLY) == 0
