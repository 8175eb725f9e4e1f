"""Attention of a draft tree over a static cache: in torch, with masks, and as a Triton kernel, with ancestor bits.

`masked_attention` is the torch form. The kernel is split over the keys. A query sees every slot before its sequence's
length. Of the slots after it, it sees those whose bits are set (`heads.kernels.slots.VisibleSlots`). Slots that no
query of a tile sees are not read, and may hold anything. Query heads that share a key head, and all nodes, are rows of
one tile, so that keys and values are read once. The method is flash decoding (Dao et al., 2023). Each sequence is cut
into splits of fixed sizes, not a fixed number, and the last program to finish merges the parts in order. So a row's
sums are computed in the same order whatever else is in the batch or the tree, which makes chains bit-identical to plain
decoding.

Letters: B rows of the batch, N nodes, P slots after the length, W words, H query heads, Hkv key heads, G query heads
per key head, S slots per row, d head width.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heads.kernels.slots import VisibleSlots
from heads.kernels.triton_support import constexpr, jit, next_power_of_2, tl, triton

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A head's attention: q (B, H, T, d), k and v (B, Hkv, T, d), q and k rotated -> (B, H, T, d). Only this differs
between training and drafting."""
FINE, COARSE = 1024, 256
"""The first FINE slots are cut finely enough to give every processor work, later slots into splits of COARSE. Other
values change the rounding."""
CHUNK = 16
"""Number of splits whose parts are merged into one chunk, before chunks are merged. Other values change the
rounding."""
MAX_BYTES = 1 << 28
"""Maximum size of the parts of all splits. Rows of the batch that need more, as with prompts, run one by one."""


def masked_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Return attention (B, N, H, d): q (B, N, H, d'); keys (B, S, Hkv, d') and values (B, S, Hkv, d); mask, added to
    scores, from `for_groups`; scale: factor on the scores, 1 / sqrt(d') if None.

    The query heads of a key head act as further queries of it, so that no key is copied for every query head.
    """
    (B, N, H, d), Hkv = q.shape, keys.shape[2]
    if Hkv == 1 and q.device.type == "cpu":  # three small products beat the fused kernel
        scale = 1 / math.sqrt(d) if scale is None else scale
        scores = torch.baddbmm(mask, q.reshape(B, N * H, d), keys[:, :, 0].mT, alpha=scale)
        return torch.bmm(scores.softmax(-1), values[:, :, 0]).view(B, N, H, -1)
    grouped = q.unflatten(2, (Hkv, -1)).transpose(1, 2).reshape(B, Hkv, N * H // Hkv, d)
    keys = keys.transpose(1, 2)
    values = values.transpose(1, 2)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None], scale=scale)
    by_head: Tensor = out.unflatten(2, (N, -1)).transpose(1, 2).reshape(B, N, H, -1)
    return by_head


def for_groups(mask: Tensor, group_size: int) -> Tensor:
    """Return a mask (B, N, S) with a row for each query of a key head, (B, N * G, S)."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(group_size, dim=1)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: VisibleSlots,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return attention (B, N, H, d) in q's dtype: q (B, N, H, d); keys and values (B, S, Hkv, d).

    window: only keys fewer positions away are visible, None for all; scale: factor on the scores, 1 / sqrt(d) if None.
    """
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    (B, N, H, d), (S, Hkv) = q.shape, keys.shape[1:3]
    small = q.element_size() > 2
    G = H // Hkv
    rows = max(16, min(16 if small else 64, next_power_of_2(N * G)))  # tensor cores need at least 16 rows
    tiles = triton.cdiv(N * G, rows)
    most = Hkv * tiles * FINE // 128  # slots per split so that the first FINE slots give 128 programs
    split = max(64, min(COARSE, 1 << most.bit_length() - 1))
    splits = -(-min(S, FINE) // split) + -(-max(S - FINE, 0) // COARSE)
    chunks = triton.cdiv(splits, CHUNK)
    assert all(part.is_contiguous() for part in (visible.length, visible.words, visible.depths))
    if B > 1 and 4 * B * splits * N * H * d > MAX_BYTES:
        rows_of = [slice(b, b + 1) for b in range(B)]
        parts = [tree_attention(q[b], keys[b], values[b], visible.of(b), scale=scale, window=window) for b in rows_of]
        return torch.cat(parts)
    number = B * Hkv * tiles * (1 + chunks)
    if visible.counters is None or len(visible.counters) < number:  # zero before and after every call
        visible.counters = torch.zeros(number, dtype=torch.int32, device=q.device)
    sums = q.new_empty(B, splits + chunks, N, H, d, dtype=torch.float32)
    tops = q.new_empty(2, B, splits + chunks, N, H, dtype=torch.float32)
    out = torch.empty(B, N, H, d, dtype=q.dtype, device=q.device)
    _attention[(B * Hkv, splits, tiles)](
        q, keys, values, visible.words, visible.length, visible.depths, sums, tops[0], tops[1], out, visible.counters,
        scale, N, visible.behind, S, Hkv, splits, window or 0,
        q.stride(0), q.stride(1), q.stride(2),
        keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        G=G, W=visible.words.shape[2],
        SPLIT=split, FINE=FINE, COARSE=COARSE, CHUNK=CHUNK, ROWS=rows, SLOTS=32 if small else 64,
        D=d, PAD_D=max(16, next_power_of_2(d)),
        WINDOW=window is not None, BY_SLOT=window is not None and visible.by_slot,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@jit
def _attention(  # type: ignore[no-untyped-def]
    Q, K, V, WORDS, LENGTH, DEPTHS, SUMS, TOPS, MASSES, OUT, COUNTERS,
    scale, N, P, S, HKV, splits, window,
    q_b, q_n, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    G: constexpr, W: constexpr, SPLIT: constexpr, FINE: constexpr, COARSE: constexpr, CHUNK: constexpr,
    ROWS: constexpr, SLOTS: constexpr, D: constexpr, PAD_D: constexpr, WINDOW: constexpr, BY_SLOT: constexpr,
):  # fmt: skip
    """Process one split of one key head for ROWS (node, head) rows: unnormalized sums, their maxima and masses. The
    last program of a chunk of splits to finish merges the chunk, and the last of these merges the chunks, in order."""
    b = (tl.program_id(0) // HKV).to(tl.int64)
    h = tl.program_id(0) % HKV
    part = tl.program_id(1).to(tl.int64)
    length = tl.load(LENGTH + b)
    end = tl.minimum(length + P, S)
    fine: constexpr = FINE // SPLIT
    begin = tl.where(part < fine, part * SPLIT, FINE + (part - fine) * COARSE)
    size = tl.where(part < fine, SPLIT, COARSE)
    if begin >= end:  # the split is empty, and no merge reads it
        return
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live = r < N * G
    node = r // G
    head = h * G + r % G
    d = tl.arange(0, PAD_D)
    q_at = Q + b * q_b + node * q_n + head * q_h
    q = tl.load(q_at[:, None] + d[None], mask=live[:, None] & (d < D)[None], other=0.0)
    if WINDOW:
        position = length + tl.load(DEPTHS + b * N + node, mask=live, other=0)
    words = WORDS + (b * N + node) * W
    if W == 1:  # before the loop, which is short of registers
        word = tl.load(words, mask=live, other=0)
        shown = tl.reduce_or(word, 0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, PAD_D], tl.float32)
    for start in range(0, size, SLOTS):
        slot = begin + start + tl.arange(0, SLOTS)
        here = slot < end
        j = slot - length
        behind = tl.minimum(tl.maximum(j, 0), W * 64 - 1)
        if W == 1:
            bit = (word[:, None] >> behind[None]) & 1
            here = here & ((j < 0) | ((shown >> behind) & 1 == 1))
        else:  # a tile's slots are bits of at most two words
            first = tl.maximum(begin + start - length, 0) // 64
            low = tl.load(words + tl.minimum(first, W - 1), mask=live, other=0)
            high = tl.load(words + tl.minimum(first + 1, W - 1), mask=live, other=0)
            bit = (tl.where((behind // 64 > first)[None], high[:, None], low[:, None]) >> (behind % 64)[None]) & 1
            shown = tl.where(behind // 64 > first, tl.reduce_or(high, 0), tl.reduce_or(low, 0))
            here = here & ((j < 0) | ((shown >> (behind % 64)) & 1 == 1))
        k_at = K + b * k_b + slot * k_s + h * k_h
        k = tl.load(k_at[None] + d[:, None], mask=here[None] & (d < D)[:, None], other=0.0)
        x = tl.dot(q, k, input_precision="ieee") * scale
        seen = here[None] & ((j < 0)[None] | (bit == 1))
        if WINDOW:
            stands = slot
            if not BY_SLOT:
                depth = tl.load(DEPTHS + b * N + j, mask=here & (j >= 0), other=0)
                stands = tl.where(j < 0, slot, length + depth)
            seen = seen & (position[:, None] - stands[None] < window)
        x = tl.where(seen, x * 1.4426950408889634, -float("inf"))
        newer = tl.maximum(top, tl.max(x, 1))
        base = tl.where(newer == -float("inf"), 0.0, newer)
        shrink = tl.exp2(top - base)
        p = tl.exp2(x - base[:, None])
        v_at = V + b * v_b + slot * v_s + h * v_h
        v = tl.load(v_at[:, None] + d[None], mask=here[:, None] & (d < D)[None], other=0.0)
        mass = mass * shrink + tl.sum(p, 1)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee").to(tl.float32)
        top = newer
    rows = N * HKV * G  # of one split
    used = tl.cdiv(tl.minimum(end, FINE), SPLIT) + tl.cdiv(tl.maximum(end - FINE, 0), COARSE)
    chunk = part // CHUNK
    chunks = tl.cdiv(used, CHUNK)
    most = tl.cdiv(splits, CHUNK)
    at = b * (splits + most) * rows + node * (HKV * G) + head  # of the first part; chunks' parts follow the splits'
    tl.store(TOPS + at + part * rows, top, mask=live)
    tl.store(MASSES + at + part * rows, mass, mask=live)
    sums_at = SUMS + (at + part * rows)[:, None] * D + d[None]
    tl.store(sums_at, total, mask=live[:, None] & (d < D)[None])
    COUNTERS += (tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)) * (1 + most)
    first = at + chunk * CHUNK * rows
    count = tl.minimum(CHUNK, used - chunk * CHUNK)
    last = _is_last(COUNTERS + 1 + chunk, count)
    if last & (chunks > 1):
        goal = at + (splits + chunk) * rows
        _merge(SUMS, TOPS, MASSES, OUT, first, rows, count, goal, live, ROWS, D, PAD_D, False)
        last = _is_last(COUNTERS, chunks)
        first = at + splits * rows
        count = chunks
    if last:
        goal = (b * N + node) * (HKV * G) + head
        _merge(SUMS, TOPS, MASSES, OUT, first, rows, count, goal, live, ROWS, D, PAD_D, True)


@jit
def _merge(  # type: ignore[no-untyped-def]
    SUMS, TOPS, MASSES, OUT, first, step, count, goal, live,
    ROWS: constexpr, D: constexpr, PAD_D: constexpr, DONE: constexpr,
):  # fmt: skip
    """Merge `count` parts, first to last, into a part at `goal`, or into row `goal` of OUT. Processes a few columns at
    a time, so that a program can load several parts at once. Loads bypass the L1 cache, since other processors wrote
    the parts."""
    COLUMNS: constexpr = min(PAD_D, 2048 // ROWS if ROWS < 64 else 16)  # as registers allow
    for start in range(0, PAD_D, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        inside = live[:, None] & (d < D)[None]
        top = tl.full([ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in tl.range(0, count, loop_unroll_factor=4):
            at = first + i * step
            own = tl.load(TOPS + at, mask=live, other=-float("inf"), cache_modifier=".cg")
            weighed = tl.load(MASSES + at, mask=live, other=0.0, cache_modifier=".cg")
            sums = tl.load(SUMS + at[:, None] * D + d[None], mask=inside, other=0.0, cache_modifier=".cg")
            newer = tl.maximum(top, own)
            base = tl.where(newer == -float("inf"), 0.0, newer)
            old = tl.exp2(top - base)
            new = tl.exp2(own - base)
            total = total * old[:, None] + sums * new[:, None]
            mass = mass * old + weighed * new
            top = newer
        if DONE:
            total = total / tl.where(mass == 0, 1.0, mass)[:, None]  # 0 for padding that sees nothing
            tl.store(OUT + goal[:, None] * D + d[None], total.to(OUT.dtype.element_ty), mask=inside)
        else:
            tl.store(TOPS + goal, top, mask=live)
            tl.store(MASSES + goal, mass, mask=live)
            tl.store(SUMS + goal[:, None] * D + d[None], total, mask=inside)


@jit
def _is_last(COUNTER, number):  # type: ignore[no-untyped-def]
    """Return True in the last of `number` programs to call this. That program may read what the other programs have
    stored. The counter is 0 before the first call and after the last."""
    tl.debug_barrier()  # all threads store before one of them counts
    last = tl.atomic_add(COUNTER, 1, sem="acq_rel", scope="gpu") == number - 1
    if last:
        tl.store(COUNTER, 0)
    return last
