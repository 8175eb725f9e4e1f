"""A few prompts decoded with a few drafts, phase by phase: how deep drafts are accepted, and what a round's parts cost.

One wide tree shows the acceptance of every smaller one of its width: a tree of fewer nodes or levels keeps the
likeliest of the same candidates, so it would have held a node of the accepted path exactly if that node's rank among
the candidates of its levels was good enough. The rounds of one run thus give the whole curve.

Letters: B batch, N nodes, K depth, R rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.benchmark.measure import line_up, profile
from eval.benchmark.metrics import Trace, acceptance_by_depth
from eval.benchmark.prompts import Prompt
from eval.benchmark.settings import BenchSettings
from eval.runtime.sampling import check_rule
from heads.backends.base import Backend
from heads.backends.selection import select_backend
from heads.base import Drafter, Observation, Pick, SharedLayers
from heads.errors import UserError
from heads.growth import DEPTH_PENALTY
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, TreeShape

NEVER = 1 << 30
"""The rank of a node that was not accepted: no tree holds it."""


@dataclass(frozen=True)
class Calibration:
    """One draft, tried."""

    shape: TreeShape
    draft: float
    """Seconds of a round's draft; the same of its verification, and of what is left."""
    verify: float
    rest: float
    plain: float
    """Seconds of a plain step in the same minute."""
    ranks: Tensor  # (R, K, K) int64: [r, d - 1, k - 1] is the rank of the accepted node at depth d among k levels

    def tokens(self, depth: int, nodes: int) -> float:
        """Tokens a round would have emitted with so many levels and nodes, the bonus token included."""
        held = self.ranks[:, :depth, depth - 1] < nodes  # (R, depth)
        return 1.0 + float(held.sum(dim=1).double().mean())

    def alpha(self) -> list[float | None]:
        """Acceptance by depth, of the whole draft."""
        K = self.shape.depth
        accepted = (self.ranks[:, :, K - 1] < NEVER).sum(dim=1).tolist()
        return acceptance_by_depth([Trace(0, tuple(accepted), tuple(min(n + 1, K) for n in accepted))], K)


def calibrate(
    target: FrozenTarget,
    head: Drafter,
    shapes: Sequence[TreeShape],
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
) -> list[Calibration]:
    """Decode `prompts` once with each shape, in turns with plain decoding."""
    recorded = [Recorded(head) for _ in shapes]
    comparison = line_up(target, list(zip(recorded, shapes, strict=True)), prompts, temperature, settings)
    for head in recorded:
        head.outcomes.clear()  # of the warm-up
    phases_of = profile(comparison, len(prompts))
    if not all(head.outcomes for head in recorded):
        raise UserError(
            f"--tree auto: every output of the {len(prompts)} prompts tried ended with its first token, which the "
            "prefill gives; name a tree, use other prompts, or allow more new tokens"
        )
    return [
        Calibration(
            shape,
            phases["draft"],
            phases["verify"],
            phases["accept"] + phases["commit"],
            phases["plain"],
            torch.cat([ranks(outcome, shape.depth) for outcome in head.outcomes]),
        )
        for shape, phases, head in zip(shapes, phases_of, recorded, strict=True)
    ]


@dataclass(frozen=True)
class Outcome:
    """Proposal of one round, and the path that was accepted."""

    scores: Tensor  # (B, N)
    depths: Tensor  # (B, N)
    path: Tensor  # (B, K + 1), nodes, the root first
    count: Tensor  # (B,), how many of them are accepted, the root included; 0 for a row that takes no part


class Recorded(Drafter):
    """A drafter, and the outcome of its proposals. They are kept as they are: counting waits until the clocks stand."""

    def __init__(self, head: Drafter) -> None:
        self.head, self.aux_layer_ids = head, head.aux_layer_ids
        self.proposal: Proposal | None = None
        self.outcomes: list[Outcome] = []

    def new_state(
        self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape, backend: Backend
    ) -> Any:
        return self.head.new_state(shared, batch_size=batch_size, capacity=capacity, shape=shape, backend=backend)

    def reset_rows(self, state: Any, rows: Tensor) -> None:
        self.head.reset_rows(state, rows)

    def propose(self, state: Any, pick: Pick) -> Proposal:
        self.proposal = self.head.propose(state, pick)
        return self.proposal

    def extend(self, state: Any, observation: Observation) -> None:
        if observation.nodes is not None:
            assert self.proposal is not None
            kept = (self.proposal.scores, self.proposal.depths, observation.nodes, observation.count)
            self.outcomes.append(Outcome(*(tensor.clone() for tensor in kept)))
        self.head.extend(state, observation)


def ranks(outcome: Outcome, depth: int) -> Tensor:
    """(R, K, K) int64, `Calibration.ranks` of the rows that took part."""
    rows = outcome.count > 0
    depths, path, count = outcome.depths[rows], outcome.path[rows], outcome.count[rows]
    key = outcome.scores[rows].float() - DEPTH_PENALTY * depths
    key[:, 0] = torch.inf
    level = torch.arange(1, depth + 1, device=key.device)
    own = key.gather(1, path[:, 1:])  # (R, K)
    better = key[:, None] > own[..., None]  # (R, K, N)
    within = depths[:, None] <= level[:, None]  # (R, K levels, N)
    rank = (better[:, :, None] & within[:, None]).sum(dim=3)  # (R, K, K)
    accepted = level[None, :, None] < count[:, None, None]
    return torch.where(accepted & (level[:, None] <= level), rank, NEVER).cpu()


def can_draft(head: Drafter, target: FrozenTarget, shape: TreeShape, rule: str) -> bool:
    """Return True if a head fills trees of this shape and the rule judges them."""
    try:
        check_rule(rule, shape)
        head.new_state(target.shared, batch_size=1, capacity=shape.nodes, shape=shape, backend=select_backend(target))
    except UserError:
        return False
    return True
