"""Cached forward pass that runs the Hugging Face model itself, for every architecture whose attention takes a mask."""

import sys
from typing import Any

from torch import Tensor

from heads.target.cache import HFCache
from heads.target.cached import CachedDecoder, CacheSpec
from heads.target.encoder_decoder import cache_layers
from heads.target.families import longest_text
from heads.target.model import Features, LanguageModel
from heads.target.slots import SlotMapping


class HFDecoder(CachedDecoder):
    """A Hugging Face model with the cache of one batch."""

    def __init__(self, model: LanguageModel, spec: CacheSpec) -> None:
        super().__init__(model, spec)
        layers = cache_layers(model.base, model.config)
        self.cache = HFCache(
            num_layers=layers,
            num_stored=model.attention_layers if model.is_recurrent else layers,
            batch_size=spec.batch_size,
            capacity=spec.capacity,
            num_states=1 + spec.nodes if model.is_recurrent else 0,
            device=model.device,
        )

    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        key, positions, visible = self.slot[:extent], mapping.positions, mapping.visible(0, extent)
        self.cache.aim(mapping.slots(self.spec.capacity - 1), extent=extent, row=row, prompt=prompt)
        return self.model.features(
            tokens,
            positions=positions.clamp_max(positions_of(self.model.config) - 1),  # padding may exceed it
            visible=key <= positions[..., None] if visible is None else visible,
            key_positions=key.expand(len(tokens), -1) if visible is None else mapping.key_positions(extent),
            cache=self.cache,
            aux_layer_ids=self.spec.aux_layer_ids,
        )


def positions_of(config: Any) -> int:
    """Return the number of positions that a model supports; `sys.maxsize` if its configuration has no limit."""
    return longest_text(config) or sys.maxsize
