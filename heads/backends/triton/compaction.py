"""Accepted nodes' entries in a cache go to the slots that they keep, in all layers at once.

Letters: L layers, B rows, S slots a row, X width of a slot, K depth.
"""

from torch import Tensor

from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl


def compact(cache: Tensor, length: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Move the accepted nodes' entries to the slots they keep, in place.

    cache (L, B, S, X); what node path[b, i] wrote to slot length[b] + path[b, i] goes to length[b] + i, for i up to
    accepted[b]. Paths ascend, so copying in order never overwrites what is still to be read.
    """
    L, B, _, X = cache.shape
    K = path.shape[1] - 1
    if K == 0:
        return
    most = next_power_of_2(K)
    block = max(16, min(next_power_of_2(X), 8192 // most))  # as many numbers as a program's registers hold at ease
    _compact[(L, B, -(-X // block))](
        cache, length, path.contiguous(), accepted, X, cache.stride(0), cache.stride(1), cache.stride(2),
        K=K, MOST=most, BLOCK=block,
    )  # fmt: skip


@jit
def _compact(  # type: ignore[no-untyped-def]
    CACHE, LENGTH, PATH, ACCEPTED, X, by_layer, by_row, by_slot, K: constexpr, MOST: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """BLOCK numbers of every slot that one row of a layer keeps: all read at once, and then all written."""
    layer, b, x = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    i = 1 + tl.arange(0, MOST)  # the root stays where it is
    length, accepted = tl.load(LENGTH + b), tl.load(ACCEPTED + b)
    node = tl.load(PATH + b * (K + 1) + i, mask=i <= K, other=0)
    moves = ((i <= accepted) & (node != i))[:, None] & (x < X)[None]
    row = CACHE + layer.to(tl.int64) * by_layer + b * by_row + x[None]
    values = tl.load(row + ((length + node) * by_slot)[:, None], mask=moves)
    tl.debug_barrier()  # no thread may write what another has yet to read
    tl.store(row + ((length + i) * by_slot)[:, None], values, mask=moves)
