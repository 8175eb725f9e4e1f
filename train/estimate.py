"""tau by the training step alone: what the runtime will accept follows from what the head foresees in known text.

A greedy chain of K guesses rooted at x_r is accepted as far as its guesses are the tokens that the target goes on with.
So the target's own greedy outputs, put through the training step once, give the outcome of every round that could begin
anywhere in them; walking from root to root gives the rounds that do begin. Where this and the runtime disagree,
training and drafting are not the same function.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.base import DraftHead
from heads.target.frozen import FrozenTarget
from train.data.features import make_batch
from train.data.packing import Rows, empty_rows


@torch.no_grad()
def estimate_tau(
    target: FrozenTarget,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    depth: int,
    *,
    dtype: torch.dtype,
    rows: int = 8,
) -> float:
    """Tokens per round of greedy chains of `depth`, over the target's greedy outputs (prefill's token included).

    `rows` documents go through the head at once, in `dtype`. NaN if no output has a second token.
    """
    emitted = rounds = 0
    for start in range(0, len(prompts), rows):
        part = slice(start, start + rows)
        texts = [[*prompt, *output] for prompt, output in zip(prompts[part], outputs[part], strict=True)]
        hits = foreseen(target, head, texts, depth, dtype)
        for text, prompt, run in zip(texts, prompts[part], hits, strict=True):
            emitted += len(text) - len(prompt) - 1
            rounds += len(walk(run.tolist(), root=len(prompt), end=len(text)))
    return emitted / rounds if rounds else float("nan")


def foreseen(
    target: FrozenTarget, head: DraftHead, texts: Sequence[Sequence[int]], depth: int, dtype: torch.dtype
) -> Tensor:
    """(B, T) int64: for a root at each position, how many guesses of a chain below it are the text's own tokens."""
    hits = head.foresees(
        make_batch(target, text_rows(texts), head.aux_layer_ids, dtype), depth
    )  # (depth, B, T), by slot
    return hits.long().cumprod(0).sum(0).roll(1, dims=1).cpu()  # the chain of slot t has its root at t + 1


def text_rows(texts: Sequence[Sequence[int]]) -> Rows:
    """One text a row, padded, without labels."""
    rows = empty_rows(len(texts), max(map(len, texts)))
    for n, text in enumerate(texts):
        T = len(text)
        rows.tokens[n, :T], rows.positions[n, :T] = torch.tensor(text), torch.arange(T)
        rows.documents[n, :T] = 0
    return rows


def walk(accepted: Sequence[int], *, root: int, end: int) -> list[int]:
    """The tokens that each round emits, from `root` on, in a text of `end` tokens of which the root is decided."""
    emitted = []
    while root < end - 1:
        emitted.append(min(accepted[root] + 1, end - 1 - root))
        root += emitted[-1]
    return emitted
