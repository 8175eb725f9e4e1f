"""The rule `match` on any tree equals a walk from the root, and what is committed ends at EOS and at the limit."""

import random

import pytest
import torch

from eval.runtime.acceptance_rules import match
from heads.core.tree import Proposal
from heads.kernels.slots import ancestors


def walk(tokens: list[int], parents: list[int], choice: list[int]) -> list[int]:
    """The deepest path of chosen tokens; the lowest end node where several are as deep."""
    paths = [[0]]
    for j in range(1, len(tokens)):
        above = next((path for path in paths if path[-1] == parents[j]), None)
        if above is not None and tokens[j] == choice[parents[j]]:
            paths.append([*above, j])
    return max(paths, key=lambda path: (len(path), -path[-1]))


def random_tree(chooser: random.Random, nodes: int, depth: int, vocab: int) -> tuple[list[int], list[int], list[int]]:
    tokens, parents, depths = [chooser.randrange(vocab)], [0], [0]
    for j in range(1, nodes):
        parents.append(chooser.choice([i for i in range(j) if depths[i] < depth]))
        depths.append(depths[parents[-1]] + 1)
        tokens.append(chooser.randrange(vocab))
    return tokens, parents, depths


@pytest.mark.parametrize("vocab", [1, 2, 3, 40])  # few tokens: duplicate siblings and ties everywhere
def test_match_equals_a_walk_on_random_trees(vocab: int) -> None:
    chooser = random.Random(vocab)
    for _ in range(120):
        B, nodes, depth = 4, chooser.randrange(1, 14), chooser.randrange(1, 6)
        trees = [random_tree(chooser, nodes, depth, vocab) for _ in range(B)]
        choices = []
        for tokens, parents, _ in trees:
            choice = [chooser.randrange(vocab) for _ in range(nodes)]
            for j in range(1, nodes):
                if chooser.random() < 0.5:
                    choice[parents[j]] = tokens[j]
            choices.append(choice)
        tokens_, parents_, depths_ = (torch.tensor(part) for part in zip(*trees, strict=True))
        proposal = Proposal(tokens_, parents_, depths_, torch.zeros(B, nodes))
        found = match(proposal, torch.tensor(choices), ancestors(parents_, depth), depth)
        assert found.path.shape == found.emitted.shape == (B, depth + 1)
        for b, (tokens, parents, _) in enumerate(trees):
            path = walk(tokens, parents, choices[b])
            n = int(found.accepted[b])
            assert n == len(path) - 1
            assert found.path[b, : n + 1].tolist() == path
            emitted = found.emitted[b, : n + 1].tolist()
            assert emitted == [choices[b][node] for node in path]
            assert emitted[:-1] == [tokens[node] for node in path[1:]]


def test_a_node_that_hangs_on_nothing_is_never_accepted() -> None:
    tokens = torch.tensor([[7, 7, 7, 7]])
    parents, depths = torch.tensor([[0, 1, 0, 2]]), torch.tensor([[0, 1, 1, 3]])  # 1 is its own parent; 3 skips a level
    found = match(Proposal(tokens, parents, depths, torch.zeros(1, 4)), tokens, ancestors(parents, 3), 3)
    assert found.accepted.tolist() == [1]
    assert found.path[0, :2].tolist() == [0, 2]
