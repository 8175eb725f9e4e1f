"""Commit of a round to the state of all rows in one kernel: `heads.backends.torch.commit` on a GPU.

A program handles one row with one warp. Each value is read before it is written, and a single warp keeps that order.

Letters: B rows, N nodes, M tokens that a round can emit, T tokens of a report.
"""

from torch import Tensor

from heads.backends.torch.commit import Commit, CommitResult
from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl


class TritonCommit(Commit):
    """`Commit` as one kernel."""

    def __call__(self, accepted: Tensor, emitted: Tensor, depths: Tensor | None) -> CommitResult:
        state, eos, result = self.state, self.eos, self.result
        B, M = emitted.shape
        T, N = len(self.shown), 0 if depths is None else depths.shape[1]
        _commit[(B,)](
            accepted, emitted.contiguous(), emitted if depths is None else depths, eos,
            state.length, state.root, state.done, state.limit, state.stops_at_eos, state.output, state.output_length,
            state.rounds, state.accepted, state.reached, state.report, result.tokens, result.start, result.count,
            N, 0 if depths is None else depths.stride(0), state.output.shape[1], state.accepted.shape[1],
            M=M, T=T, PAD_M=next_power_of_2(M), PAD_N=next_power_of_2(max(N, 1)), PAD_T=next_power_of_2(T),
            TREE=depths is not None, NUM_EOS=len(eos), num_warps=1,
        )  # fmt: skip
        return result


@jit
def _commit(  # type: ignore[no-untyped-def]
    ACCEPTED, EMITTED, DEPTHS, EOS,
    LENGTH, ROOT, DONE, LIMIT, STOPS_AT_EOS, OUTPUT, OUTPUT_LENGTH, ROUNDS, KEPT, REACHED, REPORT, TOKENS, START, COUNT,
    N, depths_b, output_width, record_width,
    M: constexpr, T: constexpr, PAD_M: constexpr, PAD_N: constexpr, PAD_T: constexpr, TREE: constexpr,
    NUM_EOS: constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i, t = tl.arange(0, PAD_M), tl.arange(0, PAD_T)
    accepted, length, root = tl.load(ACCEPTED + b), tl.load(LENGTH + b), tl.load(ROOT + b)
    done, rounds, before = tl.load(DONE + b) != 0, tl.load(ROUNDS + b), tl.load(OUTPUT_LENGTH + b)
    room, stops_at_eos = tl.load(LIMIT + b) - before, tl.load(STOPS_AT_EOS + b) != 0
    token = tl.load(EMITTED + b * M + i, mask=i < M, other=-1)
    newest = tl.load(EMITTED + b * M + accepted)

    is_eos = i < 0
    for e in range(0, NUM_EOS):
        is_eos = is_eos | (token == tl.load(EOS + e))
    upto_eos = tl.min(tl.where(is_eos & stops_at_eos & (i < M), i + 1, M + 1), 0).to(tl.int64)
    count = accepted + 1
    kept = tl.minimum(count, room)
    ended = (count >= room) | (upto_eos <= kept)
    kept = tl.where(done, 0, tl.minimum(kept, upto_eos))
    over = done | ended

    if M > 1:
        levels = tl.full([], M - 1, tl.int64)
        if TREE:
            j = tl.arange(0, PAD_N)
            levels = tl.max(tl.load(DEPTHS + b * depths_b + j, mask=j < N, other=0), 0)
        at = b * record_width + rounds
        tl.store(KEPT + at, tl.minimum(accepted, kept))
        tl.store(REACHED + at, tl.minimum(tl.minimum(count, kept), levels))

    # New tokens of the report come from EMITTED, since stores to OUTPUT may not be readable yet.
    now = before + kept
    place = tl.maximum(now - T + t, 0)
    old = tl.load(OUTPUT + b * output_width + place, mask=(t < T) & (place < before), other=0)
    new = tl.load(EMITTED + b * M + place - before, mask=(t < T) & (place >= before), other=0)
    report = REPORT + b * (3 + T)
    tl.store(report + 3 + t, tl.where(place < before, old, new), mask=t < T)
    tl.store(OUTPUT + b * output_width + before + i, token, mask=i < M)

    taken = tl.where(over, 0, count)
    tl.store(TOKENS + b * (M + 1), root)
    tl.store(TOKENS + b * (M + 1) + 1 + i, token, mask=i < M)
    tl.store(START + b, length)
    tl.store(COUNT + b, taken)
    tl.store(LENGTH + b, length + taken)
    tl.store(ROOT + b, newest)
    tl.store(DONE + b, over)
    tl.store(OUTPUT_LENGTH + b, now)
    tl.store(ROUNDS + b, rounds + tl.where(done, 0, 1))
    tl.store(report, tl.where(over, 1, 0).to(tl.int64))
    tl.store(report + 1, now)
    tl.store(report + 2, length + taken)
