"""What a step of a head that recycles its state begins and ends with, one kernel each.

    enter        the tokens' embeddings and the states that they stand beside, each normed, side by side; the states
                 themselves, which the stream begins with; where the tokens stand, and the bits of what they see
    take_newest  what was made of the last true token of each row becomes what is drafted from

Letters: B batch, W tokens of each, R = B * W rows, D hidden, V vocabulary, S cache slots a row, P nodes that have slots
behind the observed ones, A states of each row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.kernels.backend import constexpr, jit, next_power_of_2, runs_kernels, tl
from heads.native.linear import Norm
from heads.places import Drafted, Observed


@dataclass(frozen=True)
class Entry:
    """What `enter` gives."""

    x: Tensor  # (R, 2 D)
    stream: Tensor  # (R, D)
    positions: Tensor  # (R,) int64
    slots: Tensor  # (R,) int64, in flat storage
    words: Tensor  # (B, W, P / 64, rounded up) int64, as `heads.kernels.attention.ancestor_words`; none if observed


def enter(
    tokens: Tensor,
    embedded: Tensor,
    states: Tensor,
    rows: Tensor | None,
    places: Observed | Drafted,
    token_norm: Norm,
    state_norm: Norm,
    *,
    behind: int,
    state_first: bool = False,
) -> Entry:
    """tokens (B, W) int64; embedded: a table (V, D), or each token's own row (B, W, D); states (B, A, D); rows (B, W)
    int64: which of its row's states each token stands beside, its own if None; behind: P."""
    if not runs_kernels(states):
        return enter_twin(
            tokens, embedded, states, rows, places, token_norm, state_norm, behind=behind, state_first=state_first
        )
    (B, W), (A, D), S = tokens.shape, states.shape[1:], len(places.slot)
    R, drafted = B * W, isinstance(places, Drafted)
    x, stream = states.new_empty(R, 2 * D), states.new_empty(R, D)
    positions, slots = tokens.new_empty(2, R)
    words = tokens.new_empty(B, W, -(-behind // 64) if drafted else 0)
    paths = places.paths if isinstance(places, Drafted) else tokens
    first, count = (places.length, places.length) if isinstance(places, Drafted) else (places.start, places.count)
    parents = tokens if rows is None else rows
    _enter[(R, 2)](
        tokens, embedded, states.contiguous(), parents, first, count, paths, token_norm.weight, state_norm.weight,
        x, stream, positions, slots, words, token_norm.eps, state_norm.eps, W, A, S, paths.shape[-1],
        tokens.stride(0), tokens.stride(1), parents.stride(0), parents.stride(1), paths.stride(0), paths.stride(1),
        D=D, PAD=next_power_of_2(D), TABLE=embedded.dim() == 2, PARENTS=rows is not None, DRAFTED=drafted,
        WORDS=words.shape[2], STATE_FIRST=state_first, LEVELS=next_power_of_2(paths.shape[-1]) if drafted else 1,
        num_warps=8 if D > 2048 else 4,
    )  # fmt: skip
    return Entry(x, stream, positions, slots, words)


def enter_twin(
    tokens: Tensor,
    embedded: Tensor,
    states: Tensor,
    rows: Tensor | None,
    places: Observed | Drafted,
    token_norm: Norm,
    state_norm: Norm,
    *,
    behind: int,
    state_first: bool = False,
) -> Entry:
    """The same in torch operations."""
    (B, W), D, S = tokens.shape, states.shape[2], len(places.slot)
    table = embedded[tokens] if embedded.dim() == 2 else embedded
    above = states if rows is None else states.gather(1, rows[..., None].expand(-1, -1, D))
    halves = [token_norm(table.to(states.dtype).flatten(0, 1)), state_norm(above.flatten(0, 1))]
    words = tokens.new_zeros(B, W, 0)
    if isinstance(places, Drafted):
        word, paths = torch.arange(-(-behind // 64), device=tokens.device), places.paths[..., None]
        bits = torch.where(paths // 64 == word, 1 << (paths % 64), 0)  # (B, W, level, words)
        words = bits.sum(2)
    slots = places.slots(S - 1) + torch.arange(B, device=tokens.device)[:, None] * S
    return Entry(
        torch.cat(halves[::-1] if state_first else halves, dim=1),
        above.flatten(0, 1).clone(),
        places.positions.flatten(),
        slots.flatten(),
        words,
    )


@jit
def _enter(  # type: ignore[no-untyped-def]
    TOKENS, EMBEDDED, STATES, ROWS, FIRST, COUNT, PATHS, TOKEN_NORM, STATE_NORM, X, STREAM, POSITIONS, SLOTS, BITS,
    token_eps, state_eps, W, A, S, level, token_b, token_w, row_b, row_w, path_b, path_w,
    D: constexpr, PAD: constexpr, TABLE: constexpr, PARENTS: constexpr, DRAFTED: constexpr, WORDS: constexpr,
    STATE_FIRST: constexpr, LEVELS: constexpr,
):  # fmt: skip
    """Half a row of x, the token's or the state's; who does the token's says where it stands, too."""
    r, half, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PAD)
    b, w, inside = r // W, r % W, i < D
    if half == 0:
        at = tl.load(TOKENS + b * token_b + w * token_w) if TABLE else r
        x = tl.load(EMBEDDED + at * D + i, mask=inside, other=0.0).to(X.dtype.element_ty).to(tl.float32)
        weight = tl.load(TOKEN_NORM + i, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + token_eps)
        goal = X + r * 2 * D + (D if STATE_FIRST else 0)
        first = tl.load(FIRST + b)
        if DRAFTED:
            path = PATHS + b * path_b + w * path_w
            tl.store(POSITIONS + r, first - 1 + level)
            tl.store(SLOTS + r, b * S + first + tl.load(path + level - 1))
            j = tl.arange(0, LEVELS)
            for k in tl.static_range(WORDS):
                above = tl.load(path + j, mask=j < level, other=-1)
                bits = tl.where(above // 64 == k, tl.full([LEVELS], 1, tl.int64) << (above % 64), 0)
                tl.store(BITS + r * WORDS + k, tl.sum(tl.where(j < level, bits, 0), 0))  # no node twice
        else:
            position = tl.minimum(first + w, S - 2)
            tl.store(POSITIONS + r, position)
            tl.store(SLOTS + r, b * S + tl.where(w < tl.load(COUNT + b), position, S - 1))
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
    made: Tensor, tokens: Tensor, start: Tensor, count: Tensor, recycled: Tensor, root: Tensor, length: Tensor
) -> None:
    """made (B, M, D) of the tokens (B, M + 1) but the first; of them `count` (B,) are true, from position `start` (B,)
    on. Renews, in rows that have any, recycled (B, D), root (B,) and length (B,)."""
    if not runs_kernels(made):
        take_newest_twin(made, tokens, start, count, recycled, root, length)
        return
    B, M, D = made.shape
    _take_newest[(B,)](
        made, tokens, start, count, recycled, root, length, M, tokens.stride(0), tokens.stride(1),
        D=D, PAD=next_power_of_2(D),
    )  # fmt: skip


def take_newest_twin(
    made: Tensor, tokens: Tensor, start: Tensor, count: Tensor, recycled: Tensor, root: Tensor, length: Tensor
) -> None:
    """The same in torch operations."""
    live, last = count > 0, (count - 1).clamp_min(0)
    final = made.gather(1, last[:, None, None].expand(-1, 1, made.shape[2]))[:, 0]
    recycled.copy_(torch.where(live[:, None], final, recycled))
    root.copy_(torch.where(live, tokens.gather(1, count[:, None])[:, 0], root))
    length.copy_(torch.where(live, start + count, length))


@jit
def _take_newest(  # type: ignore[no-untyped-def]
    MADE, TOKENS, START, COUNT, RECYCLED, ROOT, LENGTH, M, token_b, token_w, D: constexpr, PAD: constexpr,
):  # fmt: skip
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    count = tl.load(COUNT + b)
    if count > 0:
        made = tl.load(MADE + (b * M + count - 1) * D + i, mask=i < D)
        tl.store(RECYCLED + b * D + i, made, mask=i < D)
        tl.store(ROOT + b, tl.load(TOKENS + b * token_b + count * token_w))
        tl.store(LENGTH + b, tl.load(START + b) + count)
