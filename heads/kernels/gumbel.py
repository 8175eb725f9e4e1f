"""Noise that depends only on (seed, position, token id): the same numbers on every device and in every batch.

Letters: B rows of the batch, W positions per row, X ids.
"""

from torch import Tensor

GAMMA = -7046029254386353131  # 2^64 / golden ratio, as a signed integer: splitmix64's stride
MIX_1, MIX_2 = -4658895280553007687, -7723592293110705685  # splitmix64's two multipliers
LOW_34, LOW_37, LOW_33, LOW_52 = (1 << 34) - 1, (1 << 37) - 1, (1 << 33) - 1, (1 << 52) - 1


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise as a pure function: seeds (B,), positions (B, W), token_ids (Vx,) -> (B, W, Vx) float32.

    G = -log(-log(1 - w)) for a uniform w, so large noise comes from small w, where w has the finest resolution: values
    up to 36 follow the true distribution. Computing in float64 makes last-bit differences between libraries vanish in
    the cast (except for about one value in some hundred millions).
    """
    return uniform(seeds, positions, token_ids).neg_().log1p_().neg_().log_().neg_().float()


def uniform(seeds: Tensor, counters: Tensor, ids: Tensor) -> Tensor:
    """Uniform noise as a pure function: seeds (B,), counters (B, W), ids (X,) -> (B, W, X) float64.

    splitmix64 over the three integers gives 52 bits k. (k + 1/2) / 2^52 is exact and strictly inside (0, 1).
    """
    bits = _mix_(keys(seeds, counters)[..., None] + ids * GAMMA)
    return bits.bitwise_right_shift_(12).bitwise_and_(LOW_52).double().add_(0.5).mul_(2.0**-52)


def keys(seeds: Tensor, counters: Tensor) -> Tensor:
    """Return the keys (B, W) of the noise of all ids: seeds (B,), counters (B, W)."""
    return _mix(_mix(seeds)[:, None] + counters * GAMMA)


def stream(seeds: Tensor, purpose: int) -> Tensor:
    """Return seeds (B,) of another noise, independent of the noise of `seeds` itself. `purpose` is any 64-bit
    number."""
    return _mix_(seeds ^ purpose)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors; a bijection. Shifts are arithmetic, so the copied sign bits are masked
    off."""
    return _mix_(x.clone())


def _mix_(x: Tensor) -> Tensor:
    x.bitwise_xor_((x >> 30).bitwise_and_(LOW_34)).mul_(MIX_1)
    x.bitwise_xor_((x >> 27).bitwise_and_(LOW_37)).mul_(MIX_2)
    return x.bitwise_xor_((x >> 31).bitwise_and_(LOW_33))
