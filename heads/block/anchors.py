"""Draft blocks in a batch of packed rows: where they begin, what they may see, and which tokens they are to predict.

A block is one round of drafting: the root, which is the true token at the block's anchor, and masks behind it. Anchors
are drawn anew in every step, by the seed that the step gave to torch: the same in `counts` and in `loss`, and in a run
that was resumed.

Letters: B batch, T tokens, N blocks of a row, R rows of a block, K depth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.labels import supervised
from heads.target.packed import document_starts


@dataclass(frozen=True, eq=False)
class Blocks:
    """N blocks in each row of a batch, in ascending order."""

    anchors: Tensor  # (B, N) int64, the slot of each root
    live: Tensor  # (B, N) bool; False for a block without an anchor: in the last slot, it sees and predicts nothing

    def starts(self, documents: Tensor) -> Tensor:
        """(B, N) int64: the first slot that each block sees, its root's document's, documents (B, T)."""
        return torch.where(self.live, document_starts(documents).gather(1, self.anchors), self.anchors)

    def labels(self, loss_mask: Tensor, documents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The slots of the tokens that each block predicts, (B, N, K) int64, clamped to the row, and (B, N, K) bool:
        True for labels, up to the first token that is none. No label lies in another document than the root."""
        B, N = self.anchors.shape
        slots = self.anchors[..., None] + 1 + torch.arange(depth, device=self.anchors.device)  # (B, N, K)
        inside = slots.clamp_max(loss_mask.shape[1] - 1)
        is_label = loss_mask.gather(1, inside.flatten(1)).view(B, N, depth)
        document = documents.gather(1, inside.flatten(1)).view(B, N, depth)
        own = document == documents.gather(1, self.anchors)[..., None]
        valid = is_label & own & (slots == inside) & self.live[..., None]
        return inside, valid.cumprod(2).bool()


def draw_blocks(loss_mask: Tensor, documents: Tensor, count: int) -> Blocks:
    """At most `count` blocks of each row (B, T), drawn among the tokens whose next one is a label of their document.

    The first token of a document is never a root: drafting begins behind a prompt.
    """
    B, T = loss_mask.shape
    may = supervised(loss_mask, documents, 2, pad=True).roll(-1, dims=1)
    # On the CPU, whatever the device: the labels are counted there before the batch is on it. Wide, so that none tie.
    draw = torch.Generator().manual_seed(torch.initial_seed())
    lots = torch.rand(B, T, generator=draw, dtype=torch.float64).to(may.device)
    drawn = lots.masked_fill(~may, -1).topk(min(count, T), dim=1)
    anchors = drawn.indices.masked_fill(drawn.values < 0, T - 1).sort(dim=1).values
    return Blocks(anchors, anchors < T - 1)  # the last token has no next one, so that no root stands there


def all_blocks(documents: Tensor) -> Blocks:
    """A block at every token of each row (B, T) but the first."""
    anchors = torch.arange(1, documents.shape[1], device=documents.device).expand(len(documents), -1)
    return Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool))
