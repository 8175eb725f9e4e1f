"""The chunked loss against all logits at once, in float64: values, gradients, sums by hand, memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.parts.losses import LOSSES, SPAN, Distribution, draft_loss, likeliest
from tests.heads.conftest import largest_tensor

K, R, D, DT, V, VD = 3, 50, 6, 5, 40, 24


def case(rows: int = R, seed: int = 0) -> dict[str, Any]:
    """Random states and a target, in float64; some rows are not valid at some depths."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    out = 1.5 * randn(V, DT)
    return {
        "states": randn(K, rows, D).requires_grad_(),
        "weight": randn(VD, D).requires_grad_(),
        "valid": torch.rand(K, rows, generator=generator) < 0.8,
        "hidden": randn(rows, DT),
        "target_logits": lambda hidden: hidden @ out.T,
        "draft_to_target": torch.randperm(V, generator=generator)[:VD].sort().values,
        "scale": torch.rand(K, generator=generator, dtype=torch.float64),
    }


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "cross_entropy": lambda p, q: -q.log().gather(-1, p.argmax(-1, keepdim=True))[..., 0],
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
    "negative_log_acceptance": lambda p, q: -(1 - (p - q).abs().sum(-1) / 2).log(),
    "jsd": lambda p, q: (PLAIN["kl"](p, (p + q) / 2) + PLAIN["kl"](q, (p + q) / 2)) / 2,
    # The weight of kl follows the acceptance, but no gradient flows through it.
    "kl_tv": lambda p, q: torch.lerp(
        PLAIN["total_variation"](p, q), PLAIN["kl"](p, q), torch.exp(-3 * torch.minimum(p, q).sum(-1)).detach()
    ),
}


def plain(c: dict[str, Any], loss: Callable[[Tensor, Tensor], Tensor], soft_cap: float | None = None) -> Tensor:
    """Sums (K,) with a graph, with every logit at once."""
    logits = c["target_logits"](c["hidden"])
    counted = c["valid"] & torch.isin(logits.argmax(-1), c["draft_to_target"])
    assert not len(logits) or 0 < counted.sum() < c["valid"].sum()  # some rows' likeliest token cannot be drafted
    p, z = logits[:, c["draft_to_target"]].softmax(-1), c["states"] @ c["weight"].T
    q = (z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap)).softmax(-1)
    return torch.where(counted, loss(p.expand_as(q), q), 0).sum(1)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_equal_the_full_form(
    loss: str, soft_cap: float | None, few_rows: Callable[[int], None]
) -> None:
    c = case()
    wanted = plain(c, PLAIN[loss], soft_cap)
    inputs = (c["states"], c["weight"])
    exact = torch.autograd.grad((wanted * c["scale"]).sum() * 3, inputs)
    guesses = c["draft_to_target"][(c["states"] @ c["weight"].T).argmax(-1)]
    right = (guesses == c["target_logits"](c["hidden"]).argmax(-1)) & c["valid"]
    for rows in (1, 49, R):
        few_rows(rows)
        found = draft_loss(**c, loss=loss, soft_cap=soft_cap)
        torch.testing.assert_close(found.sums, wanted.detach())
        torch.testing.assert_close(found.loss, (wanted.detach() * c["scale"]).sum())
        for a, b in zip(torch.autograd.grad(found.loss * 3, inputs), exact, strict=True):
            torch.testing.assert_close(a, b)
        assert not found.sums.requires_grad and found.correct.tolist() == right.sum(1).tolist()


@pytest.mark.parametrize("loss", LOSSES)
def test_distributions_that_share_nothing_stay_finite(loss: str) -> None:
    """In float32, where probabilities underflow to zero on both sides."""
    z = torch.tensor([[200.0, -200.0, 0.0]], requires_grad=True)
    logp = torch.tensor([[-200.0, 200.0, 0.0]]).log_softmax(-1)
    value = LOSSES[loss](Distribution(z), Distribution(logp))
    value.sum().backward()
    assert value.isfinite().all() and z.grad is not None and z.grad.isfinite().all()


@pytest.mark.parametrize("width", [3 * SPAN, 3 * SPAN + 1])
def test_the_likeliest_is_the_lowest_on_ties(width: int) -> None:
    few = torch.randint(5, (40, width), generator=torch.Generator().manual_seed(1)).float()
    assert likeliest(few).tolist() == [row.index(max(row)) for row in few.tolist()]
    distinct = torch.stack([torch.randperm(width) for _ in range(20)]).float()
    assert torch.equal(likeliest(distinct), distinct.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_of_the_valid_rows_alone_give_the_same(dtype: torch.dtype, few_rows: Callable[[int], None]) -> None:
    """Also where a chunk holds no valid row."""
    c = case()
    c |= {name: c[name].detach().to(dtype).requires_grad_() for name in ("states", "weight")}
    c |= {"target_logits": lambda hidden, of=c["target_logits"]: of(hidden).to(dtype), "scale": c["scale"].to(dtype)}
    c["valid"][1, :20] = False
    few_rows(4)
    losses = [draft_loss(**c)]
    alone = [state[valid] for state, valid in zip(c["states"], c["valid"], strict=True)]
    losses.append(draft_loss(**c | {"states": alone}))
    gradients = [torch.autograd.grad(found.loss, (c["states"], c["weight"])) for found in losses]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(losses[0].sums, losses[1].sums)
    assert torch.equal(losses[0].correct, losses[1].correct)


def test_no_rows_at_all() -> None:
    c = case(rows=0)
    found = draft_loss(**c)
    found.loss.backward()
    assert not found.loss.any() and not found.sums.any() and not found.correct.any()
    assert c["weight"].grad is not None and not c["weight"].grad.any() and c["states"].grad.shape == (K, 0, D)


def test_narrow_states_are_reduced_in_float32() -> None:
    c = case()
    wanted = plain(c, PLAIN["kl"])
    narrow = {**c, "states": c["states"].detach().bfloat16().requires_grad_(), "scale": c["scale"].float()}
    narrow["weight"] = c["weight"].detach().float().requires_grad_()
    found = draft_loss(**narrow)
    found.loss.backward()
    assert found.sums.dtype == found.correct.dtype == found.loss.dtype == torch.float32
    assert narrow["states"].grad.dtype == torch.bfloat16 and narrow["weight"].grad.dtype == torch.float32
    torch.testing.assert_close(found.sums.double(), wanted.detach(), rtol=0.02, atol=0.02)


def test_no_tensor_of_all_rows_by_the_vocabulary_is_made(few_rows: Callable[[int], None]) -> None:
    c = case(rows=640)
    few_rows(64)
    most = largest_tensor(lambda: draft_loss(**c).loss.backward())
    assert most == max(K * 640 * D, 64 * V) < 640 * VD
    assert largest_tensor(lambda: plain(c, PLAIN["kl"]).sum().backward()) >= K * 640 * VD
