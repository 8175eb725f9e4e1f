"""A native decoder on a CPU in float32, in C as far as C knows it: all layers one call, or products and norms each.

Letters: R rows, K and O the inputs and outputs of a product, D hidden, N tokens of a step.
"""

import copy
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from heads.backends.cpu.draws import Chain, CompiledPick
from heads.backends.cpu.kernels import MOST_ROWS, PackedWeight, pack
from heads.backends.cpu.library import ModelStruct, PassStruct, ProductStruct, loaded
from heads.backends.cpu.stack import CpuStack
from heads.backends.slot_mapping import CacheSpec
from heads.backends.torch.architectures import native_decoder
from heads.backends.torch.attention import GroupedAttention, LatentAttention
from heads.backends.torch.cached_decoder import TorchDecoder
from heads.backends.torch.decoder import Layer, NativeDecoder
from heads.backends.torch.feedforward import Experts, GatedMLP
from heads.backends.torch.linear import Norm, Product
from heads.target.frozen import LanguageModel
from heads.tree import Pick, Proposal

_made: "WeakKeyDictionary[NativeDecoder, CompiledDecoder]" = WeakKeyDictionary()


class CompiledProduct(Product):
    """Few rows by C."""

    def __init__(self, product: Product, packed: PackedWeight) -> None:
        super().__init__(product.weight, product.bias)
        self.packed = packed

    @property
    def weight_bytes(self) -> int:
        return self.packed.weight.element_size()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.packed(x, residual) if len(x) <= MOST_ROWS else super().__call__(x, residual)


class CompiledNorm(Norm):
    """Rows by C."""

    def __init__(self, norm: Norm) -> None:
        self.weight, self.eps, self.library = norm.weight, norm.eps, loaded()

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1:
            return super().__call__(x)
        y = torch.empty_like(x)
        self.library.normalise_rows(
            x.data_ptr(), x.stride(0), self.weight.data_ptr(), self.eps, y.data_ptr(), y.stride(0), *x.shape
        )
        return y


def in_c(part: Any, *, draft: bool = False) -> Any:
    """A part of a native decoder with its products and norms in C, those in float32; a `draft`'s weights are held in
    bfloat16, half the bytes: the target judges what they give."""
    if isinstance(part, Product):
        packed = pack(part.weight, part.bias, half=draft)
        return part if packed is None else CompiledProduct(part, packed)
    if isinstance(part, Norm) and part.weight.dtype == torch.float32:
        return CompiledNorm(part)
    if isinstance(part, GroupedAttention | LatentAttention | GatedMLP | Experts):
        made = copy.copy(part)
        draft = draft and isinstance(part, GroupedAttention | GatedMLP)
        vars(made).update({name: in_c(own, draft=draft) for name, own in vars(part).items()})
        return made
    return part


def draft_product(module: nn.Linear) -> Product:
    """A draft's product, in C where it is in float32."""
    made: Product = in_c(Product.of(module, draft=True), draft=True)
    return made


@dataclass(frozen=True, eq=False)
class CompiledDecoder(NativeDecoder):
    """`NativeDecoder` in C."""

    stack: CpuStack | None
    """All layers, where C knows them."""

    def new_cache(self, *, batch_size: int, capacity: int) -> Any:
        if self.stack is None:
            return super().new_cache(batch_size=batch_size, capacity=capacity)
        return self.stack.new_cache(batch_size=batch_size, capacity=capacity)

    def masks(
        self, positions: Tensor, visible: Tensor | None, key_positions: Tensor | None, extent: int
    ) -> dict[str, Tensor]:
        if visible is None and self.stack is not None:
            return {}
        return super().masks(positions, visible, key_positions, extent)

    def run(
        self,
        x: Tensor,
        cache: Any,
        positions: Tensor,
        masks: dict[str, Tensor],
        cos_sin_table: tuple[Tensor, Tensor],
        aux_layer_ids: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        if self.stack is None:
            return super().run(x, cache, positions, masks, cos_sin_table, aux_layer_ids)
        near = masks.get("sliding_attention")
        aux = self.stack.run(
            x,
            cache,
            positions=positions,
            cos_sin_table=cos_sin_table,
            mask=masks.get("full_attention", near),
            near_mask=near,
            aux_layer_ids=aux_layer_ids,
        )
        return x, aux


def compiled_decoder(model: LanguageModel, *, draft: bool = False) -> CompiledDecoder | None:
    """The model's native decoder in C, made once; None where there is none."""
    native = native_decoder(model, draft=draft)
    if native is None or native in _made:
        return None if native is None else _made[native]
    blocks: list[Any] = [tuple(in_c(part, draft=draft) for part in vars(layer).values()) for layer in native.layers]
    made = _made[native] = CompiledDecoder(
        config=native.config,
        embedding=native.embedding,
        layers=[Layer(*block) for block in blocks],
        norm=in_c(native.norm),
        rotary=native.rotary,
        output=in_c(native.output, draft=draft),
        stack=CpuStack.of(blocks, getattr(native.config, "sliding_window", None)),
    )
    return made


class CpuDecoder(TorchDecoder):
    """A compiled decoder with the cache of one batch; a chain of a draft model is one call."""

    native: CompiledDecoder
    make_native: ClassVar[Callable[..., Any]] = staticmethod(compiled_decoder)

    def __init__(self, model: LanguageModel, spec: CacheSpec, native: CompiledDecoder) -> None:
        super().__init__(model, spec, native)
        stack, output = native.stack, native.output
        self.struct: ModelStruct | None = None
        if spec.draft and stack is not None and isinstance(output, CompiledProduct):
            whole = output.packed.struct
            columns = ProductStruct(*(getattr(whole, name) for name, *_ in ProductStruct._fields_))
            columns.O = spec.vocab_size or whole.O  # those behind stay unread
            self.table = native.embedding.contiguous()
            self.struct = ModelStruct(
                *(ctypes.addressof(stack.structs), self.table.data_ptr(), native.norm.weight.data_ptr()),
                *(columns, stack.num_layers, native.norm.eps),
            )

    def draft_chain(self, pick: Pick, previous: Tensor, root: Tensor, length: Tensor, depth: int) -> Proposal | None:
        stack = self.native.stack
        if self.struct is None or stack is None or not isinstance(pick, CompiledPick):
            return None
        B, D, S = len(root), self.table.shape[1], self.spec.capacity
        chain, room = Chain(pick, root, length, depth, self.struct.output.O), torch.empty(3, B, D)
        scratch = self.cache.room(stack.scratch_size(B, 2, D, S))
        step = PassStruct(
            *(None, None, self.cos_sin_table[0].data_ptr(), self.cos_sin_table[1].data_ptr(), None, None, None, None),
            *(scratch.data_ptr(), B, 0, 2, D, S, S, torch.get_num_threads()),
        )
        stack.library.model_chain(
            *(ctypes.byref(self.struct), ctypes.byref(step), chain.reference, previous.data_ptr()),
            *(*self.cache.where, room.data_ptr()),
        )
        return chain.proposal()
