"""Tiny targets, made once, and draft heads that are often right."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.engine import Output, Request
from heads.core.contract import Drafter, Observation, SharedLayers
from heads.core.tree import Pick, Proposal, TreeShape
from heads.targets.frozen_target import FrozenTarget
from tests.support.small_targets import VOCAB, make_target, open_engine

Sequences = Sequence[Sequence[int]]


@cache
def target_of(name: str) -> FrozenTarget:
    """Return the target of a family, in float64 unless the name ends with another dtype, made once."""
    family, _, dtype = name.partition("-")
    changes: Any = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1) if family == "qwen3" else {}
    return make_target(family, getattr(torch, dtype or "float64"), **changes)


def decode_plainly(target: FrozenTarget, requests: Sequence[Request], **options: Any) -> list[Output]:
    return open_engine(target, None, **{"max_length": 192} | options).generate(requests)


def sequences(requests: Sequence[Request], outputs: Sequence[Output]) -> Sequences:
    return [[*request.prompt, *output.tokens] for request, output in zip(requests, outputs, strict=True)]


@dataclass
class Story:
    """State of a scripted head."""

    shape: TreeShape
    inner: Any
    histories: list[list[int]]
    """By row: the tokens in the target's cache, then the root."""


@dataclass
class ScriptedHead(Drafter):
    """Drafts known continuations, right with a given chance at each node, and checks what it observes.

    The rest of a draft is that of the head `inner`. Without one it is random: siblings often have the same token, and
    the tree has a random form within its shape's bounds.
    """

    target: FrozenTarget
    sequences: Sequences
    """Prompts with their true outputs."""
    right: float = 0.6
    inner: Any = None
    observations: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.aux_layer_ids = (1, 2) if self.inner is None else self.inner.aux_layer_ids

    def new_state(self, shared: SharedLayers, *, batch_size: int, shape: TreeShape, **sizes: Any) -> Story:
        inner = self.inner and self.inner.new_state(shared, batch_size=batch_size, shape=shape, **sizes)
        return Story(shape, inner, [[0] for _ in range(batch_size)])

    def reset_rows(self, state: Story, rows: Tensor) -> None:
        for row in rows.nonzero()[:, 0].tolist():
            state.histories[row] = []
        if self.inner is not None:
            self.inner.reset_rows(state.inner, rows)

    def extend(self, state: Story, observation: Observation) -> None:
        for row, history in enumerate(state.histories):
            start, count = int(observation.start[row]), int(observation.count[row])
            if count == 0:
                continue
            assert start == max(len(history) - 1, 0), "observations follow each other without a gap"
            tokens = observation.tokens[row, : count + 1].tolist()
            assert not history or history[-1] == tokens[0], "the first row observed is the root's"
            history[start:] = tokens
            self.observations += 1
            if self.observations % 5 == 1:  # some of them, since each costs a forward pass
                self.check_features(history[:-1], observation, row, start, count)
        if self.inner is not None:
            self.inner.extend(state.inner, observation)

    def check_features(self, tokens: list[int], observation: Observation, row: int, start: int, count: int) -> None:
        ids, position = torch.tensor([tokens]), torch.arange(len(tokens))[None]
        places: Any = dict(positions=position, key_positions=position, visible=position[:, None] <= position[..., None])
        true = self.target.features(ids, aux_layer_ids=self.aux_layer_ids, **places)
        wide = self.target.dtype == torch.float64 and not self.target.is_recurrent  # recurrences are in float32
        bound = 1e-6 if wide else 1e-2
        for name in ("aux_hidden_states", "hidden"):
            got, want = getattr(observation, name)[row, :count], getattr(true, name)[0, start : start + count]
            torch.testing.assert_close(got, want, atol=bound, rtol=bound)

    def propose(self, state: Story, pick: Pick) -> Proposal:
        if self.inner is not None:
            proposal: Proposal = self.inner.propose(state.inner, pick)
        else:
            trees = [self.draw_tree(state.shape, history[-1]) for history in state.histories]
            tokens, parents, depths = (torch.tensor(part) for part in zip(*trees, strict=True))
            proposal = Proposal(tokens, parents, depths, torch.zeros(tokens.shape))
        for row, history in enumerate(state.histories):
            self.correct(history, proposal.tokens[row], proposal.parents[row].tolist(), proposal.depths[row].tolist())
        return proposal

    def draw_tree(self, shape: TreeShape, root: int) -> tuple[list[int], list[int], list[int]]:
        tokens, parents, depths = [root], [0], [0]
        for j in range(1, shape.nodes):
            parent = j - 1 if shape.top_k == 1 else self.chance.choice([i for i in range(j) if depths[i] < shape.depth])
            siblings = [tokens[i] for i in range(1, j) if parents[i] == parent]
            tokens.append(self.chance.choice([*siblings, *self.chance.choices(range(VOCAB), k=len(siblings) + 1)]))
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tokens, parents, depths

    def correct(self, history: list[int], tokens: Tensor, parents: list[int], depths: list[int]) -> None:
        """Give nodes below a right one the true token, or with `right` 0 a wrong one."""
        n, true = len(history), [True]
        known: Sequence[int] = next((s for s in self.sequences if list(s[:n]) == history), [])
        for j in range(1, len(parents)):
            place = n - 1 + depths[j]
            ahead = known[place] if true[parents[j]] and place < len(known) else None
            if ahead is not None and self.chance.random() < self.right:
                tokens[j] = ahead
            elif ahead is not None and self.right == 0:
                tokens[j] = (ahead + 1) % VOCAB
            true.append(ahead is not None and int(tokens[j]) == ahead)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eleven prompts of different lengths, one of them longer than a prefill chunk of 16."""
    chooser = random.Random(5)
    return [[chooser.randrange(3, VOCAB) for _ in range(n)] for n in (1, 2, 5, 9, 16, 17, 21, 3, 7, 12, 30)]
