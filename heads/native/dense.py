"""Dense decoders on a CPU, in float32: each layer one call of the kernels, over a cache that lies as they read it.

Letters: L layers, B rows, N tokens of a step, R = B * N, S slots a row, E slots shown, Hkv key heads, d head dimension,
D hidden.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.native.attention import GroupedAttention
from heads.native.feedforward import GatedMLP
from heads.native.kernels import LayerStruct, PackedWeight, PassStruct, load
from heads.native.linear import Norm


@dataclass(frozen=True)
class KernelLayer:
    """One layer as the kernels take it, and the tensors it points into."""

    kind: str
    struct: LayerStruct
    held: tuple[object, ...]
    num_key_heads: int
    d: int


def kernel_layer(
    attention: GroupedAttention, feedforward: GatedMLP, attention_norm: Norm | None, feedforward_norm: Norm
) -> KernelLayer | None:
    """The layer for the kernels, which norm its input where `attention_norm` is given; None where they cannot."""
    products = attention.qkv.packed, attention.out.packed, feedforward.gate_up.packed, feedforward.down.packed
    if any(product is None for product in products) or feedforward.activation is not torch.nn.functional.silu:
        return None
    packed: list[PackedWeight] = [product for product in products if product is not None]
    head_norm = None if attention.head_norm is None else attention.head_norm.contiguous()
    struct = LayerStruct(
        *(product.struct for product in packed),
        None if attention_norm is None else attention_norm.weight.data_ptr(),
        feedforward_norm.weight.data_ptr(),
        None if head_norm is None else head_norm.data_ptr(),
        0.0 if attention_norm is None else attention_norm.eps,
        feedforward_norm.eps,
        attention.head_eps,
        attention.scale,
        attention.num_heads,
        attention.num_key_heads,
        attention.d,
    )
    held = (*packed, head_norm, attention_norm, feedforward_norm)
    return KernelLayer(attention.kind, struct, held, attention.num_key_heads, attention.d)


class PackedCache:
    """Keys with a block of slots side by side, values with each slot's by themselves; else as `SlotCache`."""

    def __init__(self, layers: Sequence[KernelLayer], *, batch_size: int, capacity: int) -> None:
        library = load()
        assert library is not None
        self.block, lanes = library.block_size(), library.lanes()
        assert capacity % self.block == 0
        self.batch_size, self.capacity = batch_size, capacity
        heads, d = layers[0].num_key_heads, layers[0].d
        self.keys = torch.zeros(len(layers), batch_size, heads, capacity // self.block, d, self.block)
        self.values = torch.zeros(len(layers), batch_size, heads, capacity, -(-d // lanes) * lanes)
        self.where = [(k.data_ptr(), v.data_ptr()) for k, v in zip(self.keys, self.values, strict=True)]
        self.row = torch.arange(batch_size)[:, None]  # (B, 1)
        self.slots = self.row
        self.rows, self.extent = slice(0, batch_size), capacity

    def aim(self, slots: Tensor, *, extent: int, row: int | None = None) -> None:
        """Send the next step's tokens to `slots` (B, N) of every row, or (1, N) of one row; show the first `extent`
        slots."""
        self.slots, self.extent = slots.contiguous(), extent
        self.rows = slice(0, self.batch_size) if row is None else slice(row, row + 1)

    def compact(self, slots_from: Tensor, slots_to: Tensor) -> None:
        """In every layer, move what row b holds in slots_from[b] to slots_to[b]; (B, P) each. All is read before any
        is written."""
        keys = self.keys.permute(1, 3, 5, 0, 2, 4)  # (B, S / block, block, L, Hkv, d)
        values = self.values.permute(1, 3, 0, 2, 4)  # (B, S, L, Hkv, d)
        of, to = slots_from.clamp_max(self.capacity - 1), slots_to
        keys[self.row, to // self.block, to % self.block] = keys[self.row, of // self.block, of % self.block]
        values[self.row, to] = values[self.row, of]


class KernelPass:
    """One pass of R rows through kernel layers."""

    def __init__(
        self,
        cache: PackedCache,
        layers: Sequence[KernelLayer],
        x: Tensor,
        *,
        positions: Tensor,
        turns: tuple[Tensor, Tensor],
        masks: dict[str, Tensor],
    ) -> None:
        """x (R, D), which the layers change in place; positions (B, N); turns (positions, 1, d); masks (B, 1, N, E)."""
        library = load()
        assert library is not None and x.is_contiguous()
        self.run, self.cache, self.layers = library.decoder_layer, cache, layers
        B, N = positions.shape
        E = cache.extent
        size = library.scratch_size(ctypes.byref(layers[0].struct), B, N, x.shape[1], E)
        self.masks = {kind: mask.contiguous() for kind, mask in masks.items()}
        self.held = x, positions.contiguous(), turns, cache.slots, torch.empty(size)
        self.struct = PassStruct(
            x.data_ptr(),
            None,
            turns[0].data_ptr(),
            turns[1].data_ptr(),
            self.held[1].data_ptr(),
            cache.slots.data_ptr(),
            None,
            self.held[4].data_ptr(),
            B,
            cache.rows.start,
            N,
            x.shape[1],
            E,
            cache.capacity,
            torch.get_num_threads(),
        )
        self.reference = ctypes.byref(self.struct)

    def layer(self, index: int, given: Tensor | None = None) -> None:
        """Run one layer on the stream; `given` (R, K) is its input where it has no norm of its own."""
        layer = self.layers[index]
        self.struct.mask = self.masks[layer.kind].data_ptr()
        if given is not None:
            self.struct.input = given.data_ptr()
        self.run(ctypes.byref(layer.struct), self.reference, *self.cache.where[index])


def run_layers(
    layers: Sequence[KernelLayer],
    x: Tensor,
    cache: PackedCache,
    *,
    positions: Tensor,
    turns: tuple[Tensor, Tensor],
    masks: dict[str, Tensor],
    taps: Sequence[int],
) -> list[Tensor]:
    """Take the residual stream x (R, D) through all layers, in place; -> copies of it where it enters the tapped
    ones."""
    step = KernelPass(cache, layers, x, positions=positions, turns=turns, masks=masks)
    wanted = set(taps)
    caught = {}
    for i in range(len(layers)):
        if i in wanted:
            caught[i] = x.clone()
        step.layer(i)
    caught[len(layers)] = x
    return [caught[k] for k in taps]
