"""Products of a few rows with a small weight per head: latent attention's absorbed projections.

A program computes one head, for a tile of its outputs and a tile of the rows. The number of rows sets the size of the
row tile. A program sums over the inputs in a fixed order, so that a row's result depends neither on other rows nor on
its index.

Letters: M rows, H heads, K inputs and N outputs of one head.
"""

from torch import Tensor

from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl, triton

OUTS, DEPTH, ROWS = 64, 64, 64
"""Outputs of a tile, inputs per step, and maximum number of rows."""


def per_head_mm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x (M, H, K) times weight (H, K, N) per head, (M, H, N) in x's dtype, summed in float32; in `out` if given.

    Strides may be any, except that the last strides of x and `out` must be 1.
    """
    (M, H, K), N = x.shape, weight.shape[2]
    out = x.new_empty(M, H, N) if out is None else out
    assert x.stride(2) == out.stride(2) == 1
    rows = min(ROWS, max(16, next_power_of_2(M)))
    _per_head[(triton.cdiv(N, OUTS), H, triton.cdiv(M, rows))](
        x, weight, out, M, N, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1), weight.stride(2),
        out.stride(0), out.stride(1), K=K, OUTS=OUTS, DEPTH=DEPTH if x.element_size() < 4 else 32, ROWS=rows,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@jit
def _per_head(  # type: ignore[no-untyped-def]
    X, WEIGHT, OUT, M, N, x_m, x_h, w_h, w_k, w_n, out_m, out_h,
    K: constexpr, OUTS: constexpr, DEPTH: constexpr, ROWS: constexpr,
):  # fmt: skip
    n, h = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.program_id(1).to(tl.int64)
    m, depth = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    total = tl.zeros([OUTS, ROWS], tl.float32)
    for start in range(0, K, DEPTH):
        k = start + depth
        w_at = WEIGHT + h * w_h + n[:, None] * w_n + k[None] * w_k
        w = tl.load(w_at, mask=(n < N)[:, None] & (k < K)[None], other=0.0)
        x = tl.load(X + h * x_h + m[None] * x_m + k[:, None], mask=(m < M)[None] & (k < K)[:, None], other=0.0)
        total += tl.dot(w, x, input_precision="ieee")
    at = OUT + h * out_h + m[None] * out_m + n[:, None]
    tl.store(at, total.to(OUT.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None])
