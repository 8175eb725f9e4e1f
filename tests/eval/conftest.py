"""A loaded tiny target, and a head of counted word pairs that drafts some of its text rightly."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from eval.prompts import Prompt
from eval.runtime.engine import Engine, Request
from heads.base import Batch, HeadLoss, Observation, Pick, TargetEnds
from heads.growth import grow
from heads.registry import HEADS
from heads.target import FrozenTarget, load_target, load_tokenizer
from heads.tree import Proposal, TreeShape


@dataclass(frozen=True)
class PairConfig:
    vocab_size: int = 128


@dataclass
class PairState:
    shape: TreeShape
    root: Tensor  # (B,)
    position: Tensor  # (B,), the root's


class PairHead(nn.Module):
    """Drafts the token that followed most often; it knows nothing of the target but the counts it is given."""

    taps: tuple[int, ...] = ()
    depth_weights = (1.0,)

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Parameter(torch.zeros(config.vocab_size, config.vocab_size), requires_grad=False)

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        for text in texts:
            for token, following in pairwise(text):
                self.table[token, following] += 1.0

    def counts(self, loss_mask: Tensor, documents: Tensor) -> Tensor:
        raise AssertionError("never trained")

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        raise AssertionError("never trained")

    def new_state(self, ends: TargetEnds, *, batch_size: int, capacity: int, shape: TreeShape) -> PairState:
        return PairState(shape, torch.zeros(batch_size, dtype=torch.int64), torch.zeros(batch_size, dtype=torch.int64))

    def reset_rows(self, state: PairState, rows: Tensor) -> None:
        pass

    def observe(self, state: PairState, observation: Observation) -> None:
        newest = observation.tokens.gather(1, observation.count[:, None])[:, 0]
        known = observation.count > 0
        state.root.copy_(torch.where(known, newest, state.root))
        state.position.copy_(torch.where(known, observation.start + observation.count, state.position))

    def propose(self, state: PairState, pick: Pick) -> Proposal:
        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            return self.table[tokens]

        return grow(state.shape, state.root, state.position, self.table[state.root][:, None], pick, expand, None)


@pytest.fixture(autouse=True, scope="module")
def known_kind() -> Iterator[None]:
    """Reports find the head of word pairs where they find all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HEADS, "pairs", PairHead)
        yield


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir))


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_target_dir: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_target_dir))


@pytest.fixture(scope="session")
def tiny_prompts(tiny_tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    texts = [
        "def f(x):\n    return",
        "import os",
        "class A:\n    pass",
        "x = [1, 2",
        "for i in range(3):",
        "while True:",
    ]
    return [
        Prompt(str(i), "first" if i < 4 else "second", "code", text, tuple(tiny_tokenizer(text)["input_ids"]))
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="session")
def pair_head(tiny_target: FrozenTarget, tiny_prompts: list[Prompt]) -> Any:
    """A head that has seen the target's answers to the tiny prompts, and so drafts about half of them."""
    engine = Engine(tiny_target, batch_size=4, max_length=128)
    outputs = engine.generate([Request(list(prompt.ids), 40) for prompt in tiny_prompts])
    head = PairHead(PairConfig())
    head.learn([output.tokens for output in outputs])
    return head
