"""A native decoder in float32 on a CPU. C runs all layers in one call if it supports them, else products and norms.

Letters: B batch, D hidden, S cache slots.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from heads.backends.cpu.draws import Chain, CompiledPick
from heads.backends.cpu.kernels import CompiledProduct, in_c
from heads.backends.cpu.library import STRUCTS
from heads.backends.cpu.stack import CpuStack
from heads.backends.slot_mapping import CacheSpec, SlotMapping
from heads.backends.torch.architectures import native_decoder
from heads.backends.torch.cached_decoder import TorchDecoder
from heads.backends.torch.decoder import Layer, NativeDecoder
from heads.layers import FULL, SLIDING
from heads.target.frozen import LanguageModel
from heads.tree import Pick, Proposal

_made: "WeakKeyDictionary[NativeDecoder, NativeDecoder]" = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class CompiledDecoder(NativeDecoder):
    """`NativeDecoder` whose layers run in one call of C."""

    stack: CpuStack

    def new_cache(self, *, batch_size: int, capacity: int) -> Any:
        return self.stack.new_cache(batch_size=batch_size, capacity=capacity)


def compiled_decoder(model: LanguageModel, *, draft: bool = False) -> NativeDecoder | None:
    """Return the model's native decoder in C, built once; a `CompiledDecoder` if C supports whole layers. Return None
    if the model has no native decoder."""
    native = native_decoder(model, draft=draft)
    if native is None or native in _made:
        return None if native is None else _made[native]
    blocks: list[Any] = [tuple(in_c(part, draft=draft) for part in vars(layer).values()) for layer in native.layers]
    made = replace(
        native,
        layers=[Layer(*block) for block in blocks],
        norm=in_c(native.norm),
        output=in_c(native.output, draft=draft),
    )
    stack = CpuStack.of(blocks, getattr(native.config, "sliding_window", None))
    made = _made[native] = made if stack is None else CompiledDecoder(**vars(made), stack=stack)
    return made


class CpuDecoder(TorchDecoder):
    """A compiled decoder with the cache of one batch. A draft model drafts a chain in one call."""

    make_native: ClassVar[Callable[..., Any]] = staticmethod(compiled_decoder)

    def __init__(self, model: LanguageModel, spec: CacheSpec, native: NativeDecoder) -> None:
        super().__init__(model, spec, native)
        self.stack = native.stack if isinstance(native, CompiledDecoder) else None
        self.struct: Any = None
        if spec.draft and self.stack is not None and isinstance(native.output, CompiledProduct):
            output = STRUCTS["Product"].from_buffer_copy(native.output.struct)
            output.O = spec.vocab_size or output.O  # later columns are not read
            self.table = native.embedding.contiguous()
            self.struct = STRUCTS["Model"](
                *(ctypes.addressof(self.stack.structs), self.table.data_ptr(), native.norm.weight.data_ptr()),
                *(output, self.stack.num_layers, native.norm.eps),
            )

    def masks(self, mapping: SlotMapping, visible: Tensor | None, extent: int) -> dict[str, Tensor]:
        return {} if visible is None and self.stack is not None else super().masks(mapping, visible, extent)

    def run(self, x: Tensor, positions: Tensor, masks: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.stack is None:
            return super().run(x, positions, masks)
        near = masks.get(SLIDING)
        aux = self.stack.run(
            x,
            self.cache,
            positions=positions,
            cos_sin_table=self.cos_sin_table,
            mask=masks.get(FULL, near),
            near_mask=near,
            aux_layer_ids=self.spec.aux_layer_ids,
        )
        return x, aux

    def draft_chain(self, pick: Pick, previous: Tensor, root: Tensor, length: Tensor, depth: int) -> Proposal | None:
        if self.struct is None or self.stack is None or not isinstance(pick, CompiledPick):
            return None
        B, D, S = len(root), self.table.shape[1], self.spec.capacity
        chain, room = Chain(pick, root, length, depth, self.struct.output.O), torch.empty(3, B, D)
        scratch = self.cache.room(self.stack.scratch_size(B, 2, D, S))
        step = STRUCTS["Pass"](
            *(None, None, self.cos_sin_table[0].data_ptr(), self.cos_sin_table[1].data_ptr(), None, None, None, None),
            *(scratch.data_ptr(), B, 0, 2, D, S, S, torch.get_num_threads()),
        )
        self.stack.library.model_chain(
            *(ctypes.byref(self.struct), ctypes.byref(step), chain.reference, previous.data_ptr()),
            *(*self.cache.where, room.data_ptr()),
        )
        return chain.proposal()
