"""A chain that is drafted in one call of the CPU kernels: how its tokens are picked, and where they go.

Letters: B batch, K depth, N = K + 1 nodes, Vd draft vocabulary.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from heads.backends.cpu.draws import CompiledPick
from heads.backends.cpu.library import ChainStruct, loaded
from heads.tree import Proposal


class Chain:
    """Arguments of `draft_chain` or `model_chain` for one round, the same for every head."""

    def __init__(
        self, pick: CompiledPick, root: Tensor, length: Tensor, depth: int, vocab_size: int, kept: Tensor | None = None
    ) -> None:
        """Behind each root (B,), which stands at `length` (B,); kept (Vd,) the target's ids of the draft's Vd, None
        where they are the same."""
        B, self.depth = len(root), depth
        self.tokens, self.scores = root.new_empty(B, depth + 1), torch.empty(B, depth + 1)
        room, ids = torch.empty(B * (vocab_size + 1)), root.new_empty(4, B)
        self.held = pick, root, length, kept, room, ids
        self.struct = ChainStruct(
            *(pick.struct, None if kept is None else kept.data_ptr()),
            *(root.data_ptr(), length.data_ptr(), room.data_ptr(), room[B * vocab_size :].data_ptr()),
            *(ids[0].data_ptr(), ids[1].data_ptr(), ids[2].data_ptr()),
            *(self.tokens.data_ptr(), self.scores.data_ptr(), depth, vocab_size),
        )
        self.reference = ctypes.byref(self.struct)

    def proposal(self) -> Proposal:
        """Return the chain as `heads.growth.grow` does, once it is drafted."""
        return Proposal(self.tokens, *chain_nodes(len(self.tokens), self.depth), self.scores)


@cache
def chain_nodes(batch_size: int, depth: int) -> tuple[Tensor, Tensor]:
    """The parents and the depths (B, N) of a chain's nodes."""
    with torch.inference_mode(False):
        node = torch.arange(depth + 1).repeat(batch_size, 1)
        return (node - 1).clamp_min(0), node


def take_newest(
    tokens: Tensor, start: Tensor, count: Tensor, root: Tensor, length: Tensor, *, previous: Tensor
) -> None:
    """As `heads.backends.triton.inputs.take_newest`, of a draft model."""
    known = [x.contiguous() for x in (tokens, start, count)]
    where = (x.data_ptr() for x in (*known, previous, root, length))
    loaded().advance(*where, len(root), tokens.shape[1] - 1)
