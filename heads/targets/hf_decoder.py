"""Cached forward pass that runs the Hugging Face model itself, for every architecture whose attention takes a mask.

Where the kernel can run, layers call it through transformers' `AttentionInterface`, and a pass needs no mask
(`heads.targets.hf_forward`). Elsewhere they run their own attention under a mask.
"""

import sys

from torch import Tensor

from heads.kernels.product import Product
from heads.kernels.slots import SlotMapping
from heads.kernels.triton_support import runs_kernels
from heads.targets.cache import HFCache
from heads.targets.cached_decoder import CachedDecoder, CacheSpec
from heads.targets.encoder_decoder import EncoderDecoder
from heads.targets.families import longest_text
from heads.targets.frozen_target import Features, LanguageModel
from heads.targets.hf_forward import decode_tree, takes_block_masks
from heads.targets.quantization import weight_bytes


class HFDecoder(CachedDecoder):
    """A Hugging Face model with the cache of one batch."""

    def __init__(self, model: LanguageModel, spec: CacheSpec) -> None:
        super().__init__(model, spec)
        layers = model.num_layers * (2 if isinstance(model.base, EncoderDecoder) else 1)  # and those of the input
        self.cache = HFCache(
            num_layers=layers,
            num_stored=model.attention_layers if model.is_recurrent else layers,
            batch_size=spec.batch_size,
            capacity=spec.capacity,
            num_states=1 + spec.nodes if model.is_recurrent else 0,
            device=model.device,
        )
        self.bytes = weight_bytes(model.layers)
        # Where a mask passes through unchanged, so does a tree's shape. Which scores the kernel can compute, the first
        # pass shows (`eval.runtime.open_decoder`).
        self.reads_masks = not (runs_kernels(model.head.weight) and takes_block_masks(model.base, model.config))

    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        model = self.model
        Product.bytes_read += self.bytes
        self.cache.set_slots(mapping.slots, extent=extent, row=row, prompt=prompt)
        positions = mapping.positions.clamp_max(positions_of(model.config) - 1)  # padding may exceed it
        if not self.reads_masks:
            given = model.base, model.config, tokens
            slots = mapping.visible_slots()
            return model.catch(
                self.spec.aux_layer_ids,
                lambda: decode_tree(*given, positions=positions, visible_slots=slots, cache=self.cache),
            )
        return model.features(
            tokens,
            positions=positions,
            visible=mapping.visible(0, extent),
            key_positions=mapping.key_positions(extent),
            cache=self.cache,
            aux_layer_ids=self.spec.aux_layer_ids,
        )


def positions_of(config: object) -> int:
    return longest_text(config) or sys.maxsize
