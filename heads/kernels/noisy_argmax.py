"""The choice of a token among logits with noise:

    choice = argmax_v((z_v - max z) / T + G(seed, position, id_v))        lowest column on ties; argmax z at T = 0

G is the noise of `heads.kernels.gumbel`. Few tokens can win, so on a CPU C (`noisy_argmax.c`) computes most of them up
to a bound only; without a compiler, and on other devices, torch computes all.

Letters: B rows of the batch, W positions per row, X columns.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from heads.core.errors import warn_once
from heads.kernels.compiled import compiled
from heads.kernels.gumbel import gumbel, keys

SERIAL_COLUMNS = 1 << 16
"""Fewer columns of all rows take one thread."""


def noisy_argmax(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """Return the chosen columns (B, W) int64 of logits (B, W, X).

    temperature and seeds (B,); positions (B, W) of the tokens to choose; token_ids (X,) int64 of the columns, None if
    they are 0 .. X - 1."""
    library = load() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    if library is None:
        return by_torch(logits, temperature, seeds, positions, token_ids)
    return by_c(library, logits, temperature, seeds, positions, token_ids)


def by_torch(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """`noisy_argmax` on any device."""
    if token_ids is None:
        token_ids = torch.arange(logits.shape[-1], device=logits.device)
    scores, top = scaled(logits, temperature)
    chosen = gumbel(seeds, positions, token_ids).add_(scores).argmax(-1)
    return torch.where((temperature > 0)[:, None], chosen, top[..., 0])


def scaled(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores (z - max z) / T (B, W, X) in float32, with T = 1 for rows at temperature 0, and the columns of
    the maxima (B, W, 1)."""
    top = logits.argmax(-1, keepdim=True)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    # Subtract the maximum first: logits divided by a very low temperature would overflow to inf - inf.
    return (logits - logits.gather(-1, top)).float() / divisor, top


def by_c(
    library: ctypes.CDLL,
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor | None = None,
) -> Tensor:
    B, W, X = logits.shape
    logits, rows = logits.contiguous(), temperature[:, None].expand(B, W).contiguous()
    ids = None if token_ids is None else token_ids.contiguous()
    top = logits.argmax(-1)
    inputs = (logits, top, rows, keys(seeds, positions), ids)
    out = torch.empty_like(top)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (*inputs, out)]
    threads = min(torch.get_num_threads(), B * W) if logits.numel() >= SERIAL_COLUMNS else 1
    library.noisy_argmax(*pointers, B * W, X, threads)
    return out


@cache
def load() -> ctypes.CDLL | None:
    """Return the compiled C, or None if there is none or it chooses other tokens than torch."""
    library = compiled()
    if library is None:
        return None
    library.noisy_argmax.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 3
    library.noisy_argmax.restype = None
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(16, 4, 1000, generator=draw)
    rest = torch.linspace(0, 1.5, 16), torch.arange(16), torch.arange(64).view(16, 4)
    if not torch.equal(by_c(library, logits, *rest), by_torch(logits, *rest)):
        warn_once("noisy_argmax.c, as compiled here, chooses wrong tokens: torch chooses, which is slower")
        return None
    return library
