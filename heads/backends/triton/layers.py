"""Small parts of a decoder layer, one fused kernel each, since separate operations would each read and write memory.

    add_norm      residual <- residual + x;  RMS norm of it                       (Zhang and Sennrich, arXiv 1910.07467)
    rope_write    q and k normed per head (optional), rotated by their positions, k and v written to their cache slots
    silu_mul      SiLU(gate) * up of a fused projection's two halves

Statistics are in float32 for every dtype. No program works on two rows, so a row's sums never depend on other rows.

Letters: M rows (batch times tokens), D width, H query heads, Hkv key heads, d head width, I intermediate width.
"""

import torch
from torch import Tensor

from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl
from heads.backends.triton.gemm import silu_of


def add_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add x (M, D), if given, to residual (M, D) in place, and return the RMS norm of the sum. x may be the parts
    (P, M, D) of a product (`heads.backends.triton.gemm.skinny_parts`)."""
    M, D = residual.shape
    out = torch.empty_like(residual)
    _add_norm[(M,)](
        residual, residual if x is None else x, weight, out, eps,
        D=D, PAD=next_power_of_2(D), PARTS=0 if x is None else parts_in(x), num_warps=8 if D > 2048 else 4,
    )  # fmt: skip
    return out


def parts_in(x: Tensor) -> int:
    """Return the number of parts P, 1 if x has no parts."""
    return len(x) if x.dim() == 3 else 1


@jit
def _load_sum(AT, inside, by_part, PARTS: constexpr, kind: constexpr):  # type: ignore[no-untyped-def]
    """Load values in float32; if there are parts, their sum from first to last, rounded to `kind` as a product is."""
    total = tl.load(AT, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in range(1, PARTS):
            total += tl.load(AT + part * by_part, mask=inside, other=0.0)
        total = total.to(kind).to(tl.float32)
    return total


@jit
def _add_norm(RESIDUAL, X, WEIGHT, OUT, eps, D: constexpr, PAD: constexpr, PARTS: constexpr):  # type: ignore[no-untyped-def]
    row, d = tl.program_id(0), tl.arange(0, PAD)
    inside = d < D
    x = tl.load(RESIDUAL + row * D + d, mask=inside, other=0.0)
    if PARTS > 0:
        added = _load_sum(X + row * D + d, inside, tl.num_programs(0) * D, PARTS, RESIDUAL.dtype.element_ty)
        x = (x.to(tl.float32) + added).to(x.dtype)
        tl.store(RESIDUAL + row * D + d, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    weight = tl.load(WEIGHT + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * D + d, (wide * scale * weight).to(OUT.dtype.element_ty), mask=inside)


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Return the rotated queries (M, H, d), and write keys and values to their slots.

    qkv (M, (H + 2 Hkv) * d), a fused projection's output, or its parts (P, M, ..); cos, sin (M, d / 2): of each row's
    position, or of all positions if `positions` (M,) int64 is given; slots (M,) int64 into keys and values (total
    slots, Hkv, d); q_norm, k_norm (d,): RMS norms of each head before the rotation (Qwen3).
    """
    M, Hkv, d = qkv.shape[-2], keys.shape[1], keys.shape[2]
    queries = keys.new_empty(M, num_heads, d)
    some = cos if q_norm is None else q_norm
    _rope_write[(M, num_heads + 2 * Hkv)](
        qkv, cos, sin, slots, slots if positions is None else positions, queries, keys, values, some,
        some if k_norm is None else k_norm, eps, qkv.stride(-2), keys.stride(0), values.stride(0),
        H=num_heads, HKV=Hkv, HALF=d // 2, PAD=next_power_of_2(d // 2), NORM=q_norm is not None,
        LOOK_UP=positions is not None, PARTS=parts_in(qkv),
    )  # fmt: skip
    return queries


@jit
def _rope_write(  # type: ignore[no-untyped-def]
    QKV, COS, SIN, SLOTS, POSITIONS, QUERIES, KEYS, VALUES, Q_NORM, K_NORM, eps, row_stride, key_stride, value_stride,
    H: constexpr, HKV: constexpr, HALF: constexpr, PAD: constexpr, NORM: constexpr, LOOK_UP: constexpr,
    PARTS: constexpr,
):  # fmt: skip
    """Process one head of one row: a query, a key or a value."""
    row, head, i = tl.program_id(0), tl.program_id(1), tl.arange(0, PAD)
    inside = i < HALF
    source = QKV + row * row_stride + head * 2 * HALF
    kind = QUERIES.dtype.element_ty
    by_part = tl.num_programs(0) * row_stride
    first = _load_sum(source + i, inside, by_part, PARTS, kind)
    second = _load_sum(source + HALF + i, inside, by_part, PARTS, kind)
    if head < H + HKV:
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
            norm = Q_NORM if head < H else K_NORM
            # Rounded as a separate norm would round.
            first = (first * scale * tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)).to(kind)
            second = (second * scale * tl.load(norm + HALF + i, mask=inside, other=0.0).to(tl.float32)).to(kind)
            first, second = first.to(tl.float32), second.to(tl.float32)
        at = tl.load(POSITIONS + row) if LOOK_UP else row
        cos = tl.load(COS + at * HALF + i, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(SIN + at * HALF + i, mask=inside, other=0.0).to(tl.float32)
        first, second = first * cos - second * sin, second * cos + first * sin
    slot = tl.load(SLOTS + row)
    if head < H:
        goal = QUERIES + (row * H + head) * 2 * HALF
    elif head < H + HKV:
        goal = KEYS + slot * key_stride + (head - H) * 2 * HALF
    else:
        goal = VALUES + slot * value_stride + (head - H - HKV) * 2 * HALF
    tl.store(goal + i, first.to(kind), mask=inside)
    tl.store(goal + HALF + i, second.to(kind), mask=inside)


def silu_mul(fused: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return SiLU(gate) * up (M, I) of fused (M, 2 I), the gate, then the up, or of its parts (P, M, 2 I), which are
    rounded to dtype."""
    M, I = fused.shape[-2], fused.shape[-1] // 2  # noqa: E741 - the field's letter
    out = fused.new_empty(M, I, dtype=dtype)
    block = min(1024, next_power_of_2(I))
    _silu_mul[(M, -(-I // block))](fused, out, I, fused.stride(-2), BLOCK=block, PARTS=parts_in(fused))
    return out


@jit
def _silu_mul(FUSED, OUT, I, row_stride, BLOCK: constexpr, PARTS: constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    at, by_part = FUSED + row * row_stride + i, tl.num_programs(0) * row_stride
    kind = OUT.dtype.element_ty
    gate = _load_sum(at, inside, by_part, PARTS, kind)
    up = _load_sum(at + I, inside, by_part, PARTS, kind)
    tl.store(OUT + row * I + i, silu_of(gate, up).to(kind), mask=inside)
