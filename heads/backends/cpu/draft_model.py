"""A draft model on the CPU kernels: a chain of it is one call.

Letters: B batch, D hidden, C tokens that target and draft share, S slots of the cache.
"""

import ctypes

import torch
from torch import Tensor

from heads.backends.cpu.chain import Chain
from heads.backends.cpu.draws import CompiledPick
from heads.backends.cpu.library import ModelStruct, PassStruct, ProductStruct
from heads.backends.cpu.stack import CpuKVCache, CpuStack
from heads.backends.torch.decoder import NativeDecoder
from heads.base import Observation
from heads.tree import Proposal


class CpuDraftModel:
    """A native decoder as the kernels draft with it, and what it points into."""

    def __init__(
        self, decoder: NativeDecoder, stack: CpuStack, output: ProductStruct, cos_sin_table: tuple[Tensor, Tensor]
    ) -> None:
        self.decoder, self.stack, self.cos_sin_table = decoder, stack, cos_sin_table
        table, norm = decoder.embedding.contiguous(), decoder.norm
        self.vocab_size, self.held = output.O, table
        self.struct = ModelStruct(
            *(ctypes.addressof(stack.structs), table.data_ptr(), norm.weight.data_ptr()),
            *(output, stack.num_layers, norm.eps),
        )

    @classmethod
    def of(
        cls, decoder: NativeDecoder, common_size: int, cos_sin_table: tuple[Tensor, Tensor]
    ) -> "CpuDraftModel | None":
        """Over the first `common_size` (C) tokens; `cos_sin_table` of all positions there are. None where the kernels
        cannot: other layers than `CpuStack` knows, or an output head that is more than a product."""
        packed = None if decoder.output is None else decoder.output.packed
        if decoder.stack is None or packed is None:
            return None
        columns = ProductStruct(*(getattr(packed.struct, name) for name, *_ in ProductStruct._fields_))
        columns.O = common_size  # those behind stay unread
        return cls(decoder, decoder.stack, columns, cos_sin_table)

    def draft_chain(
        self, pick: CompiledPick, previous: Tensor, root: Tensor, length: Tensor, depth: int, cache: CpuKVCache
    ) -> Proposal:
        """What `heads.growth.grow` makes of steps: a chain behind each root (B,), which stands at `length` (B,) behind
        the token `previous` (B,), whose keys may not be in the cache."""
        library, B, D, S = self.stack.library, len(root), self.decoder.embedding.shape[1], cache.capacity
        chain, room = Chain(pick, root, length, depth, self.vocab_size), torch.empty(3, B, D)
        scratch = cache.room(self.stack.scratch_size(B, 2, D, S))
        step = PassStruct(
            *(None, None, self.cos_sin_table[0].data_ptr(), self.cos_sin_table[1].data_ptr(), None, None, None, None),
            *(scratch.data_ptr(), B, 0, 2, D, S, S, torch.get_num_threads()),
        )
        library.model_chain(
            *(ctypes.byref(self.struct), ctypes.byref(step), chain.reference, previous.data_ptr()),
            *(*cache.where, room.data_ptr()),
        )
        return chain.proposal()

    def advance(self, observation: Observation, previous: Tensor, root: Tensor, length: Tensor) -> None:
        """Go on behind what became known: renew what the next chain starts from, (B,) each."""
        held = [x.contiguous() for x in (observation.tokens, observation.start, observation.count)]
        where = (x.data_ptr() for x in (*held, previous, root, length))
        self.stack.library.advance(*where, len(root), held[0].shape[1] - 1)
