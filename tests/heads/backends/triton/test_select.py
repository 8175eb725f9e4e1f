"""Kernels that choose a tree's nodes, in Triton's interpreter, against their twins and plain Python."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from heads.backends.selection import TRITON
from heads.backends.torch import select
from heads.backends.triton import select as kernels
from heads.growth import grow
from heads.tree import parse_shape
from tests.switches import kernels_on_cpu

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs the kernels themselves")

VOCAB = 40


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with kernels_on_cpu():
        yield


def distributions(kind: str, B: int, W: int, K: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A level's draws, best first, as strided as heads make them."""
    logits = torch.randn(B, 1 if kind == "shared" else W, VOCAB, generator=generator)
    if kind == "flat":
        logits.zero_()
    if kind == "certain":
        logits[..., 3] = 1e4
    if kind == "far":  # scores so large that a level's penalty is lost
        logits[..., 10:] -= 3e5
        logits[..., :10] += torch.arange(10) * 1e4
    logp, picked = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    if kind == "sure":  # of all it draws: then depth decides
        logp = -1e-5 * torch.rand(logp.shape, generator=generator).sort(dim=-1).values
    if kind == "few":
        logp[..., 2:] = -torch.inf
    if kind == "broken":
        logp[:, W // 2] = torch.nan
    return picked[..., :K].expand(B, W, K), logp[..., :K].expand(B, W, K)


KINDS = ["random", "flat", "certain", "sure", "far", "few", "broken", "shared"]


def equal(ours: select.Nodes | select.Beam | None, theirs: select.Nodes | select.Beam | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return all(torch.equal(x, vars(theirs)[name]) for name, x in vars(ours).items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("B", "depth", "K", "N"),
    [(3, 4, 3, 12), (2, 6, 8, 32), (1, 3, 1, 3), (2, 1, 5, 4), (1, 8, 10, 60), (1, 4, 13, 300)],
)
def test_levels_and_the_whole_are_their_twins(kind: str, B: int, depth: int, K: int, N: int) -> None:
    generator = torch.Generator().manual_seed(N)
    root = torch.randint(VOCAB, (B,), generator=generator)
    levels = [0] + [1] * K + [level for level in range(2, depth + 1) for _ in range(K * K)]
    depths, penalties = torch.tensor(levels), 1e-4 * torch.tensor(levels)
    ours, theirs = (select.new_nodes(root, depths) for _ in range(2))
    beam: select.Beam | None = None
    for level in range(1, depth + 1):
        picked, logp = distributions(kind, B, 1 if level == 1 else K, K, generator)
        expected = select.widen(theirs, root, beam, picked, logp, level, last=level == depth)
        found = TRITON.select.widen(ours, root, beam, picked, logp, level, last=level == depth)
        assert equal(found, expected)
        beam = found
    assert equal(ours, theirs)
    kept = TRITON.select.prune(ours, penalties, N)
    assert equal(kept, select.prune(theirs, penalties, N))
    assert (kept.tokens[:, 0] == root).all()
    for b in range(B):  # by the textbook
        score = [math.inf, *(float(x) for x in ours.scores[b, 1:] - penalties[1:])]
        wanted = sorted(sorted(range(len(levels)), key=lambda i: (-score[i], i))[:N])
        assert kept.tokens[b].tolist() == ours.tokens[b, wanted].tolist()
        above = [wanted.index(int(ours.parents[b, i])) for i in wanted]  # no parent is left out
        assert kept.parents[b].tolist() == above
        assert kept.depths[b].tolist() == [levels[i] for i in wanted]


def test_a_beam_is_the_likeliest_nodes_by_their_paths() -> None:
    """Each row of it: its token, the positions of its path, and its parent's row, from the nodes themselves."""
    generator, K, depth = torch.Generator().manual_seed(1), 4, 5
    root, levels = torch.zeros(2, dtype=torch.int64), [0] + [1] * K + [2] * (4 * K * K)
    nodes, beam = select.new_nodes(root, torch.tensor(levels)), None
    before: select.Beam | None = None
    for level in range(1, depth + 1):
        picked, logp = distributions("random", 2, 1 if level == 1 else K, K, generator)
        beam = TRITON.select.widen(nodes, root, beam, picked, logp, level, last=level == depth)
        if beam is None:
            break
        here = slice(select.first_node(K, level), select.first_node(K, level + 1))
        for b in range(2):
            assert beam.scores[b].tolist() == nodes.scores[b, here].sort(descending=True).values[:K].tolist()
            for w in range(K):
                line, at = [], int(beam.nodes[b, w])
                assert nodes.tokens[b, at] == beam.tokens[b, w]
                while at:
                    line.append(int(nodes.expanded[b, at]))
                    at = int(nodes.parents[b, at])
                assert beam.paths[b, w].tolist() == line[::-1] and line[0] == (level - 1) * K + w
                if before is not None:
                    assert before.paths[b, beam.rows[b, w]].tolist() == line[:0:-1]
        before = beam


def test_a_root_outranks_what_is_no_number() -> None:
    nodes = select.new_nodes(torch.tensor([7]), torch.tensor([0, 1, 1, 1]))
    draws = torch.arange(3).expand(1, 1, 3), torch.tensor([[[torch.nan, torch.inf, torch.inf]]])
    for forms in (TRITON.select, select.TORCH):
        assert forms.widen(nodes, torch.tensor([7]), None, *draws, 1, last=True) is None
        assert forms.prune(nodes, torch.zeros(4), 2).tokens.tolist() == [[7, 1]]


@pytest.mark.parametrize("text", ["static:3.2.1", "static:1.2.2", "static:4", "static:7.9.5"])
def test_static_levels_are_their_twins(text: str) -> None:
    shape, root, position = parse_shape(text), torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    found = []
    for forms in (TRITON.select, select.TORCH):
        generator = torch.Generator().manual_seed(2)

        def pick(
            logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            return distributions("random", 3, logits.shape[1], count, generator)  # noqa: B023

        seen: list[Tensor] = []

        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            seen.append(tokens)  # noqa: B023
            return torch.zeros(*tokens.shape, VOCAB)

        proposal = grow(shape, root, position, torch.zeros(3, 1, VOCAB), pick, expand, None, forms)
        found.append([proposal.tokens, proposal.scores, *seen])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_trees_too_large_for_a_program_take_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_CHILDREN", 5)
    monkeypatch.setattr(kernels, "MOST_NODES", 5)
    for owner, name in ((kernels, "_widen"), (kernels, "_prune")):
        monkeypatch.setattr(owner, name, None)
    generator, root = torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.int64)
    nodes = select.new_nodes(root, torch.zeros(7, dtype=torch.int64))
    TRITON.select.widen(nodes, root, None, *distributions("random", 1, 1, 6, generator), 1, last=True)
    assert TRITON.select.prune(nodes, torch.zeros(7), 3).tokens.shape == (1, 3)
