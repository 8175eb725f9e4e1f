"""Move of accepted nodes' cache entries to their final slots, in all layers at once.

Letters: L layers, B rows, S slots per row, X width of a slot, K depth.
"""

from torch import Tensor

from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl


def compact(cache: Tensor, length: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Move the accepted nodes' entries to their final slots, in place.

    cache (L, B, S, X); the entry of node path[b, i] moves from slot length[b] + path[b, i] to length[b] + i, for i up
    to accepted[b]. Each program reads its part of all entries before it writes any.
    """
    L, B, _, X = cache.shape
    K = path.shape[1] - 1
    if K == 0:
        return
    most = next_power_of_2(K)
    block = max(16, min(next_power_of_2(X), 8192 // most))  # as many values as a program's registers easily hold
    _compact[(L, B, -(-X // block))](
        cache, length, path.contiguous(), accepted, X, cache.stride(0), cache.stride(1), cache.stride(2),
        K=K, MOST=most, BLOCK=block,
    )  # fmt: skip


@jit
def _compact(  # type: ignore[no-untyped-def]
    CACHE, LENGTH, PATH, ACCEPTED, X, by_layer, by_row, by_slot, K: constexpr, MOST: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Move BLOCK values of every slot that one row of a layer keeps: read all, then write all."""
    layer, b, x = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    i = 1 + tl.arange(0, MOST)  # the root stays where it is
    length, accepted = tl.load(LENGTH + b), tl.load(ACCEPTED + b)
    node = tl.load(PATH + b * (K + 1) + i, mask=i <= K, other=0)
    moves = ((i <= accepted) & (node != i))[:, None] & (x < X)[None]
    row = CACHE + layer.to(tl.int64) * by_layer + b * by_row + x[None]
    values = tl.load(row + ((length + node) * by_slot)[:, None], mask=moves)
    tl.debug_barrier()  # no thread may write a value that another thread has not read yet
    tl.store(row + ((length + i) * by_slot)[:, None], values, mask=moves)
