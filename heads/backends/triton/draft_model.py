"""A draft model by kernels, on a GPU: its native decoder's passes over true tokens, and over the levels of its trees.

Letters: B batch, W tokens of each, R = B * W, D hidden, V vocabulary, C tokens that target and draft share, S slots of
the cache.
"""

import torch
from torch import Tensor

from heads.backends.slot_mapping import Drafted, Observed
from heads.backends.torch.decoder import NativeDecoder
from heads.backends.triton.attention import draft_split
from heads.backends.triton.decoder import DecoderPass, Tree
from heads.backends.triton.gemm import MOST_ROWS
from heads.backends.triton.inputs import stand
from heads.tree import TreeShape, level_widths, scratch_slots


class DraftPass(DecoderPass):
    """The passes of one batch over one cache."""

    def __init__(
        self, decoder: NativeDecoder, *, batch_size: int, capacity: int, shape: TreeShape, common_size: int
    ) -> None:
        """For trees of `shape` and for shorter chains; `common_size`: C."""
        output = decoder.output
        self.lm_head_weight = None if output is None else output.weight[:common_size]  # (C, D)
        self.bias = None if output is None or output.bias is None else output.bias[:common_size]
        rows = {batch_size * width for width in (1, 2, *level_widths(shape))}  # a round begins with two tokens
        super().__init__(
            decoder,
            batch_size=batch_size,
            capacity=capacity,
            positions=capacity + shape.depth,
            rows=[M for M in sorted(rows) if M <= MOST_ROWS],
        )
        self.behind = max(shape.depth, scratch_slots(shape))

    def weights(self) -> list[Tensor]:
        """Those of the output head too."""
        return [*super().weights(), *([] if self.lm_head_weight is None else [self.lm_head_weight])]

    def read(self, tokens: Tensor, places: Observed | Drafted) -> Tensor:
        """One step: tokens (B, W) at their places -> states after the final norm (B, W, D)."""
        B, W = tokens.shape
        at = stand(places, behind=self.behind)
        depths, paths = None, None
        if isinstance(places, Observed):
            length, behind = places.start, W
            if self.window:
                depths = self.slot[:W].repeat(B, 1)
        else:
            length, behind = places.length, self.behind
            if self.window:  # which is asked of positions, and slots say them of a node's own path only
                paths, behind = places.paths.contiguous(), places.paths.shape[2]
                depths = torch.full_like(paths[..., 0], behind - 1)
        cos_sin = self.cos_sin(at.positions)
        tree = Tree(length, behind, at.words, depths, paths, at.slots, cos_sin, split=draft_split(len(self.slot)))
        return self.features(tokens, tree).hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        """(B, W, D) -> (B, W, C); None where the output head is more than a product."""
        if self.lm_head_weight is None:
            return None
        return self.products(hidden.flatten(0, 1), self.lm_head_weight, self.bias).view(*hidden.shape[:2], -1)
