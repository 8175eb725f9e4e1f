"""Noise and choices in C on a CPU, and arguments of chains that are drafted in one call, including the picks.

C does the work of `heads.backends.torch.sampling` in one pass over each row. With torch's float64 operations, noise for
thousands of ids takes a large share of a small target's round. Both give the same bits, except for about one noise
value in some hundred millions.

Letters: B rows, W positions per row, V columns of the logits, K depth, N = K + 1 nodes.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from heads.backends.cpu.library import STRUCTS, loaded
from heads.backends.torch.sampling import SHARPNESS, RowSampling
from heads.tree import Proposal

SERIAL_VALUES = 1 << 16
"""Choices among fewer logits use one thread, since waking another would cost more."""


class CpuSampling(RowSampling):
    """`RowSampling` in C, except for batches with filters."""

    def __init__(self, batch_size: int, device: torch.device | str = "cpu") -> None:
        super().__init__(batch_size, device)
        self.library = loaded()
        self.pick = CompiledPick(self.library, self.temperature, self.seed)

    def gumbel(self, seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        (B, W), V = positions.shape, len(token_ids)
        held = seeds.contiguous(), positions.contiguous(), token_ids.contiguous()
        noise = torch.empty(B, W, V)
        self.library.gumbel(*(x.data_ptr() for x in (*held, noise)), B, W, V)
        return noise

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        if self.filtered or logits.dtype != torch.float32:
            return super().choose(logits, positions)
        B, W, V = logits.shape
        threads = torch.get_num_threads() if B * W * V >= SERIAL_VALUES else 1
        logits, positions = logits.contiguous(), positions.contiguous()
        chosen = torch.empty_like(positions)
        tensors = logits, self.temperature, self.seed, positions, chosen
        self.library.choose(*(x.data_ptr() for x in tensors), B, W, V, threads)
        return chosen


class CompiledPick:
    """`RowSampling.pick` for a batch's temperatures and seeds, (B,) each, which are read in place. C code that drafts a
    whole chain picks with `struct`."""

    def __init__(self, library: ctypes.CDLL, temperature: Tensor, seeds: Tensor) -> None:
        self.library, self.held = library, (temperature, seeds)
        self.struct = STRUCTS["Sampling"](temperature.data_ptr(), seeds.data_ptr(), SHARPNESS)
        self.reference = ctypes.byref(self.struct)

    def __call__(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        nodes = logits.shape[1]
        if nodes > 1 and logits.stride(1) == positions.stride(1) == 0:  # independent heads: one distribution for all
            logits, positions = logits[:, :1], positions[:, :1]
        B, W, V = logits.shape
        logits, positions = logits.float().contiguous(), positions.contiguous()
        picked, logp = positions.new_empty(B, W, count), logits.new_empty(B, W, count)
        ids = None if token_ids is None else token_ids.data_ptr()
        where = logits.data_ptr(), positions.data_ptr(), ids, picked.data_ptr(), logp.data_ptr()
        self.library.pick(self.reference, *where, B, W, V, count)
        return (picked, logp) if nodes == W else (picked.expand(-1, nodes, -1), logp.expand(-1, nodes, -1))


class Chain:
    """Arguments of `draft_chain` or `model_chain` for one round, the same for every head."""

    def __init__(
        self, pick: CompiledPick, root: Tensor, length: Tensor, depth: int, vocab_size: int, kept: Tensor | None = None
    ) -> None:
        """Draft a chain after each root (B,) at position `length` (B,). kept (Vd,) maps draft ids to target ids; None
        if they are the same."""
        B, self.depth = len(root), depth
        self.tokens, self.scores = root.new_empty(B, depth + 1), torch.empty(B, depth + 1)
        room, ids = torch.empty(B * (vocab_size + 1)), root.new_empty(4, B)
        self.held = pick, root, length, kept, room, ids
        self.struct = STRUCTS["Chain"](
            *(pick.struct, None if kept is None else kept.data_ptr()),
            *(root.data_ptr(), length.data_ptr(), room.data_ptr(), room[B * vocab_size :].data_ptr()),
            *(ids[0].data_ptr(), ids[1].data_ptr(), ids[2].data_ptr()),
            *(self.tokens.data_ptr(), self.scores.data_ptr(), depth, vocab_size),
        )
        self.reference = ctypes.byref(self.struct)

    def proposal(self) -> Proposal:
        """Return the drafted chain, as `heads.growth.grow` does."""
        return Proposal(self.tokens, *chain_nodes(len(self.tokens), self.depth), self.scores)


@cache
def chain_nodes(batch_size: int, depth: int) -> tuple[Tensor, Tensor]:
    """Return the parents and depths (B, N) of a chain's nodes."""
    with torch.inference_mode(False):
        node = torch.arange(depth + 1).repeat(batch_size, 1)
        return (node - 1).clamp_min(0), node


def take_newest(
    tokens: Tensor, start: Tensor, count: Tensor, root: Tensor, length: Tensor, *, previous: Tensor
) -> None:
    """Same as `heads.backends.base.take_newest`, for a draft model."""
    known = [x.contiguous() for x in (tokens, start, count)]
    where = (x.data_ptr() for x in (*known, previous, root, length))
    loaded().advance(*where, len(root), tokens.shape[1] - 1)
