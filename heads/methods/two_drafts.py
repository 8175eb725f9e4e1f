"""Two drafts in one: prompt lookup where the text repeats itself, a head elsewhere.

A row drafts by lookup in the rounds in which the last M tokens, or more, occurred earlier in its text, and by the head
in all others. The head reads every token that is accepted, whichever drafted it, so that it can draft in any round.
Both drafts have the length asked for. Where one text is decoded on a CPU, a lookup's draft is longer after a longer
match, as in SuffixDecoding (arXiv 2411.04975): the host may look at the match, and no other row pays for the length.

Letters: B batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heads.core.contract import Drafter, Observation, SharedLayers
from heads.core.tree import Pick, Proposal, TreeShape, parse_shape
from heads.methods.untrained import Lookup, LookupState

LONG = 8
"""Length up to which a longer match counts for more than a later one. Measured for SmolLM2-135M: rounds after the
longest match emit more tokens than those after the latest (3% over all rounds); above 8 tokens nothing is gained."""


COPIES = 2
"""Number of tokens that a lookup drafts for each token of its match, if that is more than asked for. Measured for
SmolLM2-135M: eval/results/README.md, Two drafts in one."""


@dataclass
class LookupFirstState:
    lookup: LookupState
    head: object
    running: Tensor  # (B,) bool: rows with a text that is not done
    nodes: int
    """Number of nodes of the draft asked for. A lookup's may have more."""
    unread: bool = True
    """False if the head drafted every row of the round that is being verified."""


class LookupFirst(Drafter):
    """Drafter of chains: a lookup's draft after a match of `match` tokens or more, else a head's."""

    skips = True

    def __init__(self, match: int, head: Drafter, device: torch.device | str = "cpu") -> None:
        """`match`: number M of tokens of the shortest match after which the lookup drafts."""
        self.match = match
        self.head = head
        self.lookup = Lookup(max(match, LONG), device)
        self.aux_layer_ids = head.aux_layer_ids
        self.origin = head.origin

    def after(self, match: int) -> "LookupFirst":
        """Return this draft with another length of the shortest match."""
        return LookupFirst(match, self.head, self.lookup.device)

    @property
    def positions(self) -> int | None:
        return self.head.positions

    def check_draft(self, shape: TreeShape) -> None:
        self.lookup.check_draft(shape)
        self.head.check_draft(shape)

    def longest(self, shape: TreeShape, batch_size: int) -> TreeShape:
        varies = self.skips and batch_size == 1 and torch.device(self.lookup.device).type == "cpu"
        return max(shape, parse_shape(f"chain:{COPIES * LONG}"), key=lambda each: each.depth) if varies else shape

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> LookupFirstState:
        sizes: dict[str, Any] = {"batch_size": batch_size, "capacity": capacity}
        lookup = self.lookup.new_state(shared, shape=self.longest(shape, batch_size), **sizes)
        head = self.head.new_state(shared, shape=shape, **sizes)
        return LookupFirstState(lookup, head, torch.zeros_like(lookup.length, dtype=torch.bool), shape.nodes)

    def reset_rows(self, state: LookupFirstState, rows: Tensor) -> None:
        self.lookup.reset_rows(state.lookup, rows)
        self.head.reset_rows(state.head, rows)
        state.running.logical_or_(rows)

    def extend(self, state: LookupFirstState, observation: Observation) -> None:
        self.lookup.extend(state.lookup, observation)
        self.head.extend(state.head, replace(observation, unread=state.unread))
        if observation.nodes is not None:  # a round, and no prompt of other rows
            state.running.copy_(observation.count > 0)

    def propose(self, state: LookupFirstState, pick: Pick) -> Proposal:
        copied, length = self.lookup.find(state.lookup)
        matched = length >= self.match
        # On a GPU both drafts are in the round's graph. On a CPU the host may look at the matches, and leave the head's
        # passes out if no row needs them.
        state.unread = True
        if self.skips and matched.device.type == "cpu":
            state.unread = bool((matched & state.running).any())
            if bool((matched | ~state.running).all()):
                longest = int(length) if len(length) == 1 else 0
                return copied.first(max(state.nodes, 1 + COPIES * longest))
        drawn: Proposal = self.head.propose(state.head, pick)
        tokens = torch.where(matched[:, None], copied.tokens[:, : state.nodes], drawn.tokens)
        return replace(drawn, tokens=tokens, copied=matched)
