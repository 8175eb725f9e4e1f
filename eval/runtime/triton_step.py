"""A target's passes by kernels, on a GPU: prompts, trees under test, and what the target chooses.

Letters: B rows, N tokens of a step, R = B * N, S slots a row, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from eval.runtime.distribution import RowSampling
from heads.backends.torch.decoder import NativeDecoder
from heads.backends.triton import choose
from heads.backends.triton.attention import ancestor_words
from heads.backends.triton.decoder import DTYPES, DecoderPass, Tree
from heads.backends.triton.runtime import runs_kernels, why_not
from heads.errors import warn_once
from heads.target.families import OutputHead
from heads.target.frozen import Features, FrozenTarget


def kernels_fit(target: FrozenTarget) -> bool:
    """Whether kernels can run where the target lives, on numbers of its kind; a GPU without them is told of."""
    reason = why_no_kernels(target.dtype, target.device) if target.device.type == "cuda" else None
    if reason is not None:
        warn_once(f"{target.name}: decoded without kernels of its own, slower: {reason}")
    return reason is None and runs_kernels(target.head.weight) and target.dtype in DTYPES


def why_no_kernels(dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps a target on a GPU from the kernels, or None."""
    reason = f"kernels take no {str(dtype).removeprefix('torch.')}"
    return why_not(device) or (None if dtype in DTYPES else reason)


class TritonTargetStep(DecoderPass):
    """The passes of one batch over one cache."""

    def __init__(
        self,
        target: FrozenTarget,
        decoder: NativeDecoder,
        *,
        batch_size: int,
        capacity: int,
        aux_layer_ids: Sequence[int],
        nodes: int,
        strict: bool,
    ) -> None:
        """`nodes`: tokens a row of a verify step, to which shorter ones are padded; `strict`: trees bit-identical to
        plain decoding."""
        super().__init__(
            decoder, batch_size=batch_size, capacity=capacity, positions=capacity, rows=[batch_size * nodes]
        )
        self.target, self.aux_layer_ids, self.nodes, self.strict = target, aux_layer_ids, nodes, strict
        lm_head = target.shared.lm_head
        plain = isinstance(lm_head, OutputHead) and lm_head.scale == 1 and lm_head.soft_cap is None
        self.reads_out = plain and getattr(target.head, "bias", None) is None and type(target.head) is torch.nn.Linear
        """Whether the output head is a product, so that the choice comes from its tiles."""
        self.rows = batch_size * nodes

    def prefill(self, row: int, tokens: Tensor, positions: Tensor) -> Features:
        """One row's prompt tokens (1, C) at positions (C,), ascending by one; padding past the capacity stays in the
        last slot."""
        C = tokens.shape[1]
        depths = torch.arange(C, device=tokens.device)[None]
        words, _ = ancestor_words((depths - 1).clamp_min_(0), depths, C - 1)
        slots, cos_sin = positions + row * self.cache.capacity, self.cos_sin(positions)
        tree = Tree(positions[:1], C, words, depths, paths=None, slots=slots, cos_sin=cos_sin)
        return self.features(tokens, tree, self.aux_layer_ids, row)

    def verify(self, tokens: Tensor, parents: Tensor, depths: Tensor, length: Tensor, depth: int) -> Features:
        """Trees of at most `depth` levels, (B, N) each, behind `length` (B,) tokens.

        Products and tiles of other numbers of rows round differently. The passes over smaller trees therefore have as
        many rows as those over the largest: what an adaptive draft decodes cannot depend on which candidate the clock
        prefers.
        """
        given = tokens.shape[1]
        if given < self.nodes:  # with more nodes at the root's position, which no other sees
            tokens, parents, depths = (pad(x, (0, self.nodes - given)) for x in (tokens, parents, depths))
        N = tokens.shape[1]
        words, paths = ancestor_words(parents, depths, depth)
        slots = (length[:, None] + self.slot[:N] + self.cache.row_starts).flatten()
        cos_sin = self.cos_sin((length[:, None] + depths).flatten())
        tree = Tree(length, N, words, depths, paths=paths if self.strict else None, slots=slots, cos_sin=cos_sin)
        made = self.features(tokens, tree, self.aux_layer_ids)
        return made if given == N else Features(made.aux_hidden_states[:, :given], made.hidden[:, :given])

    def logits(self, hidden: Tensor) -> Tensor | None:
        """(..., D) -> (..., V) float32: what `choose` compares; None where the output head is more than a product."""
        if not self.reads_out:
            return None
        made: Tensor = choose.logits(hidden.flatten(0, -2), self.target.lm_head_weight, self.rows)
        return made.view(*hidden.shape[:-1], -1)

    def choose(self, hidden: Tensor, positions: Tensor, sampling: RowSampling) -> Tensor | None:
        """The chosen tokens (B, N) after hidden states (B, N, D); None where the output head is more than a product.

        Rows with filters need the whole distribution; what the others choose must not depend on there being such rows.
        """
        if not self.reads_out:
            return None
        B, N, _ = hidden.shape
        by_tiles = None
        if not sampling.filtered or B > 1:
            by_tiles = choose.choose(
                hidden.flatten(0, 1), self.target.lm_head_weight, sampling.temperature, sampling.seed,
                positions.flatten(), noisy=sampling.random, tile=self.rows,
            ).view(B, N)  # fmt: skip
            if not sampling.filtered:
                return by_tiles
        logits = self.logits(hidden)
        assert logits is not None
        by_distribution = sampling.choose(logits, positions)
        return (
            by_distribution if by_tiles is None else torch.where(sampling.filters()[:, None], by_distribution, by_tiles)
        )
