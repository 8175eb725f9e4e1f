"""A native decoder by torch's operations, with the cache of one batch."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor

from heads.backends.base import CachedDecoder
from heads.backends.slot_mapping import CacheSpec, SlotMapping
from heads.backends.torch.architectures import native_decoder
from heads.backends.torch.decoder import NativeDecoder
from heads.target.frozen import Features, LanguageModel


class TorchDecoder(CachedDecoder):
    """A native decoder with the cache of one batch."""

    native: NativeDecoder
    make_native: ClassVar[Callable[..., Any]] = staticmethod(native_decoder)

    @classmethod
    def of(cls, model: LanguageModel, spec: CacheSpec) -> Self | None:
        """Return the decoder of a model, or None where the architecture has no native one."""
        native = cls.make_native(model, draft=spec.draft)
        return None if native is None else cls(model, spec, native)

    def __init__(self, model: LanguageModel, spec: CacheSpec, native: NativeDecoder) -> None:
        super().__init__(model, spec)
        self.native = native
        self.cache = native.new_cache(batch_size=spec.batch_size, capacity=spec.capacity)
        self.cos_sin_table = native.cos_sin_table(spec.capacity + spec.depth)

    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        visible = mapping.visible(0, extent)
        self.cache.aim(mapping.slots(self.spec.capacity - 1), extent=extent, row=row)
        return self.native.features(
            tokens,
            positions=mapping.positions,
            visible=visible,
            key_positions=None if visible is None else mapping.key_positions(extent),
            cache=self.cache,
            cos_sin_table=self.cos_sin_table,
            aux_layer_ids=self.spec.aux_layer_ids,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        own = self.native.logits(hidden)
        return super().logits(hidden) if own is None else own[..., : self.spec.vocab_size]
