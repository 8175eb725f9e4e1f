"""tau by the training step is tau by the runtime."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions, Request
from heads.core.tree import parse_shape
from heads.registry import HEADS, build_head
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from tests.support.small_targets import small_heads
from train.data.packing import text_rows
from train.features.feature_source import make_batch
from train.run.tau_measurement import accepted_lengths, answer_batches, answer_spans, emitted_by_round, known_text_tau

BLOCK: dict[str, Any] = {"num_layers": 2, "block_size": 5}
SETTINGS = small_heads(
    BLOCK,
    eagle3={"aux_layer_ids": [1, 4, 7], "norm_output": True, "depth": 7},
    medusa={"depth": 5},
    draft={"layers": [0, 1, 2, 3, 4, 5, 6]},
    domino=BLOCK | {"gru_hidden_dim": 16, "emb_dim": 256},
)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir), dtype=torch.float64)


CASES: list[tuple[str, dict[str, object]]] = [
    *((kind, {}) for kind in sorted(HEADS)),
    ("dflash", {"sliding_window": 9}),
    ("eagle3", {"hidden_size": 24}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=str)
def test_the_estimate_is_what_the_runtime_accepts(kind: str, changes: dict[str, object], target: FrozenTarget) -> None:
    """Round by round, for a head that is right now and then."""
    torch.manual_seed(0)
    head = build_head(kind, SETTINGS[kind] | changes, target, torch.ones(target.vocab_size)).double()
    prompts = [torch.randint(6, 128, (n,)).tolist() for n in (3, 11, 6)]
    depth = 4
    requests = [Request(prompt, max_new_tokens=20 + n) for n, prompt in enumerate(prompts)]
    if "block_size" in SETTINGS[kind]:  # which begin with no guess at all
        plain = Engine(target, None, EngineOptions(batch_size=2, max_length=64)).generate(requests)
        learn(head, target, [[*prompt, *output.tokens] for prompt, output in zip(prompts, plain, strict=True)])
    engine = Engine(target, head, EngineOptions(shape=parse_shape(f"chain:{depth}"), batch_size=2, max_length=64))
    outputs = engine.generate(requests)
    texts = [[*prompt, *output.tokens] for prompt, output in zip(prompts, outputs, strict=True)]
    batch = make_batch(target, text_rows(texts), head.aux_layer_ids, torch.float64)
    hits = accepted_lengths(batch, head, depth)
    for prompt, text, run, output in zip(prompts, texts, hits, outputs, strict=True):
        rounds = emitted_by_round(run.tolist(), root=len(prompt), end=len(text))
        cut_off = output.accepted[-1] == rounds[-1]
        assert sum(rounds) == len(output.tokens) - 1 == sum(output.accepted) + output.rounds - cut_off
        assert [emitted - 1 for emitted in rounds[:-1]] == output.accepted[:-1]
    emitted = sum(len(output.tokens) - 1 for output in outputs)
    assert sum(sum(output.accepted) for output in outputs) > 0
    known = known_text_tau(head, answer_batches(target, head, requests, outputs, 2), depth)
    assert known.tau == emitted / sum(output.rounds for output in outputs) and known.is_estimate


def test_answers_are_unbroken_labels_of_one_document() -> None:
    labels = [True, True, True, False, True, True, False, True, True, True, True, False]
    documents = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, -1]
    # Nothing drafts the first token of a document, and an answer of one token has no round.
    assert list(answer_spans(labels, documents)) == [(1, 3), (4, 6), (7, 9)]


def learn(head: Any, target: FrozenTarget, texts: list[list[int]]) -> None:
    rows = text_rows(texts)
    batch = make_batch(target, replace(rows, loss_mask=rows.documents >= 0), head.aux_layer_ids, torch.float64)
    scale = head.loss_scale(head.counts(batch))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        head.loss(batch, scale).loss.backward()
        optimizer.step()
