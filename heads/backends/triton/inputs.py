"""First and last operations of a draft's step, one kernel each.

    stand        positions and slots of the tokens, and the bits of what they see
    enter        the same for a head that recycles its state, and also the tokens' normed embeddings concatenated with
                 their normed states, and the states themselves, with which the residual stream begins
    take_newest  update of the start of the next draft from the last valid token of each row

Letters: B batch, W tokens per row, R = B * W rows, D hidden, V vocabulary, S cache slots per row, P nodes that have
slots after the observed ones, A states per row.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from heads.backends.slot_mapping import Drafted, Observed
from heads.backends.torch.linear import Norm
from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl


@dataclass(frozen=True)
class Stand:
    """Result of `stand`."""

    positions: Tensor  # (R,) int64
    slots: Tensor  # (R,) int64, in flat storage
    words: Tensor  # (B, W, P / 64 rounded up; W / 64 for observed tokens) int64, as `attention.ancestor_words`


def stand(mapping: Observed | Drafted, *, behind: int) -> Stand:
    """Return the tokens' positions, slots and bits. behind: P. Invalid tokens go to the last slot of their row, and see
    no slot after the length."""
    made, given, options = _rows(mapping, behind)
    _stand[(len(made.positions),)](*given, **options)
    return made


def _rows(mapping: Observed | Drafted, behind: int) -> tuple[Stand, tuple[Any, ...], dict[str, Any]]:
    """Return the tensors that `_place` fills, and its arguments and options."""
    S = len(mapping.slot)
    if isinstance(mapping, Drafted):
        first, paths, count = mapping.length, mapping.paths, None
        B, W, level = paths.shape
        words = first.new_empty(B, W, -(-behind // 64))
    else:
        first, paths, count = mapping.start, mapping.slot[None, None], mapping.count
        B, W, level = len(first), mapping.number, 1
        words = first.new_empty(B, W, -(-W // 64))
    positions, slots = first.new_empty(2, B * W)
    given = (
        *(first, first if count is None else count, paths, positions, slots, words),
        *(W, S, level, paths.stride(0), paths.stride(1)),
    )
    options = {
        "DRAFTED": isinstance(mapping, Drafted),
        "ALL": count is None,
        "WORDS": words.shape[2],
        "LEVELS": next_power_of_2(level),
    }
    return Stand(positions, slots, words), given, options


def enter(
    tokens: Tensor,
    embedded: Tensor,
    states: Tensor,
    rows: Tensor | None,
    mapping: Observed | Drafted,
    token_norm: Norm,
    state_norm: Norm,
    *,
    behind: int,
    state_first: bool = False,
    zero_first: bool = False,
) -> tuple[Tensor, Tensor, Stand]:
    """Return both halves, normed and concatenated (R, 2 D), the states (R, D), and the result of `stand`. tokens (B, W)
    int64; embedded: a table (V, D), or each token's row (B, W, D); states (B, A, D); rows (B, W) int64: the index of
    each token's state, its own if None; behind: P; zero_first: read the token at position 0 as zeros."""
    (B, W), (A, D) = tokens.shape, states.shape[1:]
    x, stream = states.new_empty(B * W, 2 * D), states.new_empty(B * W, D)
    at, given, options = _rows(mapping, behind)
    parents = tokens if rows is None else rows
    _enter[(B * W, 2)](
        tokens, embedded, states.contiguous(), parents, token_norm.weight, state_norm.weight, x, stream,
        token_norm.eps, state_norm.eps, A, tokens.stride(0), tokens.stride(1), parents.stride(0), parents.stride(1),
        *given, **options, D=D, PAD=next_power_of_2(D), TABLE=embedded.dim() == 2, PARENTS=rows is not None,
        STATE_FIRST=state_first, ZERO_FIRST=zero_first, num_warps=8 if D > 2048 else 4,
    )  # fmt: skip
    return x, stream, at


STEPS = ("W", "S", "level", "path_b", "path_w")
"""Arguments that differ from level to level."""


@partial(jit, plain=STEPS)
def _stand(  # type: ignore[no-untyped-def]
    FIRST, COUNT, PATHS, POSITIONS, SLOTS, BITS, W, S, level, path_b, path_w,
    DRAFTED: constexpr, ALL: constexpr, WORDS: constexpr, LEVELS: constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    _place(r, FIRST, COUNT, PATHS, POSITIONS, SLOTS, BITS, W, S, level, path_b, path_w, DRAFTED, ALL, WORDS, LEVELS)


@jit
def _place(  # type: ignore[no-untyped-def]
    r, FIRST, COUNT, PATHS, POSITIONS, SLOTS, BITS, W, S, level, path_b, path_w,
    DRAFTED: constexpr, ALL: constexpr, WORDS: constexpr, LEVELS: constexpr,
):  # fmt: skip
    """Write the position, slot and mask of one token. Return its position."""
    b, w = r // W, r % W
    first = tl.load(FIRST + b)
    if DRAFTED:
        path, j = PATHS + b * path_b + w * path_w, tl.arange(0, LEVELS)
        position = first - 1 + level
        tl.store(POSITIONS + r, position)
        tl.store(SLOTS + r, b * S + first + tl.load(path + level - 1))
        for k in tl.static_range(WORDS):
            above = tl.load(path + j, mask=j < level, other=0)
            bits = tl.where(above // 64 == k, tl.full([LEVELS], 1, tl.int64) << (above % 64), 0)
            tl.store(BITS + r * WORDS + k, tl.sum(tl.where(j < level, bits, 0), 0))  # nodes are distinct
    else:
        position = tl.minimum(first + w, S - 2)
        tl.store(POSITIONS + r, position)
        true = w < (W if ALL else tl.load(COUNT + b))
        tl.store(SLOTS + r, b * S + tl.where(true, position, S - 1))
        for k in tl.static_range(WORDS):
            last = w - 64 * k  # the token's own bit in this word
            bits = (tl.full([], 2, tl.int64) << tl.minimum(tl.maximum(last, 0), 62)) - 1
            bits = tl.where(last >= 63, -1, tl.where(last >= 0, bits, 0))
            tl.store(BITS + r * WORDS + k, tl.where(true, bits, 0))
    return position


@partial(jit, plain=(*STEPS, "A", "token_b", "token_w", "row_b", "row_w"))
def _enter(  # type: ignore[no-untyped-def]
    TOKENS, EMBEDDED, STATES, ROWS, TOKEN_NORM, STATE_NORM, X, STREAM,
    token_eps, state_eps, A, token_b, token_w, row_b, row_w,
    FIRST, COUNT, PATHS, POSITIONS, SLOTS, BITS, W, S, level, path_b, path_w,
    DRAFTED: constexpr, ALL: constexpr, WORDS: constexpr, LEVELS: constexpr,
    D: constexpr, PAD: constexpr, TABLE: constexpr, PARENTS: constexpr, STATE_FIRST: constexpr, ZERO_FIRST: constexpr,
):  # fmt: skip
    """Compute half a row of x, the token's or the state's. The program of the token's half also calls `_place`."""
    r, half, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PAD)
    b, w, inside = r // W, r % W, i < D
    if half == 0:
        position = _place(
            r, FIRST, COUNT, PATHS, POSITIONS, SLOTS, BITS, W, S, level, path_b, path_w, DRAFTED, ALL, WORDS, LEVELS,
        )  # fmt: skip
        at = tl.load(TOKENS + b * token_b + w * token_w) if TABLE else r
        x = tl.load(EMBEDDED + at * D + i, mask=inside, other=0.0).to(X.dtype.element_ty).to(tl.float32)
        if ZERO_FIRST:
            x = tl.where(position == 0, 0.0, x)
        weight = tl.load(TOKEN_NORM + i, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + token_eps)
        goal = X + r * 2 * D + (D if STATE_FIRST else 0)
    else:
        at = b * A + (tl.load(ROWS + b * row_b + w * row_w) if PARENTS else w)
        state = tl.load(STATES + at * D + i, mask=inside, other=0.0)
        tl.store(STREAM + r * D + i, state, mask=inside)
        x = state.to(tl.float32)
        weight = tl.load(STATE_NORM + i, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + state_eps)
        goal = X + r * 2 * D + (0 if STATE_FIRST else D)
    tl.store(goal + i, (x * scale * weight).to(X.dtype.element_ty), mask=inside)


def take_newest(
    tokens: Tensor,
    start: Tensor,
    count: Tensor,
    root: Tensor,
    length: Tensor,
    *,
    previous: Tensor | None = None,
    recycled: Tensor | None = None,
    made: Tensor | None = None,
) -> None:
    """Same as `heads.backends.base.take_newest`, as one kernel."""
    (B, D), M = (len(root), 1) if recycled is None else recycled.shape, tokens.shape[1] - 1
    _take_newest[(B,)](
        tokens, start.contiguous(), count.contiguous(), root, length, root if previous is None else previous,
        root if recycled is None else recycled, root if made is None else made, M, tokens.stride(0), tokens.stride(1),
        D=D, PAD=next_power_of_2(D), PREVIOUS=previous is not None, RECYCLED=recycled is not None,
    )  # fmt: skip


@partial(jit, plain=("M", "token_b", "token_w"))
def _take_newest(  # type: ignore[no-untyped-def]
    TOKENS, START, COUNT, ROOT, LENGTH, PREVIOUS_TOKEN, STATES, MADE, M, token_b, token_w,
    D: constexpr, PAD: constexpr, PREVIOUS: constexpr, RECYCLED: constexpr,
):  # fmt: skip
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    count = tl.load(COUNT + b)
    if count > 0:
        newest = TOKENS + b * token_b + count * token_w
        if PREVIOUS:
            tl.store(PREVIOUS_TOKEN + b, tl.load(newest - token_w))
        if RECYCLED:
            made = tl.load(MADE + (b * M + count - 1) * D + i, mask=i < D)
            tl.store(STATES + b * D + i, made, mask=i < D)
        tl.store(ROOT + b, tl.load(newest))
        tl.store(LENGTH + b, tl.load(START + b) + count)
