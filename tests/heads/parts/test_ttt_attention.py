"""Training-time-test attention against one dense softmax in float64: values, gradients, memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from heads.parts.ttt_attention import BLOCK, by_flex, causal_attention
from heads.targets.masks import TILE
from tests.heads.conftest import largest_tensor

CASES = [  # B, H, key heads, T, further steps, window, all rows or one of so many
    (1, 1, 1, 1, 1, None, 1), (1, 3, 3, 128, 1, 5, 1),
    *((2, 4, 2, 150, *case, 1) for case in ((0, None), (0, 5), (1, 140), (3, None), (3, 5))),
    *((1, 6, 1, 257, *case, 1) for case in ((0, 140), (1, None), (3, 140))),
    *((2, 4, 2, 300, 1, *case) for case in ((None, 2), (140, 3), (9, 150))),
]  # fmt: skip


def dense_flex(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, enable_gqa: bool, return_aux: AuxRequest | None
) -> Any:
    """FlexAttention by its definition, with gradients, which torch's own has on a GPU alone."""
    N, T, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    assert enable_gqa == (G > 1)
    batch = torch.arange(len(q))[:, None, None]
    tiles = block_mask.to_dense()[:, 0].bool().repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[:, :N, :T]
    visible = tiles & block_mask.mask_mod(batch, batch, torch.arange(N)[:, None], torch.arange(T))
    k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~visible[:, None], -torch.inf)
    out = scores.softmax(-1) @ v
    return out if return_aux is None else (out, AuxOutput(lse=scores.logsumexp(-1)))


def tensors(*shape: int, count: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


def some_documents(B: int, T: int) -> Tensor:
    """Documents of ragged lengths in each row, padding at the end of the last."""
    cuts = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.05
    documents = cuts.long().cumsum(1)
    documents[-1, T - T // 4 :] = -1
    return documents


def dense(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Tensor, window: int | None = None) -> Tensor:
    """One softmax over T causal keys and the row's own key of every later step: mask (T, T * steps)."""
    T, G = q.shape[2], q.shape[1] // keys[0].shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
    if window is not None:  # row t stands at t + steps before
        slot = torch.arange(T)
        causal &= slot[:, None] + len(keys) - 1 - slot < window
    own = torch.eye(T, dtype=torch.bool).expand_as(causal)
    mask = torch.cat([causal, *[own] * (len(keys) - 1)], dim=-1)[:, None]
    k, v = (torch.cat(parts, dim=2).repeat_interleave(G, dim=1) for parts in (keys, values))
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(("B", "H", "Hkv", "T", "own", "window", "every"), CASES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_output_and_gradients_of_both_forms_equal_the_dense_one(
    B: int, H: int, Hkv: int, T: int, own: int, window: int | None, every: int
) -> None:
    """Of all rows, or of some where the loss is of these alone."""
    (q,), (grad,) = tensors(B, H, T, 4), tensors(B, H, T, 6, seed=3)
    keys, values = tensors(B, Hkv, T, 4, count=1 + own, seed=1), tensors(B, Hkv, T, 6, count=1 + own, seed=2)
    documents, rows = some_documents(B, T), torch.randperm(T)[: T // every].sort().values
    slots = None if every == 1 else rows
    wanted, grad = dense(q, keys, values, documents, window)[:, :, rows], grad[:, :, rows]
    inputs = [q, *keys, *values]
    exact = torch.autograd.grad(wanted, inputs, grad)
    some, *others = (x[:, :, rows] for x in (q, *keys[1:], *values[1:]))
    given = (some, keys[0], values[0], documents, others[:own], others[own:])
    reach = None if window is None else window - own
    for found in (causal_attention(*given, window, slots), by_flex(*given, reach, dense_flex, slots)):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
        for a, b in zip(torch.autograd.grad(found, inputs, grad, retain_graph=True), exact, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    some, k, v, *others = (x.detach() for x in (some, keys[0], values[0], *others))
    by_torch = by_flex(some, k, v, documents, others[:own], others[own:], reach, slots=slots)
    torch.testing.assert_close(by_torch, wanted.detach(), atol=1e-6, rtol=1e-6)


def test_large_scores_stay_finite() -> None:
    (q, k, v) = ((x.detach().float() * 300).requires_grad_() for x in tensors(1, 2, 40, 4, count=3))
    out = causal_attention(q, k, v, torch.zeros(1, 40, dtype=torch.int64), [-k], [v])
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_inputs_are_weighed_in_float32(dtype: torch.dtype) -> None:
    q, k, v, k1, v1 = (x.detach().to(dtype).requires_grad_() for x in tensors(1, 2, 200, 8, count=5))
    documents = some_documents(1, 200)
    out = causal_attention(q, k, v, documents, [k1], [v1])
    wanted = dense(q.double(), [k.double(), k1.double()], [v.double(), v1.double()], documents)
    assert out.dtype == dtype
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    exact = torch.autograd.grad(wanted.sum(), (q, k, v, k1, v1))
    for a, b in zip(torch.autograd.grad(out.float().sum(), (q, k, v, k1, v1)), exact, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, atol=2 * tolerance, rtol=2 * tolerance)


def test_no_tensor_of_the_square_of_the_length_is_made() -> None:
    T, H = 1024, 2
    (q,), (k, v, k1, v1) = tensors(1, H, T, 4), tensors(1, 1, T, 4, count=4, seed=1)
    documents = torch.zeros(1, T, dtype=torch.int64)

    def ours() -> None:
        causal_attention(q, k, v, documents, [k1], [v1]).sum().backward()

    assert largest_tensor(ours) == H * BLOCK * T < T * T
    assert largest_tensor(lambda: dense(q, [k], [v], documents).sum().backward()) >= H * T * T
