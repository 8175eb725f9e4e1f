"""Products with the weights of the experts that a step's tokens chose, and their weighted sums.

A chosen expert's weights are read once. A program computes a tile of one expert's outputs, and exits if no token chose
the expert. Else it multiplies the tile by all tokens of the step and stores the results of the tokens that chose it:
for up to 64 tokens, the arithmetic costs nothing compared with reading the weights. The grid covers every expert, so
that nothing waits for the routing.

Letters: M rows (tokens), A experts active per token, X experts, K columns of a weight, N rows of a weight.
"""

from torch import Tensor

from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl, triton

MOST_ROWS = 64
OUTS, DEPTH = 64, 128


def expert_mm(x: Tensor, ids: Tensor, weight: Tensor, tile: int = 0) -> Tensor:
    """Return the products of each token with its experts: (M, A, N) in x's dtype, summed in float32.

    x (M, K), one input per token, or (M, A, K), one per token and expert; ids (M, A) int64, distinct for each token;
    weight (X, N, K); M at most 64. `tile`: tokens that a program allocates, if more than M; parts of one step need the
    same value.
    """
    (M, A), (X, N, K) = ids.shape, weight.shape
    out = x.new_empty(M, A, N)
    by_visit = x.dim() == 3
    _experts[(triton.cdiv(N, OUTS), X)](
        x, ids.contiguous(), weight, out, M, N, x.stride(0), x.stride(1) if by_visit else 0, weight.stride(0),
        weight.stride(1), K=K, A=A, ACTIVE=next_power_of_2(A),
        TOKENS=max(16, next_power_of_2(max(M, tile))), OUTS=OUTS, DEPTH=DEPTH if x.element_size() < 4 else 32,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@jit
def _experts(  # type: ignore[no-untyped-def]
    X, IDS, WEIGHT, OUT, M, N, x_m, x_a, w_x, w_n,
    K: constexpr, A: constexpr, ACTIVE: constexpr, TOKENS: constexpr, OUTS: constexpr, DEPTH: constexpr,
):  # fmt: skip
    """Compute OUTS outputs of one expert for the tokens that chose it."""
    n, expert = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.program_id(1)
    m, a, depth = tl.arange(0, TOKENS), tl.arange(0, ACTIVE), tl.arange(0, DEPTH)
    chosen = tl.load(IDS + m[:, None] * A + a[None], mask=(m < M)[:, None] & (a < A)[None], other=-1) == expert
    visits = tl.sum(chosen.to(tl.int32), 1)
    if tl.sum(visits, 0) > 0:
        place = tl.sum(tl.where(chosen, a[None], 0), 1)  # index of this expert in the token's list
        total = tl.zeros([OUTS, TOKENS], tl.float32)
        own = WEIGHT + expert.to(tl.int64) * w_x
        for start in range(0, K, DEPTH):
            k = start + depth
            w = tl.load(own + n[:, None] * w_n + k[None], mask=(n < N)[:, None] & (k < K)[None], other=0.0)
            x = tl.load(
                X + (m * x_m + place * x_a)[None] + k[:, None], mask=(visits > 0)[None] & (k < K)[:, None], other=0.0
            )
            total += tl.dot(w, x, input_precision="ieee")
        at = OUT + ((m * A + place) * N)[None] + n[:, None]
        tl.store(at, total.to(OUT.dtype.element_ty), mask=(n < N)[:, None] & (visits > 0)[None])


def weigh_visits(visits: Tensor, weights: Tensor, added: Tensor | None) -> Tensor:
    """Return each token's weighted sum (M, N) of its experts' outputs, in the dtype of visits (M, A, N), with weights
    (M, A) float32. The sum is in float32 in the order of the token's list, with `added` (M, N) last."""
    M, A, N = visits.shape
    out = visits.new_empty(M, N)
    _weigh_visits[(M, triton.cdiv(N, 1024))](
        visits.contiguous(), weights.contiguous(), out if added is None else added.contiguous(), out, N,
        A=A, ADDS=added is not None, BLOCK=1024,
    )  # fmt: skip
    return out


@jit
def _weigh_visits(VISITS, WEIGHTS, ADDED, OUT, N, A: constexpr, ADDS: constexpr, BLOCK: constexpr):  # type: ignore[no-untyped-def]
    """Compute one block of one token."""
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for a in range(0, A):
        visit = tl.load(VISITS + (m * A + a) * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += visit * tl.load(WEIGHTS + m * A + a)
    if ADDS:
        total += tl.load(ADDED + m * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(OUT + m * N + n, total.to(OUT.dtype.element_ty), mask=n < N)
