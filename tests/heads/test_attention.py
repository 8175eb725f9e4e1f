"""Training-time-test attention against one dense softmax in float64: values, log-sum-exp, gradients, memory."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from heads import attention
from heads.attention import causal_attention, merge_steps

SHAPES = [(1, 1, 1, 1), (2, 4, 2, 150), (1, 3, 3, 128), (1, 6, 1, 257)]  # B, H, key heads, T


def tensors(*shape: int, count: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


def some_documents(B: int, T: int) -> Tensor:
    """Documents of ragged lengths in each row, padding at the end of the last."""
    cuts = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.05
    documents = cuts.long().cumsum(1)
    documents[-1, T - T // 4 :] = -1
    return documents


def dense(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over T causal keys and the row's own key of every later step: mask (T, T * steps)."""
    T, G = q.shape[2], q.shape[1] // keys[0].shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
    own = torch.eye(T, dtype=torch.bool).expand_as(causal)
    mask = torch.cat([causal, *[own] * (len(keys) - 1)], dim=-1)[:, None]
    k, v = (torch.cat(parts, dim=2).repeat_interleave(G, dim=1) for parts in (keys, values))
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize(("B", "H", "Hkv", "T"), SHAPES)
def test_output_and_log_sum_exp_and_their_gradients_equal_the_dense_form(B: int, H: int, Hkv: int, T: int) -> None:
    (q,), (k, v) = tensors(B, H, T, 4), tensors(B, Hkv, T, 4, count=2, seed=1)
    documents = some_documents(B, T)
    (grad_out,), (grad_lse,) = tensors(B, H, T, 4, seed=2), tensors(B, H, T, seed=3)
    wanted = dense(q, [k], [v], documents)
    found = causal_attention(q, k, v, documents)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    for outputs in ((0,), (1,), (0, 1)):  # each alone too: one must not hide in the other
        grads = [(grad_out, grad_lse)[i] for i in outputs]
        exact, ours = (
            torch.autograd.grad([x[i] for i in outputs], (q, k, v), grads, retain_graph=True, materialize_grads=True)
            for x in (wanted, found)
        )
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_merged_steps_equal_one_softmax_over_all_keys(steps: int) -> None:
    B, H, Hkv, T = 2, 4, 2, 150
    (q,) = tensors(B, H, T, 4)
    keys, values = tensors(B, Hkv, T, 4, count=steps, seed=1), tensors(B, Hkv, T, 4, count=steps, seed=2)
    documents = some_documents(B, T)
    (grad,) = tensors(B, H, T, 4, seed=3)
    wanted, _ = dense(q, keys, values, documents)
    found = merge_steps(q, *causal_attention(q, keys[0], values[0], documents), keys[1:], values[1:])
    torch.testing.assert_close(found, wanted)
    inputs = [q, *keys, *values]
    for a, b in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_by_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 3)  # several blocks, the last one short
    (q,), (k, v, k1, v1) = tensors(1, 2, 5, 2), tensors(1, 1, 5, 2, count=4, seed=1)
    documents = torch.tensor([[0, 0, 1, 1, 1]])

    def function(q: Tensor, k: Tensor, v: Tensor, k1: Tensor, v1: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = causal_attention(q, k, v, documents)
        return merge_steps(q, out, lse, [k1], [v1]), lse

    assert torch.autograd.gradcheck(function, (q, k, v, k1, v1))


def test_a_second_derivative_is_refused() -> None:
    (q, k, v) = tensors(1, 1, 4, 2, count=3)
    out, _ = causal_attention(q, k, v, torch.zeros(1, 4, dtype=torch.int64))
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_large_scores_stay_finite() -> None:
    (q, k, v) = (x.detach().float() * 300 for x in tensors(1, 2, 40, 4, count=3))
    out, lse = causal_attention(q, k, v, torch.zeros(1, 40, dtype=torch.int64))
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_inputs_keep_a_wide_log_sum_exp(dtype: torch.dtype) -> None:
    (q, k, v) = (x.detach().to(dtype).requires_grad_() for x in tensors(1, 2, 200, 8, count=3))
    documents = some_documents(1, 200)
    out, lse = causal_attention(q, k, v, documents)
    wanted, wide = dense(q.double(), [k.double()], [v.double()], documents)
    assert out.dtype == dtype and lse.dtype == torch.float32
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(lse.double(), wide, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    (out.float().sum() + lse.sum()).backward()
    assert q.grad is not None and q.grad.dtype == dtype


def test_no_tensor_of_the_square_of_the_length_is_made(largest_tensor: Callable[[Callable[[], object]], int]) -> None:
    T, H = 1024, 2
    (q,), (k, v, k1, v1) = tensors(1, H, T, 4), tensors(1, 1, T, 4, count=4, seed=1)
    documents = torch.zeros(1, T, dtype=torch.int64)

    def ours() -> None:
        merge_steps(q, *causal_attention(q, k, v, documents), [k1], [v1]).sum().backward()

    assert largest_tensor(ours) == H * attention.BLOCK * T < T * T
    assert largest_tensor(lambda: dense(q, [k], [v], documents)[0].sum().backward()) >= H * T * T
