"""A native decoder over whole rows of packed documents, its products in a dtype of choice: features for training on a
CPU.

It is what autocast makes of the Hugging Face model, with weights that are narrowed once and not in every pass, and
attention by matrix products, which on a CPU take less time than the library's fused kernel. The residual stream keeps
the target's dtype.

Letters: B rows, T tokens, R = B * T, H query heads, G query heads per key head, d head dimension, D hidden, L auxiliary
layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear

from heads.backends.cpu.decoder import compiled_decoder
from heads.backends.torch.attention import GroupedAttention, rotate_
from heads.backends.torch.decoder import NativeDecoder
from heads.backends.torch.feedforward import Activation, GatedMLP
from heads.backends.torch.linear import Norm, Product, unit
from heads.target.families import attention_masks
from heads.target.frozen import Features, FrozenTarget, packed_visible

BLOCK = 128
"""Query tokens handled at once: a block reads only the keys that its last token can see."""

_made: "WeakKeyDictionary[FrozenTarget, tuple[NativeDecoder, WholePass]]" = WeakKeyDictionary()


def whole_pass(target: FrozenTarget, dtype: torch.dtype) -> "WholePass | None":
    """The pass of a target with products in `dtype`, made once; None off a CPU, and where its layers are not attention
    in groups and a gated MLP."""
    decoder = compiled_decoder(target) if target.device.type == "cpu" else None
    if decoder is None:
        return None
    known = _made.get(target)
    if known is None or known[0] is not decoder or known[1].dtype != dtype:
        parts = [(layer.attention, layer.feedforward) for layer in decoder.layers]
        if not all(isinstance(a, GroupedAttention) and isinstance(m, GatedMLP) for a, m in parts):
            return None
        _made[target] = known = decoder, WholePass(decoder, dtype)
    return known[1]


class _Narrow:
    """A product in a dtype that may be another than the target's; where it is not, the weight is shared."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.to(dtype)

    @classmethod
    def of(cls, product: Product, dtype: torch.dtype, parts: int = 1) -> "list[_Narrow]":
        """Each of the `parts` equal products that lie side by side in one."""
        biases = [None] * parts if product.bias is None else product.bias.chunk(parts)
        return [cls(weight, bias, dtype) for weight, bias in zip(product.weight.chunk(parts), biases, strict=True)]

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x.to(self.weight.dtype), self.weight, self.bias)


@dataclass(frozen=True)
class _Layer:
    attention_norm: Norm
    attention: GroupedAttention
    qkv: _Narrow
    out: _Narrow
    feedforward_norm: Norm
    gate: _Narrow
    up: _Narrow
    activation: Activation
    down: _Narrow


class WholePass:
    """Token ids in, auxiliary hidden states and the last hidden state out."""

    def __init__(self, decoder: NativeDecoder, dtype: torch.dtype) -> None:
        self.config, self.embedding, self.dtype = decoder.config, decoder.embedding, dtype
        self.norm, self.cos_sin_table = decoder.norm, decoder.cos_sin_table
        self.layers = []
        for layer in decoder.layers:
            attention, mlp = layer.attention, layer.feedforward
            assert isinstance(attention, GroupedAttention) and isinstance(mlp, GatedMLP)
            [qkv], [out], [down] = (_Narrow.of(part, dtype) for part in (attention.qkv, attention.out, mlp.down))
            gate, up = _Narrow.of(mlp.gate_up, dtype, 2)  # two products: the activation is faster on rows without gaps
            self.layers.append(
                _Layer(
                    layer.attention_norm, attention, qkv, out, layer.feedforward_norm, gate, up, mlp.activation, down
                )
            )

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]) -> Features:
        """As `FrozenTarget.packed_features`."""
        with torch.autocast(tokens.device.type, enabled=False):
            B, T = tokens.shape
            x = self.embedding.index_select(0, tokens.flatten())  # (R, D)
            cos_sin_table = self.cos_sin_table(int(positions.max()) + 1)
            cos_sin = cos_sin_table[0][positions.flatten()], cos_sin_table[1][positions.flatten()]  # (R, 1, d)
            made = attention_masks(self.config, self.dtype, packed_visible(documents), positions, positions)
            masks: dict[tuple[str, int], list[Tensor]] = {}
            streams = []
            for layer in self.layers:
                streams.append(x)
                attention = layer.attention
                G = attention.num_heads // attention.num_key_heads
                key = attention.kind, G
                if key not in masks:
                    mask = made[attention.kind] if isinstance(made, dict) else made
                    masks[key] = [
                        mask[:, 0, start:stop, :stop]
                        .repeat_interleave(G, 1)
                        .repeat_interleave(attention.num_key_heads, 0)
                        for start, stop in _blocks(T)
                    ]
                heads = layer.qkv(layer.attention_norm(x)).view(B * T, -1, attention.d)
                x = x + layer.out(_attend(attention, heads, cos_sin, masks[key], B))
                normed = layer.feedforward_norm(x).to(self.dtype)
                x = x + layer.down(layer.activation(layer.gate(normed)).mul_(layer.up(normed)))
            aux = torch.cat([[*streams, x][k] for k in aux_layer_ids], dim=-1) if aux_layer_ids else x[:, :0]
            return Features(aux.view(B, T, -1), self.norm(x).view(B, T, -1))


def _attend(
    attention: GroupedAttention, heads: Tensor, cos_sin: tuple[Tensor, Tensor], masks: list[Tensor], B: int
) -> Tensor:
    """heads (R, H + 2 H / G, d): queries, keys and values; masks by block, (B * H / G, block * G, stop), to be added to
    scores -> (R, H * d)."""
    H, Hkv, d = attention.num_heads, attention.num_key_heads, attention.d
    rotated = heads[:, : H + Hkv].to(torch.promote_types(heads.dtype, torch.float32))  # a copy if narrow
    if attention.head_norm is not None:
        rotated = unit(rotated, attention.head_eps).mul_(attention.head_norm)
    rotated = rotate_(rotated, cos_sin).to(heads.dtype)

    def by_head(x: Tensor) -> Tensor:
        """(R, Hkv * n, d) -> (B * Hkv, T * n, d)."""
        return x.reshape(B, -1, Hkv, x.shape[1] // Hkv, d).transpose(1, 2).reshape(B * Hkv, -1, d)

    q, k, v = by_head(rotated[:, :H]), by_head(rotated[:, H:]), by_head(heads[:, H + Hkv :])
    T, G = k.shape[1], H // Hkv
    outs = []
    for (start, stop), mask in zip(_blocks(T), masks, strict=True):
        scores = torch.baddbmm(mask, q[:, start * G : stop * G], k[:, :stop].mT, alpha=attention.scale)
        outs.append(torch.bmm(scores.softmax(-1), v[:, :stop]))
    out = torch.cat(outs, 1)  # (B * Hkv, T * G, d)
    return out.view(B, Hkv, T, G * d).transpose(1, 2).reshape(B * T, H * d)


def _blocks(T: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, T)) for start in range(0, T, BLOCK)]
