"""Interface of a cached forward pass. It has two forms: `heads.targets.native_decoder` and `heads.targets.hf_decoder`.

Letters: B rows, N tokens of a pass, S slots per row, D hidden, V vocabulary, M nodes of a path.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.kernels.choose_token import choose_in_tiles, logits_in_tiles
from heads.kernels.product import Product
from heads.kernels.slots import PrefillSlots, SlotMapping, round_up
from heads.kernels.triton_support import runs_kernels
from heads.targets.families import OutputHead
from heads.targets.frozen_target import Features, LanguageModel


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Sizes of a decoder's cache and of the passes over it."""

    batch_size: int
    capacity: int
    """Slots per row, a multiple of 64."""
    aux_layer_ids: tuple[int, ...] = ()
    nodes: int = 1
    """Maximum number of tokens per row in the passes of a round."""
    depth: int = 0
    """Number of positions beyond the capacity that a pass may use."""
    vocab_size: int | None = None
    """Number of tokens, the first of the vocabulary, for which logits are computed; None for all."""
    draft: bool = False
    """True for a draft. The target verifies its output, so bfloat16 weights suffice. The weights may be in training."""


class CachedDecoder(ABC):
    """Decoder of a target or a draft model, with the cache of one batch."""

    cache: Any
    reads_masks: bool = True
    """True if a pass needs the slots that each token sees as a mask; False if a kernel reads the tree's shape."""

    def __init__(self, model: LanguageModel, spec: CacheSpec) -> None:
        self.model = model
        self.spec = spec
        # One index more than there are slots, so that the tokens of a padded chunk that do not fit go to the last slot,
        # which no prompt fills.
        self.slot = torch.arange(spec.capacity + 1, device=model.device)  # (S + 1,)
        self.pads = model.device.type != "cpu" and not model.is_recurrent
        """True if prompts are padded to a few shapes, which kernels and graphs need. On a CPU padding only costs time,
        and it would pass through a recurrent state."""
        head = model.head
        lm_head = model.lm_head
        is_plain = type(head) is nn.Linear and head.bias is None
        is_plain = is_plain and isinstance(lm_head, OutputHead) and (lm_head.scale, lm_head.soft_cap) == (1, None)
        self.in_tiles = is_plain and runs_kernels(head.weight)
        """True if tokens are chosen from the output head's tiles, without its logits in memory."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        """Run one pass over new tokens (B, N). Attention sees the first `extent` slots. The tokens belong to all rows,
        or to rows `row`, `row` + 1, ... `prompt` is True if they are part of prompts."""

    def prefill(self, row: int, tokens: Tensor, start: int, reads: Tensor | None = None) -> Features:
        """Read one chunk of the prompts of rows `row`, `row` + 1, ...: tokens (R, N) at positions start ..

        reads (R,): False for a row without a prompt, which stays as it is; None if all have one.

        Tokens after a prompt's end are padding. Later tokens overwrite their keys before anything can see them.
        """
        R, count = tokens.shape
        starts = self.slot[start : start + 1].repeat(R)
        mapping = PrefillSlots(starts, None, self.slot, count)
        if reads is not None:  # no text fills a row's last slot
            mapping = PrefillSlots(starts, count * reads, self.slot[:-1], count)
        extent = min(round_up(start + count), self.spec.capacity)
        return self.forward(tokens, mapping, extent=extent, row=row, prompt=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V), float32 or wider, of hidden states (..., D) after the final norm."""
        weight = self.model.head.weight[: self.spec.vocab_size]
        Product.bytes_read += weight.nbytes
        if self.in_tiles:
            return logits_in_tiles(hidden.flatten(0, -2), weight, self.rows).view(*hidden.shape[:-1], -1)
        return self.model.lm_head(hidden)[..., : self.spec.vocab_size]

    def choose(self, hidden: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, *, noisy: bool) -> Tensor:
        """Return the choices (B, N), made in the output head's own pass (`in_tiles`), for rows without filters and
        penalties: hidden (B, N, D), positions (B, N) of the tokens to choose, temperature and seed (B,). `noisy`: any
        row samples."""
        given = hidden.flatten(0, 1), self.model.head.weight, temperature, seed, positions.flatten()
        return choose_in_tiles(*given, noisy=noisy, tile=self.rows).view(positions.shape)

    @property
    def rows(self) -> int:
        """Number of rows of a round's products. Passes whose results are compared have as many."""
        return self.spec.batch_size * self.spec.nodes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        return self.cache.bytes // (self.spec.batch_size * self.spec.capacity)  # type: ignore[no-any-return]

    def compact(self, start: Tensor, path: Tensor) -> None:
        """Move the slots at start (B,) + path (B, M) to the slots start, start + 1, ..., in order."""
        self.cache.compact(start[:, None] + path, start[:, None] + self.slot[: path.shape[1]])
