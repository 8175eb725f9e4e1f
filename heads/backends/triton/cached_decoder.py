"""A native decoder by kernels with the cache of one batch: prompts, trees under test, levels of a draft's trees.

Letters: B rows, N tokens of a step, R = B * N, S slots a row, D hidden, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heads.backends.base import CachedDecoder
from heads.backends.slot_mapping import CacheSpec, Drafted, SlotMapping, Verified
from heads.backends.torch.architectures import native_decoder
from heads.backends.torch.decoder import NativeDecoder
from heads.backends.torch.linear import Product
from heads.backends.triton import choose
from heads.backends.triton.attention import ancestor_words
from heads.backends.triton.decoder import DTYPES, DecoderPass, Tree
from heads.backends.triton.gemm import MOST_ROWS
from heads.backends.triton.inputs import stand
from heads.target.families import OutputHead
from heads.target.frozen import Features, LanguageModel


class TritonDecoder(CachedDecoder):
    """The passes of one batch over one cache; no mask is ever made."""

    native: NativeDecoder
    reads_masks = False

    @classmethod
    def of(cls, model: LanguageModel, spec: CacheSpec) -> "TritonDecoder | None":
        """Return the decoder of a model, or None where the kernels have none for its architecture or its numbers."""
        native = native_decoder(model, draft=spec.draft)
        return None if native is None or model.dtype not in DTYPES else cls(model, spec, native)

    def __init__(self, model: LanguageModel, spec: CacheSpec, native: NativeDecoder) -> None:
        super().__init__(model, spec)
        self.native = native
        output, lm_head = native.output, model.lm_head
        plain = isinstance(lm_head, OutputHead) and lm_head.scale == 1 and lm_head.soft_cap is None
        self.is_product = plain and type(model.head) is nn.Linear and (spec.draft or model.head.bias is None)
        """True if the output head is a product, so that the target's choice comes from its tiles."""
        self.nodes = max(spec.widths, default=0)
        """Of a verify step, to which smaller trees are padded."""
        self.rows = spec.batch_size * self.nodes
        others = [output.weight[: spec.vocab_size]] if spec.draft and output is not None else []
        rows = sorted({spec.batch_size * width for width in spec.widths})
        self.passes = DecoderPass(
            native,
            batch_size=spec.batch_size,
            capacity=spec.capacity,
            positions=spec.capacity + spec.depth,
            rows=[M for M in rows if M <= MOST_ROWS] if spec.draft else rows,
            others=others,
        )
        self.cache = self.passes.cache

    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        given = tokens.shape[1]
        if isinstance(mapping, Verified) and given < self.nodes:
            tokens, mapping = self.padded(tokens, mapping)
        made = self.passes.features(tokens, self.tree(mapping, row), self.spec.aux_layer_ids, row)
        if tokens.shape[1] == given:
            return made
        return Features(made.aux_hidden_states[:, :given], made.hidden[:, :given])

    def padded(self, tokens: Tensor, mapping: Verified) -> tuple[Tensor, Verified]:
        """Trees (B, N) with as many nodes as the largest, more of them at the root's position, which no other sees.

        Products and tiles of other numbers of rows round differently. The passes over smaller trees therefore have as
        many rows as those over the largest: what an adaptive draft decodes cannot depend on which candidate the clock
        prefers.
        """
        missing = (0, self.nodes - tokens.shape[1])
        parents, depths = pad(mapping.parents, missing), pad(mapping.depths, missing)
        return pad(tokens, missing), replace(mapping, parents=parents, depths=depths, above=None)

    def tree(self, mapping: SlotMapping, row: int | None) -> Tree:
        """Return the slots that each token sees, and its own."""
        counters = self.passes.counters
        if isinstance(mapping, Verified):
            words, strict = ancestor_words(mapping.parents, mapping.depths, mapping.levels)
            slots = (mapping.slots() + self.cache.row_starts).flatten()
            cos_sin = self.passes.cos_sin((mapping.length[:, None] + mapping.depths).flatten())
            N = mapping.parents.shape[1]
            return Tree(
                mapping.length, N, words, mapping.depths,
                paths=strict if self.spec.strict else None, slots=slots, cos_sin=cos_sin, counters=counters,
            )  # fmt: skip
        if row is not None:  # a target's prompt
            positions, C = mapping.positions[0], mapping.positions.shape[1]
            levels = torch.arange(C, device=positions.device)[None]
            words, _ = ancestor_words((levels - 1).clamp_min(0), levels, C - 1)
            slots, cos_sin = positions + row * self.spec.capacity, self.passes.cos_sin(positions)
            return Tree(positions[:1], C, words, levels, None, slots, cos_sin, counters)
        at, window = stand(mapping, behind=self.spec.scratch), self.passes.window
        depths: Tensor | None = None
        paths: Tensor | None = None
        if isinstance(mapping, Drafted):
            length, behind, words = mapping.length, self.spec.scratch, at.words
            if window:  # which is asked of positions, and slots say them of a node's own path only
                paths, behind = mapping.paths.contiguous(), mapping.paths.shape[2]
                depths = torch.full_like(paths[..., 0], behind - 1)
        else:
            length, behind, words = mapping.start, mapping.number, at.words
            if window:
                depths = self.slot[: mapping.number].repeat(len(mapping.start), 1)
        cos_sin = self.passes.cos_sin(at.positions)
        return Tree(length, behind, words, depths, paths, at.slots, cos_sin, counters)

    def logits(self, hidden: Tensor) -> Tensor:
        output, rows = self.native.output, hidden.flatten(0, -2)
        if self.spec.draft and output is not None:
            bias = None if output.bias is None else output.bias[: self.spec.vocab_size]
            made = self.passes.products(rows, output.weight[: self.spec.vocab_size], bias)
        elif not self.spec.draft and self.is_product:
            made = choose.logits(rows, self.model.head.weight, self.rows)
        else:
            return super().logits(hidden)
        return made.view(*hidden.shape[:-1], -1)

    def choose(
        self, hidden: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, *, random: bool
    ) -> Tensor | None:
        if not self.is_product:
            return None
        chosen: Tensor = choose.choose(
            hidden.flatten(0, 1), self.model.head.weight, temperature, seed, positions.flatten(), noisy=random,
            tile=self.rows,
        )  # fmt: skip
        return chosen.view(positions.shape)

    def multiply(self, x: Tensor, product: Product) -> Tensor:
        return self.passes.multiply(x, product)

    def compact(self, start: Tensor, path: Tensor, accepted: Tensor) -> None:
        self.passes.compact(start, path, accepted)
