"""Recomputation of training steps: the same gradients from fewer saved activations."""

import torch

from heads.methods.recycling import Recycling
from tests.heads.methods.test_recycling import Make, each_form
from tests.heads.small_heads import random_batch


def gradients(head: Recycling, *, recompute: bool) -> list[torch.Tensor]:
    head.most_kept = 0 if recompute else None
    loss = head.loss(random_batch([[11, 3, 7], [2, 1, 18]]), torch.ones(head.config.depth, dtype=torch.float64)).loss
    return list(torch.autograd.grad(loss, [p for p in head.parameters() if p.requires_grad]))


@each_form
def test_gradients_are_equal_to_the_last_bit(make: Make) -> None:
    for kept, recomputed in zip(gradients(make(), recompute=False), gradients(make(), recompute=True), strict=True):
        assert torch.equal(kept, recomputed)
