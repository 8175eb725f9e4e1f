"""Heads that recycle their state: what they are trained to do is what they do when they draft."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from heads.core.contract import Batch
from heads.core.tree import parse_shape
from heads.methods.medusa import Medusa
from heads.methods.state_recycling import Recycling
from tests.heads.blocks import test_backbone
from tests.heads.methods import test_draft_model, test_medusa
from tests.support.refusals import refused
from tests.support.small_heads import eagle3_head, greedy, mtp_head, observe, random_batch, seen, token_paths

QUARTER = {"rope_type": "default", "partial_rotary_factor": 0.5}
NARROW = {"hidden_size": 8, "target_hidden_size": 16, "own_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
Make = Callable[[], Recycling]
MAKERS: dict[str, Make] = {
    "eagle3": eagle3_head,
    "eagle3.1": lambda: eagle3_head(fc_norm=True, norm_output=True),
    "eagle3 with a normed residual": lambda: eagle3_head(norm_before_fc=True, norm_before_residual=True),
    "eagle3 with a window": lambda: eagle3_head(sliding_window=7),
    "eagle3 with yarn": lambda: eagle3_head(rope_scaling=YARN),
    "eagle3, narrower": lambda: eagle3_head(**NARROW),
    "eagle3 of two layers": lambda: eagle3_head(num_layers=2, qk_norm=True, rope_scaling=QUARTER),
    "mtp, one module for all steps": mtp_head,
    "mtp, two, the second for three steps": lambda: mtp_head(num_modules=2, layout="deepseek"),
    "mtp, one for each step": lambda: mtp_head(num_modules=4),
    "mtp that reads every token": lambda: mtp_head(layout="qwen"),
}
each_form = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def scores_are_those_of_training(
    head: Recycling, batch: Batch, shape: str, lengths: list[int], tolerance: float = 1e-9
) -> None:
    """Let training see the tokens of a node's path: the node's score is the sum of the log q that training gives them,
    whatever its neighbours, so trees do not leak between branches. A chain takes the likeliest tokens."""
    proposal = head.propose(seen(head, batch, shape, lengths), greedy)
    for node in range(1, proposal.tokens.shape[1]):
        paths, tokens = [token_paths(proposal, b)[node] for b in range(len(lengths))], batch.tokens.clone()
        for b, (n, path) in enumerate(zip(lengths, paths, strict=True)):
            tokens[b, n + 1 : n + 1 + len(path)] = torch.tensor(path)
        changed = replace(batch, tokens=tokens, embeddings=batch.shared.embed_tokens(tokens))
        with torch.no_grad():
            states = head.unroll(changed, max(map(len, paths)))
        for b, (n, path) in enumerate(zip(lengths, paths, strict=True)):
            rows = [head.logits(state[b, n - 1], head.lm_head_weight(batch.shared)) for state in states[: len(path)]]
            logq = [dict(zip(head.draft_to_target.tolist(), row.log_softmax(-1).tolist(), strict=True)) for row in rows]
            total = sum(step[token] for step, token in zip(logq, path, strict=True))
            assert proposal.depths[b, node] == len(path)
            assert float(proposal.scores[b, node]) == pytest.approx(total, abs=tolerance)
            if shape.startswith("chain"):
                assert [*path] == [max(step, key=lambda token: step[token]) for step in logq]


@pytest.mark.parametrize(
    ("shape", "make"),
    [
        *(("tree:6x3x40", make) for make in MAKERS.values()),
        *((shape, mtp_head) for shape in ("chain:4", "static:3.2.1.1")),
    ],
    ids=[*MAKERS, "chain", "static"],
)
def test_a_drafting_step_is_a_training_step(shape: str, make: Make) -> None:
    """Also where the prompt is shorter than the modules are many, and past the steps trained."""
    scores_are_those_of_training(make(), random_batch([[20], [20], [20]]), shape, [9, 13, 1])


OTHERS: dict[str, Callable[[], Any]] = {
    "a block": lambda: test_backbone.make_head("dspark"),
    "medusa": lambda: test_medusa.make_head(depth=4),
    "a draft model": lambda: test_draft_model.make_head(test_draft_model.make_target()),
}


@pytest.mark.parametrize("make", [*MAKERS.values(), *OTHERS.values()], ids=[*MAKERS, *OTHERS])
def test_observing_in_pieces_equals_observing_at_once(make: Callable[[], Any]) -> None:
    """Rounds observe a ragged handful of positions at a time, with padding behind; nothing of it may be seen later, nor
    of what was drafted in between."""
    head, shape = make(), "tree:4x3x15"
    sizes = test_medusa.SIZES if isinstance(head, Medusa) else {}
    batch = random_batch([[20], [20]], num_aux_layers=len(head.aux_layer_ids), **sizes)
    whole = head.propose(seen(head, batch, shape, [12, 12]), greedy)
    state = head.new_state(batch.shared, batch_size=2, capacity=28, shape=parse_shape(shape))
    start = torch.zeros(2, dtype=torch.int64)
    for counts in ([5, 2], [1, 4], [4, 1], [2, 4], [0, 1]):
        count = torch.tensor(counts)
        observe(head, state, batch, start.clone(), count, 5)
        pieces = head.propose(state, greedy)
        start += count
    assert torch.equal(whole.tokens, pieces.tokens) and torch.equal(whole.parents, pieces.parents)
    torch.testing.assert_close(whole.scores, pieces.scores)


def test_a_tree_wider_than_the_draft_vocabulary_and_a_draft_as_long_as_the_window_are_refused() -> None:
    assert "tree:2x25x40" in refused(seen, eagle3_head(), random_batch([[20]]), "tree:2x25x40", [9])
    assert "chain:7" in refused(seen, eagle3_head(sliding_window=7), random_batch([[20]]), "chain:7", [9])


@each_form
def test_later_steps_of_some_slots_have_the_losses_and_gradients_that_these_have_among_all(make: Make) -> None:
    head, some, batch = make(), make(), replace(random_batch([[11, 3, 7], [2, 1, 18]]), seed=5)
    some.config = some.config.model_copy(update={"later_slots": 0.4})
    slots, depth = some.draw_later_slots(batch), head.config.depth
    assert slots is not None and len(slots) == 9
    chosen = torch.zeros_like(batch.loss_mask)
    chosen[:, slots] = True
    found = some.loss(batch, torch.ones(depth, dtype=torch.float64))
    total = torch.zeros_like(found.loss)
    for k, scale in enumerate(torch.eye(depth, dtype=torch.float64)):
        of_depth = batch.loss_mask & chosen.roll(2 + k, 1) if k >= head.num_modules else batch.loss_mask
        labels = replace(batch, loss_mask=of_depth)
        whole = head.loss(labels, scale)
        assert float(found.sums[k]) == pytest.approx(float(whole.sums[k])) and found.correct[k] == whole.correct[k]
        assert some.counts(batch)[k] == head.counts(labels)[k]
        total = total + whole.loss
    trained = [[p for p in of.parameters() if p.requires_grad] for of in (some, head)]
    gradients = [torch.autograd.grad(*each) for each in zip((found.loss, total), trained, strict=True)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@each_form
def test_recomputed_steps_have_the_same_gradients_to_the_last_bit(make: Make) -> None:
    gradients = []
    for max_bytes in (None, 0):
        head = make()
        head.max_activation_bytes = max_bytes
        scale = torch.ones(head.config.depth, dtype=torch.float64)
        loss = head.loss(random_batch([[11, 3, 7], [2, 1, 18]]), scale).loss
        gradients.append(torch.autograd.grad(loss, [p for p in head.parameters() if p.requires_grad]))
    assert all(map(torch.equal, *gradients))
