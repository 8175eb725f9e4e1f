"""How a draft model is read in the runtime: by its native decoder where it has one, else by its Hugging Face model.

Letters: B batch, W tokens of a step, S slots of the cache, E of them shown, D hidden, C tokens that
target and draft share.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.cache import RowCache
from heads.encoder_decoder import cache_layers
from heads.families import OutputHead
from heads.native.architectures import native_decoder
from heads.native.model import KernelModel
from heads.native.slots import SlotCache
from heads.native.stack import PackedCache
from heads.target import decode
from heads.tree import CompiledPick, Proposal


@dataclass(frozen=True, eq=False)
class Parts:
    """A language model in parts, as native decoders are made from it."""

    base: nn.Module
    head: Any
    law: OutputHead
    config: Any

    @property
    def layers(self) -> nn.ModuleList:
        """Of the architectures that have a native decoder."""
        base: Any = self.base
        layers: nn.ModuleList = base.layers
        return layers

    @property
    def num_layers(self) -> int:
        number: int = self.config.num_hidden_layers
        return number

    @property
    def device(self) -> torch.device:
        device: torch.device = self.head.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.head.weight.dtype
        return dtype


class Reader:
    """A draft model, its weights as they are when this is made, and what it keeps of a batch."""

    cache: RowCache | SlotCache | PackedCache

    def __init__(self, parts: Parts, *, batch_size: int, capacity: int, positions: int, common_size: int) -> None:
        """`capacity` slots a row, a multiple of 64; `positions` 0 .. may be asked for; `common_size`: C."""
        self.parts, self.common_size = parts, common_size
        self.kernels: KernelModel | None = None
        """What drafts a chain in one call."""
        self.decoder = native_decoder(parts, draft=True)
        self.slot = torch.arange(capacity, device=parts.device)
        if self.decoder is None:
            layers = cache_layers(parts.base, parts.config)
            self.cache = RowCache(num_layers=layers, batch_size=batch_size, capacity=capacity, device=parts.device)
        else:
            self.cache = self.decoder.new_cache(batch_size=batch_size, capacity=capacity)
            self.turns = self.decoder.turns(positions)
            self.kernels = KernelModel.of(self.decoder, common_size, self.turns)

    def read(
        self,
        tokens: Tensor,
        *,
        slots: Tensor,
        positions: Tensor,
        extent: int,
        visible: Tensor | None = None,
        key_positions: Tensor | None = None,
        prompt: bool = False,
    ) -> Tensor:
        """One step: tokens (B, W), whose keys go to `slots`, at `positions`, seeing the first `extent` slots -> states
        after the final norm (B, W, D).

        visible (B, W, E), key_positions (B, E); None: slots are positions, and a token sees those up to its own.
        `prompt`: the tokens belong to one.
        """
        if self.decoder is not None:
            assert not isinstance(self.cache, RowCache)
            self.cache.aim(slots, extent=extent)
            return self.decoder.features(
                tokens,
                positions=positions,
                visible=visible,
                key_positions=key_positions,
                cache=self.cache,
                turns=self.turns,
            ).hidden
        assert isinstance(self.cache, RowCache)
        self.cache.aim(slots, extent=extent, prompt=prompt)
        if visible is None:
            key_positions = self.slot[:extent].expand(len(tokens), -1)
            visible = self.slot[:extent] <= positions[..., None]
        assert key_positions is not None
        parts = self.parts
        return decode(
            parts.base,
            parts.config,
            parts.dtype,
            tokens,
            positions=positions,
            visible=visible,
            key_positions=key_positions,
            cache=self.cache,
        )

    def draft_chain(self, pick: CompiledPick, previous: Tensor, root: Tensor, length: Tensor, depth: int) -> Proposal:
        """A chain behind each root (B,), which stands at `length` (B,) behind the token `previous` (B,), in one
        call."""
        assert self.kernels is not None and isinstance(self.cache, PackedCache)
        return self.kernels.draft_chain(pick, previous, root, length, depth, self.cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, W, D) -> (B, W, C), float32 or wider."""
        own = None if self.decoder is None else self.decoder.logits(hidden)
        return (self.parts.law(hidden) if own is None else own)[..., : self.common_size]
