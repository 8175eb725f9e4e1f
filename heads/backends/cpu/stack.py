"""Decoder layers in float32 on a CPU: all of them in one call of the kernels, over a cache in the kernels' layout.

Letters: L layers, B rows, N tokens of a step, R = B * N, S slots per row, E visible slots, D hidden, d head dimension.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads.backends.cpu.kernels import CompiledProduct
from heads.backends.cpu.library import STRUCTS, loaded
from heads.backends.torch.attention import GroupedAttention
from heads.backends.torch.feedforward import GatedMLP
from heads.backends.torch.linear import Norm

Block = tuple[Norm | None, Any, Norm, Any]
"""A layer: the norm before attention (None if the input is already normalized), attention, the norm before the MLP, the
MLP."""


Convolutions = tuple[tuple[Any, Tensor], ...]
"""Convolutions around attention and around the MLP: each the product for the coefficients, and the base kernel
(2, taps, D). Empty if there are none."""


def signed(cos_sin_table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (S, d) as the kernels read them: sines with the first half negated."""
    cos, sin = cos_sin_table
    half = cos.shape[1] // 2
    return cos.contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], dim=1)


class CpuKVCache:
    """KV cache like `KVCache`, but keys are interleaved in blocks of slots. Each slot's values are contiguous."""

    def __init__(self, stack: "CpuStack", *, batch_size: int, capacity: int) -> None:
        block, lanes = stack.library.block_size(), stack.library.lanes()
        L, (heads, d) = stack.num_layers, stack.key_shape
        assert capacity % block == 0
        self.library, self.capacity = stack.library, capacity
        self.keys = torch.zeros(L, batch_size, heads, capacity // block, d, block)
        self.values = torch.zeros(L, batch_size, heads, capacity, -(-d // lanes) * lanes)
        self.where = (
            *(self.keys.data_ptr(), self.keys[0].numel()),
            *(self.values.data_ptr(), self.values[0].numel()),
        )
        self.slots = torch.arange(batch_size)[:, None]  # (B, 1), until aimed
        self.first_row, self.extent = 0, capacity
        self.scratch = torch.empty(0)

    def aim(self, slots: Tensor, *, extent: int, row: int | None = None) -> None:
        """Set the slots of the next step's tokens: `slots` (B, N) of every row, or (1, N) of one row. Attention sees
        the first `extent` slots."""
        self.slots, self.extent, self.first_row = slots, extent, row or 0

    def compact(self, slots_from: Tensor, slots_to: Tensor) -> None:
        """Move the slots slots_from[b] of row b to slots_to[b], (B, P) each, in every layer. All slots are read before
        any is written."""
        held = slots_from.contiguous(), slots_to.contiguous()
        (L, B, heads, _, d, _), deep, P = self.keys.shape, self.values.shape[4], held[0].shape[1]
        self.library.move_slots(
            *(self.keys.data_ptr(), self.values.data_ptr(), held[0].data_ptr(), held[1].data_ptr()),
            *(self.room(P * (d + deep)).data_ptr(), L, B, heads, self.capacity, d, P),
        )

    def room(self, size: int) -> Tensor:
        """Return a scratch buffer of at least `size` floats, which calls reuse."""
        if len(self.scratch) < size:
            self.scratch = torch.empty(size)
        return self.scratch


class CpuStack:
    """Structs of layers for the kernels, with the tensors that they point to."""

    def __init__(self, blocks: Sequence[Block], window: int, convolutions: Sequence[Convolutions] = ()) -> None:
        """`window` is the sliding window of the layers that have one. `convolutions` has one entry per layer, or is
        empty."""
        self.library, self.held = loaded(), (*blocks, *convolutions)
        self.num_layers = len(blocks)
        around = convolutions or [()] * len(blocks)
        made = (_struct(block, window, pair) for block, pair in zip(blocks, around, strict=True))
        self.structs = (STRUCTS["Layer"] * len(blocks))(*made)
        attention = blocks[0][1]
        self.key_shape = attention.num_key_heads, attention.d
        self.sizes: dict[tuple[int, ...], int] = {}

    @classmethod
    def of(
        cls, blocks: Sequence[Block], window: int | None = None, convolutions: Sequence[Convolutions] = ()
    ) -> "CpuStack | None":
        """Return the stack of layers whose parts come from `heads.backends.cpu.kernels.in_c`. Return None if the
        kernels do not support the kind of layer, the dtype, the activation or layers of different widths."""
        if not all(isinstance(a, GroupedAttention) and isinstance(m, GatedMLP) for _, a, _, m in blocks):
            return None
        shapes = {(a.num_heads, a.num_key_heads, a.d, a.qkv.weight.shape, m.down.weight.shape) for _, a, _, m in blocks}
        plain = all(mlp.activation is torch.nn.functional.silu for *_, mlp in blocks)
        packed = all(isinstance(p, CompiledProduct) for _, a, _, m in blocks for p in (a.qkv, a.out, m.gate_up, m.down))
        if len(shapes) > 1 or not plain or not packed:
            return None
        return cls(blocks, window or 0, convolutions)

    def new_cache(self, *, batch_size: int, capacity: int) -> CpuKVCache:
        """Return a cache for `batch_size` rows of at most `capacity` tokens, a multiple of 64."""
        return CpuKVCache(self, batch_size=batch_size, capacity=capacity)

    def scratch_size(self, *shape: int) -> int:
        """Return the number of scratch floats that a pass of shape (B, N, D, E) needs."""
        size = self.sizes.get(shape)
        if size is None:
            size = self.sizes[shape] = self.library.scratch_size(self.structs, *shape)
        return size

    def run(
        self,
        x: Tensor,
        cache: CpuKVCache,
        *,
        positions: Tensor,
        cos_sin_table: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        near_mask: Tensor | None = None,
        aux_layer_ids: Sequence[int] = (),
    ) -> Tensor:
        """Run the residual stream x (R, D) through all layers in place. Return the streams that enter the auxiliary
        layers, concatenated (R, auxiliary layers * D).

        positions (B, N); cos_sin_table of all positions, in the form of `signed`. `mask` and `near_mask` (B, 1, N, E)
        are added to scores in layers without and with a window. Without them, a token sees the slots up to its own.
        """
        B, N = positions.shape
        R, D = x.shape
        E, size = cache.extent, self.scratch_size(B, N, D, cache.extent)
        held = [t if t is None else t.contiguous() for t in (positions, cache.slots, mask, near_mask)]
        where = [t if t is None else t.data_ptr() for t in held]
        aux = x.new_empty(R, len(aux_layer_ids) * D)
        step = STRUCTS["Pass"](
            *(x.data_ptr(), None, cos_sin_table[0].data_ptr(), cos_sin_table[1].data_ptr(), *where),
            *(cache.room(size).data_ptr(), B, cache.first_row, N, D, E, cache.capacity, torch.get_num_threads()),
        )
        wanted = (ctypes.c_int64 * len(aux_layer_ids))(*aux_layer_ids)
        self.library.decoder_layers(
            self.structs, self.num_layers, ctypes.byref(step), *cache.where, wanted, len(aux_layer_ids), aux.data_ptr()
        )
        return aux


def _struct(block: Block, window: int, convolutions: Convolutions) -> Any:
    attention_norm, attention, norm, mlp = block
    none = STRUCTS["Convolution"](STRUCTS["Product"](), None, 0, 0)
    return STRUCTS["Layer"](
        *(product.struct for product in (attention.qkv, attention.out, mlp.gate_up, mlp.down)),
        *([_convolution(*pair) for pair in convolutions] or [none, none]),
        None if attention_norm is None else attention_norm.weight.data_ptr(),
        norm.weight.data_ptr(),
        None if attention.head_norm is None else attention.head_norm.data_ptr(),
        0.0 if attention_norm is None else attention_norm.eps,
        *(norm.eps, attention.head_eps, attention.scale),
        *(attention.num_heads, attention.num_key_heads, attention.d),
        window if attention.kind == "sliding_attention" else 0,
    )


def _convolution(project: Any, base: Tensor) -> Any:
    taps = base.shape[1]
    return STRUCTS["Convolution"](project.struct, base.data_ptr(), taps, len(project.weight) // (2 * taps))
