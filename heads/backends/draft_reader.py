"""How a draft model is read in the runtime: by its native decoder where it has one, else by its Hugging Face model.

Letters: B batch, W tokens of a step, S slots of the cache, E of them shown, D hidden, C tokens that
target and draft share.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.backends.cpu.draft_model import CpuDraftModel
from heads.backends.cpu.draws import CompiledPick
from heads.backends.cpu.stack import CpuKVCache
from heads.backends.huggingface import HFCache
from heads.backends.slot_mapping import Drafted, Observed
from heads.backends.torch.architectures import native_decoder
from heads.backends.torch.cache import KVCache
from heads.backends.triton.decoder import DTYPES
from heads.backends.triton.draft_model import DraftPass
from heads.backends.triton.inputs import take_newest
from heads.backends.triton.runtime import runs_kernels
from heads.base import Observation
from heads.target.encoder_decoder import cache_layers
from heads.target.families import OutputHead
from heads.target.frozen import decode
from heads.tree import Proposal, TreeShape


@dataclass(frozen=True, eq=False)
class Parts:
    """A language model in parts, as native decoders are made from it."""

    base: nn.Module
    head: Any
    distribution: OutputHead
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

    cache: HFCache | KVCache | CpuKVCache

    def __init__(self, parts: Parts, *, batch_size: int, capacity: int, shape: TreeShape, common_size: int) -> None:
        """`capacity` slots a row, a multiple of 64, the last of them for padding; for trees of `shape` and for shorter
        chains; `common_size`: C."""
        self.parts, self.common_size = parts, common_size
        self.kernels: CpuDraftModel | None = None
        """What drafts a chain in one call, on a CPU."""
        self.passes: DraftPass | None = None
        """What reads by the kernels of a GPU."""
        self.decoder = native_decoder(parts, draft=True)
        self.slot = torch.arange(capacity, device=parts.device)
        if self.decoder is None:
            layers = cache_layers(parts.base, parts.config)
            self.cache = HFCache(num_layers=layers, batch_size=batch_size, capacity=capacity, device=parts.device)
        elif runs_kernels(self.decoder.embedding) and parts.dtype in DTYPES:
            self.passes = DraftPass(
                self.decoder, batch_size=batch_size, capacity=capacity, shape=shape, common_size=common_size
            )
            self.cache = self.passes.cache
        else:
            self.cache = self.decoder.new_cache(batch_size=batch_size, capacity=capacity)
            self.cos_sin_table = self.decoder.cos_sin_table(capacity + shape.depth)
            self.kernels = CpuDraftModel.of(self.decoder, common_size, self.cos_sin_table)

    def read(self, tokens: Tensor, places: Observed | Drafted, *, prompt: bool = False) -> Tensor:
        """One step: tokens (B, W) at their places -> states after the final norm (B, W, D). `prompt`: the tokens belong
        to one."""
        if self.passes is not None:
            return self.passes.read(tokens, places)
        extent = len(self.slot)
        slots, positions, visible = places.slots(extent - 1), places.positions, places.visible(0, extent)
        key_positions = places.key_positions(extent) if isinstance(places, Drafted) and visible is not None else None
        if self.decoder is not None:
            assert not isinstance(self.cache, HFCache)
            self.cache.aim(slots, extent=extent)
            return self.decoder.features(
                tokens,
                positions=positions,
                visible=visible,
                key_positions=key_positions,
                cache=self.cache,
                cos_sin_table=self.cos_sin_table,
            ).hidden
        assert isinstance(self.cache, HFCache)
        self.cache.aim(slots, extent=extent, prompt=prompt)
        parts = self.parts
        return decode(
            parts.base,
            parts.config,
            parts.dtype,
            tokens,
            positions=positions.clamp_max(positions_of(parts.config) - 1),  # padding may stand beyond it
            visible=self.slot <= positions[..., None] if visible is None else visible,
            key_positions=self.slot.expand(len(tokens), -1) if key_positions is None else key_positions,
            cache=self.cache,
        )

    def keep(self, expanded: Tensor, start: Tensor, count: Tensor) -> None:
        """Move the keys of accepted nodes to the slots they keep. expanded (B, M): where each node stands behind its
        root, which is at position `start` (B,), as places in the order of expansion; -1 for the root, and where it was
        not expanded, whose slot is left with padding. Of each row's nodes the first `count` (B,) are accepted."""
        if self.passes is not None:
            self.passes.compact(start, expanded + 1, count - 1)
            return
        offset, junk = self.slot[: expanded.shape[1]], len(self.slot) - 1
        moves = (expanded >= 0) & (offset < count[:, None])
        source = torch.where(moves, start[:, None] + 1 + expanded, junk)
        self.cache.compact(source, torch.where(moves, start[:, None] + offset, junk))

    def advance(self, observation: Observation, previous: Tensor, root: Tensor, length: Tensor) -> None:
        """Renew the newest tokens and the positions of roots, (B,) each, by what became known."""
        if self.kernels is not None:
            self.kernels.advance(observation, previous, root, length)
        else:
            known = observation.tokens, observation.start, observation.count
            take_newest(*known, root, length, previous=previous)

    def draft_chain(self, pick: CompiledPick, previous: Tensor, root: Tensor, length: Tensor, depth: int) -> Proposal:
        """A chain behind each root (B,), which stands at `length` (B,) behind the token `previous` (B,), in one
        call."""
        assert self.kernels is not None and isinstance(self.cache, CpuKVCache)
        return self.kernels.draft_chain(pick, previous, root, length, depth, self.cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, W, D) -> (B, W, C), float32 or wider, or as the kernels of a GPU leave them."""
        own = None if self.passes is None else self.passes.logits(hidden)
        if own is not None:
            return own
        own = None if self.decoder is None else self.decoder.logits(hidden)
        return (self.parts.distribution(hidden) if own is None else own)[..., : self.common_size]


def positions_of(config: Any) -> int:
    """How many positions a model reads; without a limit of its own, as many as anyone could ask for."""
    return getattr(config, "max_position_embeddings", None) or sys.maxsize
