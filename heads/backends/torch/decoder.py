"""Native decoders: the target's forward pass as few functions of tensors, with fused weights and a static cache.

Known are the architectures of `heads.backends.torch.architectures`; each decodes as its Hugging Face model does, up to
rounding. Every shape is static and nothing waits for the host, so that a CUDA graph can hold a step.

Letters: B rows, N tokens of a step, R = B * N, S slots a row, L auxiliary layers, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.backends.torch.attention import GroupedAttention, KVCache, LatentAttention, Step
from heads.backends.torch.feedforward import Experts, GatedMLP
from heads.backends.torch.linear import Norm, Product
from heads.target.families import attention_masks
from heads.target.frozen import Features


@dataclass(frozen=True)
class Layer:
    """x + attention(norm(x)), then x + feedforward(norm(x))."""

    attention_norm: Norm
    attention: GroupedAttention | LatentAttention
    feedforward_norm: Norm
    feedforward: GatedMLP | Experts


@dataclass(frozen=True, eq=False)
class NativeDecoder:
    """Token ids in, auxiliary hidden states and the last hidden state out."""

    config: Any
    embedding: Tensor  # (V, D)
    layers: list[Layer]
    norm: Norm
    rotary: Any
    """The model's own module of rotary positions, with whatever scaling it has."""
    output: Product | None
    """The output head, where it is a plain product."""

    def products(self) -> dict[str, list[Product]]:
        """The large products by kind (`qkv`, `gate_up`, ...), those of one kind layer by layer; a mixture's experts and
        its router are none of them, the experts that every token visits are."""
        found: dict[str, list[Product]] = {}
        for layer in self.layers:
            for block in (layer.attention, layer.feedforward, getattr(layer.feedforward, "shared", None)):
                for name, part in vars(block).items() if block is not None else ():
                    if isinstance(part, Product):
                        found.setdefault(name, []).append(part)
        return found

    def new_cache(self, *, batch_size: int, capacity: int) -> Any:
        """A cache for `batch_size` rows of at most `capacity` tokens, a multiple of 64."""
        return KVCache(
            num_layers=len(self.layers),
            batch_size=batch_size,
            capacity=capacity,
            width=self.layers[0].attention.slot_width,
            dtype=self.embedding.dtype,
            device=self.embedding.device,
        )

    def cos_sin_table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """(positions, 1, d) twice: cosines, and sines with the first half negative, of positions 0 .. ."""
        made = self.rotary(self.embedding[:1], torch.arange(num_positions, device=self.embedding.device)[None])
        if isinstance(made, tuple):
            cos, sin = (table[0, :, : table.shape[-1] // 2] for table in made)
        else:
            cos, sin = made[0].real, made[0].imag
        cos, sin = cos.to(self.embedding.dtype), sin.to(self.embedding.dtype)
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]

    @torch.no_grad()
    def features(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        visible: Tensor | None,
        key_positions: Tensor | None,
        cache: Any,
        cos_sin_table: tuple[Tensor, Tensor],
        aux_layer_ids: Sequence[int] = (),
    ) -> Features:
        """One pass over tokens (B, N), whose slots `cache` was aimed at; the other arguments as in
        `FrozenTarget.features`, and `cos_sin_table` of all positions there are.

        `visible` and `key_positions` None: slots are positions, and a token sees those up to its own.
        """
        B, N = tokens.shape
        x = self.embedding.index_select(0, tokens.flatten())  # (R, D)
        masks = self.masks(positions, visible, key_positions, cache.extent)
        x, aux = self.run(x, cache, positions, masks, cos_sin_table, aux_layer_ids)
        return Features(aux.view(B, N, -1), self.norm(x).view(B, N, -1))

    def masks(
        self, positions: Tensor, visible: Tensor | None, key_positions: Tensor | None, extent: int
    ) -> dict[str, Tensor]:
        """Return what is added to scores (B, 1, N, E), by kind of layer."""
        if visible is None or key_positions is None:
            key_positions = torch.arange(extent, device=positions.device).expand(len(positions), -1)
            visible = key_positions[:, None] <= positions[..., None]
        made = attention_masks(self.config, self.embedding.dtype, visible, positions, key_positions)
        return made if isinstance(made, dict) else dict.fromkeys((layer.attention.kind for layer in self.layers), made)

    def run(
        self,
        x: Tensor,
        cache: Any,
        positions: Tensor,
        masks: dict[str, Tensor],
        cos_sin_table: tuple[Tensor, Tensor],
        aux_layer_ids: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Take the residual stream (R, D) through all layers; -> what it has become, and what enters the auxiliary
        ones, side by side (R, L * D)."""
        place = positions.flatten()
        cos_sin = cos_sin_table[0].index_select(0, place), cos_sin_table[1].index_select(0, place)
        step = Step(cache=cache, batch_size=len(positions), cos_sin=cos_sin, masks=masks)
        streams = []
        for i, layer in enumerate(self.layers):
            streams.append(x)
            x = layer.attention(layer.attention_norm(x), x, step, i)
            x = layer.feedforward(layer.feedforward_norm(x), x)
        return x, torch.cat([[*streams, x][k] for k in aux_layer_ids], dim=-1) if aux_layer_ids else x[:, :0]

    def logits(self, hidden: Tensor) -> Tensor | None:
        """(..., D) hidden states after the final norm -> (..., V) logits, float32 or wider; None where the output head
        is more than a product."""
        if self.output is None:
            return None
        logits: Tensor = self.output(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
