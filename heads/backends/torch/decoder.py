"""Native decoders: the target's layers as a few tensor functions, with fused weights and a static cache.

`heads.backends.torch.architectures` lists the supported architectures. Each decodes as its Hugging Face model does, up
to rounding. Every shape is static and nothing synchronizes with the host, so that a CUDA graph can capture a step.

Letters: D hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.backends.torch.attention import GroupedAttention, KVCache, LatentAttention
from heads.backends.torch.feedforward import Experts, GatedMLP
from heads.backends.torch.linear import Norm, Product


@dataclass(frozen=True)
class Layer:
    """x + attention(norm(x)), then x + feedforward(norm(x))."""

    attention_norm: Norm
    attention: GroupedAttention | LatentAttention
    feedforward_norm: Norm
    feedforward: GatedMLP | Experts


@dataclass(frozen=True, eq=False)
class NativeDecoder:
    """A decoder's layers, embeddings and output head."""

    config: Any
    embedding: Tensor  # (V, D)
    layers: list[Layer]
    norm: Norm
    rotary: Any
    """The model's own rotary embedding module, with any scaling that it has."""
    output: Product | None
    """The output head if it is a plain product, else None."""

    def products(self) -> dict[str, list[Product]]:
        """Return the large products by kind (`qkv`, `gate_up`, ...), in layer order. Shared experts are included,
        routed experts and routers are not."""
        found: dict[str, list[Product]] = {}
        for layer in self.layers:
            for block in (layer.attention, layer.feedforward, getattr(layer.feedforward, "shared", None)):
                for name, part in vars(block).items() if block is not None else ():
                    if isinstance(part, Product):
                        found.setdefault(name, []).append(part)
        return found

    def new_cache(self, *, batch_size: int, capacity: int) -> Any:
        """Return a cache for `batch_size` rows of at most `capacity` tokens, a multiple of 64."""
        return KVCache(
            num_layers=len(self.layers),
            batch_size=batch_size,
            capacity=capacity,
            width=self.layers[0].attention.slot_width,
            dtype=self.embedding.dtype,
            device=self.embedding.device,
        )

    def cos_sin_table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return (num_positions, 1, d) twice, for positions from 0: cosines, and sines with the first half negated."""
        made = self.rotary(self.embedding[:1], torch.arange(num_positions, device=self.embedding.device)[None])
        if isinstance(made, tuple):
            cos, sin = (table[0, :, : table.shape[-1] // 2] for table in made)
        else:
            cos, sin = made[0].real, made[0].imag
        cos, sin = cos.to(self.embedding.dtype), sin.to(self.embedding.dtype)
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return the logits (..., V), float32 or wider, of hidden states (..., D) after the final norm; None if the
        output head is not a plain product."""
        if self.output is None:
            return None
        logits: Tensor = self.output(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
