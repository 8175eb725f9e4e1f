"""Medusa: head k stands where its label is, blocks are the released ones, and drafting is what training trained."""

from collections.abc import Mapping
from itertools import combinations, product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.core.contract import max_nodes, shape_for
from heads.core.tree import parse_shape, static_shape
from heads.methods.medusa import Medusa, MedusaConfig, likeliest_paths
from tests.support.refusals import refused
from tests.support.small_heads import greedy, loss_agrees, random_batch, randomised, seen, token_paths

CONFIG = MedusaConfig(hidden_size=8, vocab_size=20, draft_vocab_size=12, depth=3, num_layers=2, tree_nodes=6)
SIZES = {"width": CONFIG.hidden_size, "vocab": CONFIG.vocab_size}
KEPT = torch.tensor([0, 1, 2, 4, 5, 7, 9, 10, 13, 14, 18, 19])


def make_head(**changes: Any) -> Medusa:
    config = CONFIG.model_copy(update=changes)
    head: Medusa = randomised(Medusa(config, KEPT if config.draft_vocab_size < 20 else torch.arange(20)), 0.5)
    return head.double()


def released(weights: Mapping[str, Tensor], hidden: Tensor, k: int, num_layers: int) -> Tensor:
    """The released checkpoints' definition, on plain tensors: residual blocks with biases, then a matrix."""
    for j in range(num_layers):
        gate = hidden @ weights[f"{k}.{j}.linear.weight"].T + weights[f"{k}.{j}.linear.bias"]
        hidden = hidden + gate / (1 + torch.exp(-gate))
    return hidden @ weights[f"{k}.{num_layers}.weight"].T


@pytest.mark.parametrize("loss", ["labels", "kl"])
@pytest.mark.parametrize("draft_vocab_size", [12, 20])
def test_loss_and_gradients_equal_a_sum_over_slots(loss: str, draft_vocab_size: int) -> None:
    """Head k = 1.. at slot t against x_{t+1+k}, or the distribution at slot t + k that it was drawn from; label by
    label."""
    head, batch = (
        make_head(loss=loss, draft_vocab_size=draft_vocab_size),
        random_batch([[11, 3, 7], [2, 1, 18]], **SIZES),
    )
    kept = head.draft_to_target.tolist()
    scale = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
    weights = dict(head.heads.named_parameters())
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    for b, t, k in product(range(2), range(21), range(1, 4)):
        x = t + 1 + k
        if x >= 21 or not batch.loss_mask[b, x] or batch.documents[b, x] != batch.documents[b, t]:
            continue
        logq = released(weights, batch.hidden[b, t], k - 1, 2).log_softmax(-1)
        token, distribution = int(batch.tokens[b, x]), batch.shared.lm_head(batch.hidden[b, t + k])
        if loss == "labels" and token in kept:
            sums[k - 1] = sums[k - 1] - logq[kept.index(token)]
        if loss == "kl" and int(distribution.argmax()) in kept:
            p = distribution[kept].softmax(-1)
            sums[k - 1] = sums[k - 1] + (p * (p.log() - logq)).sum()
    wanted = torch.stack(sums)
    loss_agrees(head, batch, (wanted * scale).sum(), wanted, scale, atol=1e-6, rtol=1e-5)


def test_it_begins_as_the_targets_own_output_head() -> None:
    head, lm_head, hidden = make_head(), torch.randn(20, 8).double(), torch.randn(4, 8).double()
    head.initialise(lm_head)
    for k in range(3):
        torch.testing.assert_close(head.logits(hidden, k), hidden @ lm_head[KEPT].T)
    head.loss(random_batch([[20]], **SIZES), torch.ones(3, dtype=torch.float64)).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())


@pytest.mark.parametrize("text", ["chain:3", "static:3.2.2", "tree:3x3x10"])
def test_a_nodes_score_is_the_sum_of_each_heads_log_distribution(text: str) -> None:
    """Observed up to slot n - 1, the root is x_n; head k drafts x_{n+k}, which is x_{t+1+k} of slot t = n - 1."""
    head, batch, lengths, shape = make_head(), random_batch([[20], [20]], **SIZES), [9, 12], parse_shape(text)
    proposal = head.propose(seen(head, batch, text, lengths), greedy)
    for b, n in enumerate(lengths):
        logits = [released(head.to_checkpoint(), batch.hidden[b, n - 1], k, 2) for k in range(3)]
        distributions = [of_head.log_softmax(-1) for of_head in logits]
        scores = dict(zip(token_paths(proposal, b), proposal.scores[b].tolist(), strict=True))
        assert proposal.tokens[b, 0] == batch.tokens[b, n] and len(scores) == shape.nodes
        for path, score in scores.items():
            expected = sum(float(distributions[k][KEPT.tolist().index(token)]) for k, token in enumerate(path))
            assert score == pytest.approx(expected, abs=1e-9)
        if shape.paths is None:  # the likeliest nodes of all that as many candidates a head can make
            best = [distribution.topk(shape.top_k).values.tolist() for distribution in distributions]
            levels = [product(*best[: k + 1]) for k in range(3)]
            every = sorted([0.0, *(sum(path) for level in levels for path in level)])
            assert sorted(scores.values()) == pytest.approx(every[-shape.nodes :])


def test_a_tree_too_deep_or_too_wide_is_refused() -> None:
    head, batch = make_head(), random_batch([[20]], **SIZES)
    assert "4 levels, the head has 3 heads" in refused(seen, head, batch, "chain:4", [9])
    assert "13 children of a node, the head drafts 12" in refused(seen, head, batch, "static:13", [9])
    assert "depth 4" in refused(head.chain_hits, batch, 4)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_greedy_growth_is_the_best_tree_there_is(nodes: int) -> None:
    """Against every connected tree of that size over 3 heads of 3 ranks; accuracies need not fall with rank."""
    every = [path for k in (1, 2, 3) for path in product(range(3), repeat=k)]
    trees = [tree for tree in combinations(every, nodes - 1) if all(path[:-1] in ((), *tree) for path in tree)]
    for draws in torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0)):
        accuracies = (draws / draws.sum(1, keepdim=True)).tolist()

        def accepted(tree: Any, accuracies: list[list[float]] = accuracies) -> float:
            return float(sum(prod(accuracies[k][rank] for k, rank in enumerate(path)) for path in tree))

        grown = likeliest_paths(accuracies, nodes)
        assert len(grown) == nodes - 1 and static_shape(grown, "").nodes == nodes
        assert accepted(grown) == pytest.approx(max(map(accepted, trees)))


def test_the_head_grows_and_carries_its_tree() -> None:
    head, batch = make_head(), random_batch([[20], [20]], **SIZES)
    before = head.tree
    assert before is None and max_nodes("head", head) == 6
    assert "carries no static tree" in refused(shape_for, "head", head)
    head.grow_tree([batch])
    shape = shape_for("head", head)
    assert shape.nodes <= 6 and shape.paths == head.tree and str(shape) == "head"
    accuracies = torch.zeros(3, 12, dtype=torch.float64)
    for k in range(3):
        slots = [(b, t) for b in range(2) for t in range(18 - k) if batch.loss_mask[b, t + 2 + k]]
        for b, t in slots:
            order = KEPT[head.logits(batch.hidden[b, t], k).argsort(descending=True)].tolist()
            if (token := int(batch.tokens[b, t + 2 + k])) in order:
                accuracies[k, order.index(token)] += 1 / len(slots)
    assert head.tree == likeliest_paths(accuracies.tolist(), 6)
    assert "grow no static tree" in refused(max_nodes, "head", make_head(tree_nodes=0))
