"""A loaded tiny target, and a head of counted word pairs that drafts some of its text rightly."""

import copy
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic_core import to_json
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from eval.data.prompts import Prompt
from eval.measure.bench_heads import bench_heads
from eval.pages.run_report import save_and_print
from eval.records import speedup_checks
from eval.records.measure_settings import BenchSettings
from eval.records.results import as_record
from eval.runtime.engine import Request
from heads.core.contract import Drafter, Observation, SharedLayers
from heads.core.errors import UserError
from heads.core.tree import MAX_NODES, Pick, Proposal, TreeShape
from heads.parts.tree_growth import grow
from heads.registry import UNTRAINED
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from heads.targets.target_files import load_tokenizer
from tests.support.annotations import Patch
from tests.support.small_targets import open_engine, texts

Bench = Callable[..., tuple[dict[str, Any], str]]
Measured = tuple[dict[str, Any], str, Path]


@dataclass
class PairState:
    shape: TreeShape
    root: Tensor  # (B,)
    length: Tensor  # (B,), the position of the root


class PairHead(nn.Module, Drafter):
    """Drafts the token that followed most often; it knows nothing of the target but the counts it is given."""

    def __init__(self, vocab_size: int = 128) -> None:
        super().__init__()
        self.deepest = MAX_NODES
        self.memory = 1 << 40
        """Slots of all rows for which it has memory."""
        self.is_faulty = False
        """Put another token in the place of the root: a fault that changes the target's own choices."""
        self.table = nn.Parameter(torch.zeros(vocab_size, vocab_size), requires_grad=False)

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        for text in texts:
            for token, following in pairwise(text):
                self.table[token, following] += 1.0

    def check_draft(self, shape: TreeShape) -> None:
        if shape.depth > self.deepest or shape.top_k > self.deepest:
            raise UserError("too large a tree")

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> PairState:
        self.check_draft(shape)
        if batch_size * capacity > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return PairState(shape, torch.zeros(batch_size, dtype=torch.int64), torch.zeros(batch_size, dtype=torch.int64))

    def extend(self, state: PairState, observation: Observation) -> None:
        newest = observation.tokens.gather(1, observation.count[:, None])[:, 0]
        known = observation.count > 0
        state.root.copy_(torch.where(known, newest, state.root))
        state.length.copy_(torch.where(known, observation.start + observation.count, state.length))

    def propose(self, state: PairState, pick: Pick) -> Proposal:
        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            return self.table[tokens]

        grown = grow(state.shape, state.root, state.length, self.table[state.root][:, None], pick, expand, None)
        if self.is_faulty:
            grown.tokens[:, 0] = (state.root + 1) % len(self.table)
        return grown


@pytest.fixture
def lenient_limits(monkeypatch: Patch) -> None:
    """Limits by which the few tokens of a test on a busy machine are reliable."""
    for name, limit in {"BOUND": math.inf, "BUSY": 8.0, "MIN_TOKENS": 1}.items():
        monkeypatch.setattr(speedup_checks, name, limit)


@pytest.fixture(autouse=True, scope="session")
def known_kind() -> Iterator[None]:
    """Have reports find the head of word pairs where they find all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(UNTRAINED, "pairs", PairHead)
        yield


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir))


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_target_dir: Path) -> Tokenizer:
    return load_tokenizer(str(tiny_target_dir))


@pytest.fixture(scope="session")
def tiny_prompts(tiny_tokenizer: Tokenizer) -> list[Prompt]:
    texts = "def f(x):\n    return", "import os", "class A:\n    pass", "x = [1, 2", "for i in range(3):", "while"
    return [
        Prompt(str(i), "first" if i < 4 else "second", "code", text, tuple(tiny_tokenizer(text)["input_ids"]))
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="session")
def pair_head(tiny_target: FrozenTarget, tiny_prompts: list[Prompt]) -> Any:
    """A head that has seen the target's answers to the tiny prompts, and so drafts about half of them."""
    head, engine = PairHead(), open_engine(tiny_target, None, batch_size=4, max_length=128)
    head.learn(texts(engine.generate([Request(list(prompt.ids), 40) for prompt in tiny_prompts])))
    return head


def altered(head: Any, **attributes: Any) -> Any:
    """The same head with other limits or a fault."""
    found = copy.copy(head)
    vars(found).update(attributes)
    return found


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "code.jsonl"
    records: list[dict[str, Any]] = [{"prompt": text, "category": "def"} for text in ("def f(x):", "def g(y):")]
    records.append({"turns": ["import os", "and sys"], "category": "import"})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="session")
def bench(tiny_target: FrozenTarget, pair_head: Any, tiny_tokenizer: Tokenizer, prompt_file: Path) -> Bench:
    """Measure a head, or several by their names: the contents of the file, and what was printed."""

    def run(out: Path | None, heads: Any = pair_head, target: FrozenTarget = tiny_target, **settings: Any) -> Any:
        console = Console(file=io.StringIO(), width=180)
        chosen = BenchSettings(**{"prompts": str(prompt_file), "max_new_tokens": 12, "repeats": 1, **settings})
        named = heads if isinstance(heads, dict) else {"runs/x/head": heads}
        results = bench_heads(target, named, tiny_tokenizer, chosen)
        save_and_print(results, out, console)
        assert isinstance(console.file, io.StringIO)
        return json.loads(to_json(as_record(results), inf_nan_mode="null")), console.file.getvalue()

    return run


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory, bench: Bench) -> Measured:
    """Two drafts at two temperatures: results, the text in the terminal, and the folder."""
    out = tmp_path_factory.mktemp("measured") / "run"
    results, text = bench(out, trees=("chain:2", "tree:2x2x4"), temperatures=(0.0, 1.0))
    return results, text, out


@pytest.fixture
def results(measured: Measured) -> dict[str, Any]:
    """A whole results.json: those, with a search, and a head trained to one depth."""
    found: dict[str, Any] = json.loads((measured[2] / "results.json").read_text())
    found["head"]["config"] = {"depth": 1}
    chain, tree = found["measurements"][:2]
    curve = [{"tree": m["tree"], "depth": 2, "width": n, "speedup": 1.25} for n, m in enumerate((chain, tree), start=1)]
    search = {"temperature": 0.0, "curve": curve, "proposed": ["chain:2", "tree:2x2x4"], "chosen": "tree:2x2x4"}
    found["auto"] = [{**search, "measured": {"chain:2": 1.25, "tree:2x2x4": 1.5}, "plain_is_faster": False}]
    return found


@pytest.fixture
def failed_results(results: dict[str, Any]) -> dict[str, Any]:
    """The same of a head that changed one text."""
    place = {"suite": "code", "prompt": "1", "tree": "chain:2", "against": "plain", "temperature": 0.0, "position": 1}
    divergence = {**place, "plain_text": "er", "text": None, "top_two_margin": 0.125}
    results["exact"] = {"prompts": 16, "identical": 15, "divergences": [divergence]}
    suites = [suite for part in (results, *results["measurements"]) for suite in part["suites"].values()]
    for figures in (results, *results["measurements"], *suites):
        figures["speedup"] = None
    return results
