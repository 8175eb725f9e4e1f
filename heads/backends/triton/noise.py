"""The noise of `heads.backends.torch.noise.gumbel` inside kernels: the same bits and formula, so the same numbers."""

from heads.backends.triton.availability import jit, tl


@jit
def key_of(seed, position):  # type: ignore[no-untyped-def]
    """Return the key of the noise of all tokens at one position."""
    return _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * _golden())


@jit
def noise_of(key, token):  # type: ignore[no-untyped-def]
    """Return the Gumbel noise of a token id, float32. log(1 - w) loses precision for small w, and the factor
    w / (1 - (1 - w)) restores it (Kahan's log1p)."""
    bits = _mix(key + token.to(tl.uint64) * _golden())
    w = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    u = 1.0 - w
    log1p = tl.where(u == 1.0, -w, tl.log(u) * (w / (1.0 - u)))
    return (-tl.log(-log1p)).to(tl.float32)


@jit
def _golden():  # type: ignore[no-untyped-def]
    """splitmix64's stride, 2^64 over the golden ratio."""
    return tl.full([], 0x9E3779B97F4A7C15, tl.uint64)


@jit
def _mix(x):  # type: ignore[no-untyped-def]
    """splitmix64's finaliser on unsigned integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
