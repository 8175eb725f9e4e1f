"""A native decoder with torch operations and the cache of one batch.

Letters: B rows, N tokens of a step, R = B * N, E visible slots, L auxiliary layers, D hidden.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from heads.backends.base import CachedDecoder
from heads.backends.slot_mapping import CacheSpec, SlotMapping
from heads.backends.torch.architectures import native_decoder
from heads.backends.torch.attention import Step
from heads.backends.torch.decoder import NativeDecoder
from heads.target.families import attention_masks
from heads.target.frozen import Features, LanguageModel


class TorchDecoder(CachedDecoder):
    """A native decoder with the cache of one batch."""

    native: NativeDecoder
    make_native: ClassVar[Callable[..., Any]] = staticmethod(native_decoder)

    @classmethod
    def of(cls, model: LanguageModel, spec: CacheSpec) -> Self | None:
        """Return the decoder of a model, or None if the model has no native decoder."""
        native = cls.make_native(model, draft=spec.draft)
        return None if native is None else cls(model, spec, native)

    def __init__(self, model: LanguageModel, spec: CacheSpec, native: NativeDecoder) -> None:
        super().__init__(model, spec)
        self.native = native
        self.cache = native.new_cache(batch_size=spec.batch_size, capacity=spec.capacity)
        self.cos_sin_table = native.cos_sin_table(spec.capacity + spec.depth)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        (B, N), native, visible = tokens.shape, self.native, mapping.visible(0, extent)
        self.cache.aim(mapping.slots(self.spec.capacity - 1), extent=extent, row=row)
        x = native.embedding.index_select(0, tokens.flatten())  # (R, D)
        x, aux = self.run(x, mapping.positions, self.masks(mapping, visible, extent))
        return Features(aux.view(B, N, -1), native.norm(x).view(B, N, -1))

    def masks(self, mapping: SlotMapping, visible: Tensor | None, extent: int) -> dict[str, Tensor]:
        """Return the masks (B, 1, N, E) to add to scores, by layer kind. With `visible` None, tokens see the slots up
        to their own."""
        native, positions = self.native, mapping.positions
        if visible is None:
            key_positions = self.slot[:extent].expand(len(positions), -1)
            visible = key_positions[:, None] <= positions[..., None]
        else:
            key_positions = mapping.key_positions(extent)
        made = attention_masks(native.config, native.embedding.dtype, visible, positions, key_positions)
        return made if isinstance(made, dict) else dict.fromkeys((part.attention.kind for part in native.layers), made)

    def run(self, x: Tensor, positions: Tensor, masks: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Run the residual stream x (R, D) through all layers. Return the final stream, and the streams that enter the
        auxiliary layers, concatenated (R, L * D)."""
        place, ids = positions.flatten(), self.spec.aux_layer_ids
        cos_sin = self.cos_sin_table[0].index_select(0, place), self.cos_sin_table[1].index_select(0, place)
        step = Step(cache=self.cache, batch_size=len(positions), cos_sin=cos_sin, masks=masks)
        streams = []
        for i, layer in enumerate(self.native.layers):
            streams.append(x)
            x = layer.attention(layer.attention_norm(x), x, step, i)
            x = layer.feedforward(layer.feedforward_norm(x), x)
        return x, torch.cat([[*streams, x][k] for k in ids], dim=-1) if ids else x[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        own = self.native.logits(hidden)
        return super().logits(hidden) if own is None else own[..., : self.spec.vocab_size]
