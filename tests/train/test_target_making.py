"""Loops are found where they are, and their unlikelihood is the paper's formula."""

import torch

from train.target_making import LEAST_REPEATED, repeats, unlikelihood


def test_tokens_of_a_loop_are_found_from_its_second_repetition_on() -> None:
    tokens = torch.arange(3 * 80).view(3, 80)  # no token twice
    tokens[0, 20:60] = torch.arange(40) % 3
    tokens[1, 20:60] = torch.arange(40) % 10
    tokens[2, 20:60] = torch.arange(40) % 17  # longer than the longest period
    found = [row.nonzero()[:, 0].tolist() for row in repeats(tokens)]
    assert found == [list(range(20 + 3 + LEAST_REPEATED, 60)), list(range(20 + 3 * 10, 60)), []]


def test_unlikelihood_is_the_formula_and_pulls_where_the_model_is_sure() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 9, dtype=torch.float32, requires_grad=True)
    tokens, chosen = torch.randint(0, 9, (2, 5)), torch.rand(2, 5) > 0.5
    q = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(unlikelihood(logits, tokens, chosen), -(1 - q[chosen]).log().mean())
    assert unlikelihood(logits, tokens, torch.zeros_like(chosen)) == 0
    sure = torch.zeros(1, 1, 9, requires_grad=True)
    with torch.no_grad():
        sure[0, 0, 4] = 40.0  # 1 - q is 0 in float32
    (grad,) = torch.autograd.grad(unlikelihood(sure, torch.tensor([[4]]), torch.tensor([[True]])), sure)
    torch.testing.assert_close(grad[0, 0, 4], torch.tensor(1.0))
