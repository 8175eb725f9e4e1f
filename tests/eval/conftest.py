"""A loaded tiny target, and a head of counted word pairs that drafts some of its text rightly."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from eval.benchmark.prompts import Prompt
from eval.runtime.engine import Engine, EngineOptions, Request
from heads.base import Batch, Drafter, HeadLoss, Observation, Pick, SharedLayers
from heads.errors import UserError
from heads.growth import grow
from heads.registry import HEADS
from heads.target.frozen import FrozenTarget, load_target, load_tokenizer
from heads.tree import MOST_NODES, Proposal, TreeShape


@dataclass(frozen=True)
class PairConfig:
    vocab_size: int = 128


@dataclass
class PairState:
    shape: TreeShape
    root: Tensor  # (B,)
    position: Tensor  # (B,), the root's


class PairHead(nn.Module, Drafter):
    """Drafts the token that followed most often; it knows nothing of the target but the counts it is given."""

    aux_layer_ids: tuple[int, ...] = ()
    depth_weights = (1.0,)

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config: Any = config
        self.deepest = MOST_NODES
        self.memory = 1 << 40
        """Slots of all rows for which it has memory."""
        self.is_faulty = False
        """Put another token in the place of the root: a fault that changes the target's own choices."""
        self.table = nn.Parameter(torch.zeros(config.vocab_size, config.vocab_size), requires_grad=False)

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        for text in texts:
            for token, following in pairwise(text):
                self.table[token, following] += 1.0

    def counts(self, loss_mask: Tensor, documents: Tensor) -> Tensor:
        raise AssertionError("never trained")

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        raise AssertionError("never trained")

    def new_state(
        self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape, backend: Any
    ) -> PairState:
        if shape.depth > self.deepest or shape.top_k > self.deepest:
            raise UserError("too large a tree")
        if batch_size * capacity > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return PairState(shape, torch.zeros(batch_size, dtype=torch.int64), torch.zeros(batch_size, dtype=torch.int64))

    def reset_rows(self, state: PairState, rows: Tensor) -> None:
        pass

    def extend(self, state: PairState, observation: Observation) -> None:
        newest = observation.tokens.gather(1, observation.count[:, None])[:, 0]
        known = observation.count > 0
        state.root.copy_(torch.where(known, newest, state.root))
        state.position.copy_(torch.where(known, observation.start + observation.count, state.position))

    def propose(self, state: PairState, pick: Pick) -> Proposal:
        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            return self.table[tokens]

        grown = grow(state.shape, state.root, state.position, self.table[state.root][:, None], pick, expand, None)
        if self.is_faulty:
            grown.tokens[:, 0] = (state.root + 1) % self.config.vocab_size
        return grown


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
    engine = Engine(tiny_target, None, EngineOptions(batch_size=4, max_length=128))
    outputs = engine.generate([Request(list(prompt.ids), 40) for prompt in tiny_prompts])
    head = PairHead(PairConfig())
    head.learn([output.tokens for output in outputs])
    return head


def figures(tree: str, depth: int, nodes: int, temperature: float, speed: float) -> dict[str, Any]:
    """One measurement of results.json."""
    spread = {"p50": 2.0, "p95": 3.0, "p99": 4.0}
    return {
        "tree": tree,
        "depth": depth,
        "nodes": nodes,
        "temperature": temperature,
        "rule": "match",
        "exact": {"prompts": 2, "identical": 2, "divergences": []},
        "tau": {"mean": 1.5, "ci95": [1.2, 1.75]},
        "alpha": [0.5, *[None] * (depth - 1)],
        "accepted_histogram": [6, 5, *[0] * (depth - 1)],
        "baseline": {"tokens_per_second": 400.0, "ms_per_token": 2.5, "token_ms": dict(spread)},
        "speculative": {
            "tokens_per_second": 400.0 * speed,
            "ms_per_round": 3.0,
            "token_ms": dict(spread),
            "breakdown_ms": {"draft": 0.5, "verify": 2.0, "accept": 0.25, "commit": 0.125},
            "plain_step_ms": 2.5,
        },
        "speedup": {"measured": speed, "ci95": [speed - 0.1, speed + 0.1], "predicted": speed},
        "adaptive": {"shares": {tree: 0.75, "none": 0.25}, "rounds": 11},
        "loop_share": 0.0,
        "tokens": 18,
        "undecoded": 0,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """A whole results.json: three settings, a search, two suites and a sample."""
    settings = [("chain:2", 2, 3, 0.0, 1.25), ("tree:2x2x4", 2, 4, 0.0, 1.5), ("chain:2", 2, 3, 1.0, 1.125)]
    curve = [
        {"tree": tree, "depth": 2, "nodes": nodes, "width": width, "tokens": 1.5, "round_ms": 3.0, "speedup": 1.25}
        for tree, nodes, width in (("chain:2", 3, 1), ("tree:2x2x4", 4, 2))
    ]
    return {
        "schema_version": 1,
        "measured_at": "2026-11-03T14:05:12.000+00:00",
        "target": {
            "name": "org/target",
            "architecture": "LlamaForCausalLM",
            "fingerprint": "f00d",
            "quantize": None,
            "weight_bytes": 329856,
            "parameters": 82464,
            "layers": 8,
            "hidden_size": 32,
            "vocab_size": 128,
            "grown_from": None,
            "adapter": {"rank": 4, "parameters": 1000},
        },
        "head": {
            "kind": "eagle3",
            "path": "run/head",
            "sha256": "beef",
            "parameters": 16384,
            "aux_layer_ids": [2, 4, 5],
            "config": {"depth": 1},
        },
        "device": {"type": "cpu", "name": "a processor", "threads": 2},
        "dtype": "float32",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "draftsmith": "8eb7ac4033f2"},
        "settings": {
            "prompts": "code.jsonl",
            "suites": ["code.jsonl"],
            "num_prompts": 2,
            "distinct_prompts": 2,
            "prompts_hash": "1f08dbb0123ecf06",
            "trees": ["auto"],
            "temperatures": [0.0, 1.0],
            "max_new_tokens": 12,
            "batch_size": 1,
            "repeats": 2,
            "seed": 0,
        },
        **figures(*settings[1]),
        "exact": {"prompts": 6, "identical": 6, "divergences": []},
        "suites": {name: figures(*settings[1]) for name in ("code", "code/def")},
        "measurements": [figures(*setting) for setting in settings],
        "auto": [
            {
                "temperature": 0.0,
                "alpha": [0.5, 0.25],
                "costs_ms": [],
                "curve": curve,
                "proposed": ["chain:2", "tree:2x2x4"],
                "measured": {"chain:2": 1.25, "tree:2x2x4": 1.5},
                "chosen": "tree:2x2x4",
                "plain_is_faster": False,
            }
        ],
        "samples": [
            {
                "suite": "code",
                "prompt_id": "1",
                "prompt": "def f(x):",
                "output": "return",
                "rounds": 2,
                "tau": 1.5,
                "pieces": [
                    {"text": "re", "round": 0, "drafted": False},
                    {"text": "tu", "round": 1, "drafted": True},
                    {"text": "rn", "round": 1, "drafted": False},
                ],
            }
        ],
    }


@pytest.fixture
def failed_results(results: dict[str, Any]) -> dict[str, Any]:
    """The same of a head that changed one of two texts."""
    divergence = {
        "suite": "code",
        "prompt": "1",
        "tree": "chain:2",
        "against": "plain",
        "temperature": 0.0,
        "repeat": 0,
        "position": 1,
        "plain_token": 110,
        "token": None,
        "plain_text": "er",
        "text": None,
        "top_two_margin": 0.125,
    }
    results["exact"] = {"prompts": 6, "identical": 5, "divergences": [divergence]}
    for place in (results, *results["measurements"], *results["suites"].values()):
        place["speedup"] = None
    return results


def altered(head: Any, **attributes: Any) -> Any:
    """The same head with other limits or a fault."""
    found = copy.copy(head)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


@pytest.fixture(scope="session")
def small_head(pair_head: Any) -> Any:
    """The head of word pairs, drafting small trees only: a search among them is short."""
    return altered(pair_head, deepest=2)


@pytest.fixture(scope="session")
def faulty_head(pair_head: Any) -> Any:
    """The head of word pairs, whose drafts make the target's text another one."""
    return altered(pair_head, is_faulty=True)


@pytest.fixture(scope="session")
def hungry_head(pair_head: Any) -> Any:
    """The head of word pairs, without memory for three rows of more than a hundred tokens."""
    return altered(pair_head, memory=300)
