"""Draft blocks in a batch of packed rows: where they begin, what they see, and which tokens they predict.

A block is one round of drafting: the root, which is the true token at the block's anchor, and masks after it. Each step
draws new anchors with the seed that it gave to torch. So they are the same in `counts` and in `loss`, and in a resumed
run.

Letters: B batch, T tokens, N blocks of a row, R rows of a block, K depth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.labels import supervised
from heads.target.masks import document_starts


@dataclass(frozen=True, eq=False)
class Blocks:
    """N blocks in each row of a batch, in ascending order."""

    anchors: Tensor  # (B, N) int64, the slot of each root
    live: Tensor  # (B, N) bool; False for a block without an anchor, in the last slot: it sees and predicts nothing

    def starts(self, documents: Tensor) -> Tensor:
        """Return (B, N) int64: the first slot that each block sees, where its root's document starts. documents (B,
        T)."""
        return torch.where(self.live, document_starts(documents).gather(1, self.anchors), self.anchors)

    def labels(self, loss_mask: Tensor, documents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the slots (B, N, K) int64 of the tokens that each block predicts, clamped to the row, and valid (B, N,
        K) bool, True for labels up to the first token that is not one. All labels are in the root's document."""
        B, N = self.anchors.shape
        slots = self.anchors[..., None] + 1 + torch.arange(depth, device=self.anchors.device)  # (B, N, K)
        inside = slots.clamp_max(loss_mask.shape[1] - 1)
        is_label = loss_mask.gather(1, inside.flatten(1)).view(B, N, depth)
        document = documents.gather(1, inside.flatten(1)).view(B, N, depth)
        own = document == documents.gather(1, self.anchors)[..., None]
        valid = is_label & own & (slots == inside) & self.live[..., None]
        return inside, valid.cumprod(2).bool()


def draw_blocks(loss_mask: Tensor, documents: Tensor, count: int) -> Blocks:
    """Return at most `count` blocks for each row (B, T), with roots drawn from the tokens before a label.

    The first token of a document is never a root, because drafting begins after a prompt.
    """
    B, T = loss_mask.shape
    may = supervised(loss_mask, documents, 2, pad=True).roll(-1, dims=1)
    # Drawn on the CPU for every device, because the labels are counted there before the batch is moved. float64 avoids
    # ties.
    draw = torch.Generator().manual_seed(torch.initial_seed())
    lots = torch.rand(B, T, generator=draw, dtype=torch.float64).to(may.device)
    drawn = lots.masked_fill(~may, -1).topk(min(count, T), dim=1)
    anchors = drawn.indices.masked_fill(drawn.values < 0, T - 1).sort(dim=1).values
    return Blocks(anchors, anchors < T - 1)  # the last token has no next token, so it is never a root


def all_blocks(documents: Tensor) -> Blocks:
    """Return a block at every token of each row (B, T) except the first."""
    anchors = torch.arange(1, documents.shape[1], device=documents.device).expand(len(documents), -1)
    return Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool))
