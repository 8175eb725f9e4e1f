"""Attention of a draft tree over a static cache: split over the keys, masked by ancestor bits.

A query sees every slot before its sequence's length. Of the tree's own slots (length + j for node j), it sees its
ancestors and itself, given as bits in words of 64. Slots that no query of a tile sees are not read, and may hold
anything. The queries are all nodes of a tree in verification, or the nodes of one level of a growing tree. Query heads
that share a key head, and all nodes, are rows of one tile, so that keys and values are read once. The method is flash
decoding (Dao et al., 2023). Each sequence is cut into splits of fixed sizes, not a fixed number, and the last program
to finish merges the parts in order. So a row's sums are computed in the same order whatever else is in the batch or the
tree, which makes chains bit-identical to plain decoding.

Keys may be wider than values, with additional columns at the end (`rope`): latent attention (DeepSeek-V2, arXiv
2405.04434) stores one vector per token, which is the key and, without its last columns, the value.

Letters: B rows of the batch, N nodes, P nodes that have slots, W words, H query heads, Hkv key heads, G query heads per
key head, S slots per row, d head width, dv width of values.
"""

import math

import torch
from torch import Tensor

from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl, triton

FINE, COARSE = 1024, 256
"""The first FINE slots are cut finely enough to give every processor work, later slots into splits of COARSE. Other
values change the rounding."""
CHUNK = 16
"""Number of splits whose parts are merged into one chunk, before chunks are merged. Other values change the
rounding."""


def ancestor_words(parents: Tensor, depths: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the ancestors of each node in trees of at most `depth` (K) levels: words (B, N, W) int64, where word j //
    64 has bit j % 64 set if node j is the node itself or its ancestor; and paths (B, N, K + 1) int64, these nodes, root
    first.

    parents, depths (B, N): as in `heads.tree.Proposal`; each node is one level below its parent.
    """
    B, N = parents.shape
    W = -(-N // 64)
    words, paths = parents.new_empty(B, N, W), parents.new_empty(B, N, depth + 1)
    _ancestors[(B, W)](
        parents.contiguous(), depths.contiguous(), words, paths, N, W, LEVELS=depth + 1, PAD=next_power_of_2(N)
    )
    return words, paths


def splits_of(slots: int, split: int = 64) -> int:
    """Return the number of splits of `slots` slots. The first splits have `split` slots each."""
    return -(-min(slots, FINE) // split) + -(-max(slots - FINE, 0) // COARSE)


def new_counters(rows: int, heads: int, slots: int, device: torch.device) -> Tensor:
    """Return counters for `tree_attention` with at most these rows (batch times nodes), query heads and slots. They are
    zero before and after every call."""
    return torch.zeros(rows * heads * (1 + -(-splits_of(slots) // CHUNK)), dtype=torch.int32, device=device)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    words: Tensor,
    length: Tensor,
    depths: Tensor | None,
    *,
    behind: int | None = None,
    scale: float | None = None,
    window: int = 0,
    rope: int = 0,
    paths: Tensor | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Return attention (B, N, H, dv) in q's dtype: q (B, N, H, d); keys (B, S, Hkv, d); values (B, S, Hkv, dv).

    words (B, N, W): from `ancestor_words`; length (B,) int64: slots before the tree; depths (B, N) int64: query j is at
    position length + depth_j, required only with paths or a window; behind: P, N if None; window: only keys fewer
    positions away are visible, 0 for all; if P is not N, a key's slot is used as its position, which only makes draft
    tokens appear nearer; scale: factor on the scores, 1 / sqrt(d) if None; rope: number of d's last columns that the
    kernel handles separately, if d is a power of two only without them.

    paths (B, N, K + 1): from `ancestor_words`. With paths, every node reads its ancestors in the order of its path, as
    in the cache of plain decoding, so that trees are bit-identical to it too. Each node is then a separate tile, which
    reads all keys again.

    counters: from `new_counters`, reused by sequential calls; allocated for the call if None or too small.
    """
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    behind = q.shape[1] if behind is None else behind
    B, N, H, d = q.shape
    assert depths is not None or (paths is None and not window)
    S, Hkv, dv = keys.shape[1], keys.shape[2], values.shape[3]
    G = H // Hkv
    wide = dv > 256  # latents: the sums of a few rows fill the registers; float32 operands do too
    small = wide or q.element_size() > 2
    tiled = G if paths is not None else N * G
    rows = max(16, min(16 if small else 64, next_power_of_2(tiled)))  # tensor cores need at least 16 rows
    tiles = triton.cdiv(tiled, rows)
    groups = tiles * (N if paths is not None else 1)
    most = Hkv * groups * FINE // 128  # slots per split so that the first FINE slots give 128 programs
    split = max(64, min(COARSE, 1 << most.bit_length() - 1))
    splits = splits_of(S, split)
    chunks = triton.cdiv(splits, CHUNK)
    number = B * Hkv * groups * (1 + chunks)
    if counters is None or len(counters) < number:
        counters = torch.zeros(number, dtype=torch.int32, device=q.device)
    sums = q.new_empty(B, splits + chunks, N, H, dv, dtype=torch.float32)
    tops = q.new_empty(2, B, splits + chunks, N, H, dtype=torch.float32)
    out = torch.empty(B, N, H, dv, dtype=q.dtype, device=q.device)
    _attention[(B * Hkv, splits, groups)](
        q, keys, values, words if paths is None else paths, length,
        length if depths is None else depths.contiguous(), sums, tops[0], tops[1], out, counters,
        scale, N, behind, S, Hkv, splits, window, tiles,
        q.stride(0), q.stride(1), q.stride(2),
        keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2),
        G=G, W=(words if paths is None else paths).shape[2],
        SPLIT=split, FINE=FINE, COARSE=COARSE, CHUNK=CHUNK, ROWS=rows, SLOTS=32 if small else 64,
        D=d - rope, PAD_D=max(16, next_power_of_2(d - rope)), ROPE=rope, DV=dv, PAD_DV=max(16, next_power_of_2(dv)),
        WINDOW=window > 0, OWN_PATH=paths is not None, BY_SLOT=window > 0 and (paths is not None or behind != N),
        num_warps=8 if wide else 4, num_stages=2,
    )  # fmt: skip
    return out


@jit
def _attention(  # type: ignore[no-untyped-def]
    Q, K, V, WORDS, LENGTH, DEPTHS, SUMS, TOPS, MASSES, OUT, COUNTERS,
    scale, N, P, S, HKV, splits, window, tiles,
    q_b, q_n, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    G: constexpr, W: constexpr, SPLIT: constexpr, FINE: constexpr, COARSE: constexpr, CHUNK: constexpr,
    ROWS: constexpr, SLOTS: constexpr,
    D: constexpr, PAD_D: constexpr, ROPE: constexpr, DV: constexpr, PAD_DV: constexpr,
    WINDOW: constexpr, OWN_PATH: constexpr, BY_SLOT: constexpr,
):  # fmt: skip
    """Process one split of one key head for ROWS (node, head) rows: unnormalized sums, their maxima and masses. The
    last program of a chunk of splits to finish merges the chunk, and the last of these merges the chunks, in order.

    WORDS are the nodes' ancestor bits. With OWN_PATH they are paths of W nodes, and all rows belong to one node.
    """
    b, h = (tl.program_id(0) // HKV).to(tl.int64), tl.program_id(0) % HKV
    part = tl.program_id(1).to(tl.int64)
    length = tl.load(LENGTH + b)
    end = tl.minimum(length + P, S)
    fine: constexpr = FINE // SPLIT
    begin = tl.where(part < fine, part * SPLIT, FINE + (part - fine) * COARSE)
    size = tl.where(part < fine, SPLIT, COARSE)
    if begin >= end:  # the split is empty, and no merge reads it
        return
    if OWN_PATH:
        r = tl.program_id(2) % tiles * ROWS + tl.arange(0, ROWS)
        only = tl.program_id(2) // tiles
        live, node, head = r < G, only + tl.zeros([ROWS], tl.int32), h * G + r
        own_depth = tl.load(DEPTHS + b * N + only)
    else:
        r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        live, node, head = r < N * G, r // G, h * G + r % G
    d, dv = tl.arange(0, PAD_D), tl.arange(0, PAD_DV)
    q_at = Q + b * q_b + node * q_n + head * q_h
    q = tl.load(q_at[:, None] + d[None], mask=live[:, None] & (d < D)[None], other=0.0)
    if ROPE > 0:
        rotated = tl.arange(0, ROPE)
        q_rope = tl.load(q_at[:, None] + D + rotated[None], mask=live[:, None], other=0.0)
    if WINDOW:
        position = length + tl.load(DEPTHS + b * N + node, mask=live, other=0)
    words = WORDS + (b * N + node) * W
    if not OWN_PATH and W == 1:  # before the loop, which is short of registers
        word = tl.load(words, mask=live, other=0)
        shown = tl.reduce_or(word, 0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, PAD_DV], tl.float32)
    for start in range(0, size, SLOTS):
        slot = begin + start + tl.arange(0, SLOTS)
        here = slot < end
        j = slot - length
        behind = tl.maximum(j, 0)
        place = slot
        if OWN_PATH:
            here = here & (j <= own_depth)
            above = tl.load(WORDS + (b * N + only) * W + j, mask=here & (j >= 0), other=0)
            place = tl.where(j < 0, slot, length + above)
        elif W == 1:
            bit = (word[:, None] >> behind[None]) & 1
            here = here & ((j < 0) | ((shown >> behind) & 1 == 1))
        else:  # a tile's slots are bits of at most two words
            first = tl.maximum(begin + start - length, 0) // 64
            low = tl.load(words + tl.minimum(first, W - 1), mask=live, other=0)
            high = tl.load(words + tl.minimum(first + 1, W - 1), mask=live, other=0)
            bit = (tl.where((behind // 64 > first)[None], high[:, None], low[:, None]) >> (behind % 64)[None]) & 1
            shown = tl.where(behind // 64 > first, tl.reduce_or(high, 0), tl.reduce_or(low, 0))
            here = here & ((j < 0) | ((shown >> (behind % 64)) & 1 == 1))
        k_at = K + b * k_b + place * k_s + h * k_h
        k = tl.load(k_at[None] + d[:, None], mask=here[None] & (d < D)[:, None], other=0.0)
        x = tl.dot(q, k, input_precision="ieee")
        if ROPE > 0:
            k_rope = tl.load(k_at[None] + D + rotated[:, None], mask=here[None], other=0.0)
            x += tl.dot(q_rope, k_rope, input_precision="ieee")
        x = x * scale
        if OWN_PATH:  # noqa: SIM108 - paths have no bits
            seen = live[:, None] & here[None]
        else:
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
        shrink, p = tl.exp2(top - base), tl.exp2(x - base[:, None])
        v_at = V + b * v_b + place * v_s + h * v_h
        v = tl.load(v_at[:, None] + dv[None], mask=here[:, None] & (dv < DV)[None], other=0.0)
        mass = mass * shrink + tl.sum(p, 1)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee").to(tl.float32)
        top = newer
    rows = N * HKV * G  # of one split
    used = tl.cdiv(tl.minimum(end, FINE), SPLIT) + tl.cdiv(tl.maximum(end - FINE, 0), COARSE)
    chunk, chunks, most = part // CHUNK, tl.cdiv(used, CHUNK), tl.cdiv(splits, CHUNK)
    at = b * (splits + most) * rows + node * (HKV * G) + head  # of the first part; chunks' parts follow the splits'
    tl.store(TOPS + at + part * rows, top, mask=live)
    tl.store(MASSES + at + part * rows, mass, mask=live)
    sums_at = SUMS + (at + part * rows)[:, None] * DV + dv[None]
    tl.store(sums_at, total, mask=live[:, None] & (dv < DV)[None])
    COUNTERS += (tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)) * (1 + most)
    first, count = at + chunk * CHUNK * rows, tl.minimum(CHUNK, used - chunk * CHUNK)
    last = _is_last(COUNTERS + 1 + chunk, count)
    if last & (chunks > 1):
        goal = at + (splits + chunk) * rows
        _merge(SUMS, TOPS, MASSES, OUT, first, rows, count, goal, live, ROWS, DV, PAD_DV, False)
        last = _is_last(COUNTERS, chunks)
        first, count = at + splits * rows, chunks
    if last:
        goal = (b * N + node) * (HKV * G) + head
        _merge(SUMS, TOPS, MASSES, OUT, first, rows, count, goal, live, ROWS, DV, PAD_DV, True)


@jit
def _merge(  # type: ignore[no-untyped-def]
    SUMS, TOPS, MASSES, OUT, first, step, count, goal, live,
    ROWS: constexpr, DV: constexpr, PAD_DV: constexpr, DONE: constexpr,
):  # fmt: skip
    """Merge `count` parts, first to last, into a part at `goal`, or into row `goal` of OUT. Processes a few columns at
    a time, so that a program can load several parts at once. Loads bypass the L1 cache, since other processors wrote
    the parts."""
    COLUMNS: constexpr = min(PAD_DV, 2048 // ROWS if ROWS < 64 else 16)  # as registers allow
    for start in range(0, PAD_DV, COLUMNS):
        dv = start + tl.arange(0, COLUMNS)
        inside = live[:, None] & (dv < DV)[None]
        top = tl.full([ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in tl.range(0, count, loop_unroll_factor=4):
            at = first + i * step
            own = tl.load(TOPS + at, mask=live, other=-float("inf"), cache_modifier=".cg")
            weighed = tl.load(MASSES + at, mask=live, other=0.0, cache_modifier=".cg")
            sums = tl.load(SUMS + at[:, None] * DV + dv[None], mask=inside, other=0.0, cache_modifier=".cg")
            newer = tl.maximum(top, own)
            base = tl.where(newer == -float("inf"), 0.0, newer)
            old, new = tl.exp2(top - base), tl.exp2(own - base)
            total = total * old[:, None] + sums * new[:, None]
            mass = mass * old + weighed * new
            top = newer
        if DONE:
            total = total / tl.where(mass == 0, 1.0, mass)[:, None]  # 0 for padding that sees nothing
            tl.store(OUT + goal[:, None] * DV + dv[None], total.to(OUT.dtype.element_ty), mask=inside)
        else:
            tl.store(TOPS + goal, top, mask=live)
            tl.store(MASSES + goal, mass, mask=live)
            tl.store(SUMS + goal[:, None] * DV + dv[None], total, mask=inside)


@jit
def _is_last(COUNTER, number):  # type: ignore[no-untyped-def]
    """Return True in the last of `number` programs to call this. That program may read what the other programs have
    stored. The counter is 0 before the first call and after the last."""
    tl.debug_barrier()  # all threads store before one of them counts
    last = tl.atomic_add(COUNTER, 1, sem="acq_rel", scope="gpu") == number - 1
    if last:
        tl.store(COUNTER, 0)
    return last


@jit
def _ancestors(PARENTS, DEPTHS, WORDS, PATHS, N, W, LEVELS: constexpr, PAD: constexpr):  # type: ignore[no-untyped-def]
    """Compute one word of every node of one row: walk up from all nodes, one level at a time."""
    b, w, j = tl.program_id(0), tl.program_id(1), tl.arange(0, PAD)
    real = j < N
    at = j.to(tl.int64)
    depth = tl.load(DEPTHS + b * N + j, mask=real, other=0)
    word = tl.zeros([PAD], tl.int64)
    for back in range(0, LEVELS):
        word = word | tl.where(at // 64 == w, tl.full([PAD], 1, tl.int64) << (at % 64), 0)
        if w == 0:
            # The path ends at the node itself, followed by zeros.
            place = tl.where(back <= depth, depth - back, back)
            tl.store(PATHS + (b * N + j) * LEVELS + place, tl.where(back <= depth, at, 0), mask=real)
        at = tl.load(PARENTS + b * N + at, mask=real, other=0)
    tl.store(WORDS + (b * N + j) * W + w, word, mask=real)
