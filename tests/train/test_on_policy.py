"""Heads that learn from the rounds that they drafted."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions
from heads.core.tree import parse_shape
from heads.registry import build_head
from heads.targets.load import load_target, load_tokenizer
from tests.chats import reader_of
from tests.faults import signal_at
from tests.refusals import refused
from tests.runs import BLOCK, Settings, same, weights, write_recipe
from tests.runs import train_in as run
from train.core.interrupts import Interrupted
from train.data.on_policy import Samples
from train.data.prepare import load_data
from train.data.settings import OnPolicy
from train.recipe import load_recipe

ON_POLICY = {"every": 2, "prompts": 6, "samples": 4, "prompt_tokens": 8, "new_tokens": 20, "temperature": 0.0}


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("dflash", BLOCK | {"weights": "d_pace"}),
        ("eagle3", {"depth": 3, "intermediate_size": 32}),
        pytest.param("dflash2", BLOCK | {"selector_rank": 8}, marks=pytest.mark.slow),
        pytest.param("dspark", BLOCK | {"markov_rank": 8}, marks=pytest.mark.slow),
        pytest.param("lilicorr", BLOCK | {"lilicorr_hidden_size": 16}, marks=pytest.mark.slow),
        pytest.param("xpress", BLOCK | {"xpress_rank": 16}, marks=pytest.mark.slow),
        pytest.param("medusa", {"depth": 3, "tree_nodes": 0}, marks=pytest.mark.slow),
        pytest.param("mtp", {"depth": 2, "intermediate_size": 32}, marks=pytest.mark.slow),
    ],
)
def test_a_run_learns_from_the_runtimes_rounds_and_goes_on_bit_for_bit(
    kind: str, head: Settings, settings: Settings, tmp_path: Path, tiny_target_dir: Path
) -> None:
    settings["head"], settings["data"]["on_policy"] = {"kind": kind, **head}, ON_POLICY
    recipe, folder = write_recipe(settings), run(settings)

    # What the runtime decodes with the weights of step 4.
    target = load_target(str(tiny_target_dir))
    drafter: Any = build_head(kind, head, target, torch.ones(128))
    drafter.load_state_dict(weights(folder, 4))
    reader = reader_of(load_tokenizer(target.name))
    _, samples = load_data(load_recipe(recipe).data, 0, drafter, target, reader, folder)
    assert samples is not None
    requests = samples.requests(4)
    shape = parse_shape(f"chain:{len(drafter.depth_weights)}")
    options = EngineOptions(shape=shape, batch_size=2, max_length=64)
    outputs = Engine(target, drafter, options).generate(requests)
    plain = Engine(target, None, EngineOptions(max_length=64)).generate(requests)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    file = folder / "on_policy/step-4.jsonl"
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    assert [list(chain(*rounds)) for rounds in recorded] == [output.tokens for output in plain]
    assert [[len(tokens) for tokens in rounds] for rounds in recorded] == [[1, *o.emitted()] for o in outputs]

    # Its rows are the texts of a file, whose labels have the depths at which they were drafted, here of long rounds.
    texts = [output.tokens for output in plain]
    recorded = [[text[:1], *(text[begin : begin + 3] for begin in range(1, len(text), 3))] for text in texts]
    file.write_text("".join(f"{json.dumps(rounds)}\n" for rounds in recorded))
    pool, found = samples.mixture(4).pools[-1], []
    for index in range(len(pool)):
        row = pool.row(index)
        for document in range(int(row.documents.max()) + 1):
            own = row.documents == document
            labels = row.loss_mask[own]
            found.append((row.tokens[own].tolist(), int((~labels).sum()), row.depths[own][labels].tolist()))
    assert sorted(found) == sorted(
        (
            [*request.prompt, *chain(*rounds)],
            len(request.prompt) + 1,
            [k for each in rounds[1:] for k in range(len(each))],
        )
        for request, rounds in zip(requests, recorded, strict=True)
    )

    settings["output_dir"] = str(tmp_path / "broken")
    left = tmp_path / "broken/on_policy"  # of another run, which ended before its first checkpoint
    left.mkdir(parents=True)
    for step in (2, 4):
        (left / f"step-{step}.jsonl").write_text("[[7], [7, 7]]\n" * 4)
    with signal_at(3), pytest.raises(Interrupted):
        run(settings)
    broken = run(settings)
    assert same(weights(folder, 6), weights(broken, 6))


def test_a_target_without_room_for_an_answer_and_a_round_is_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = load_target(str(tiny_target_dir))
    head: Any = build_head("dflash", BLOCK, target, torch.ones(128))
    settings = OnPolicy(every=1, samples=1, new_tokens=500)
    said = refused(Samples, None, [[7] * 9], settings, head, target, tmp_path)
    assert "data.on_policy.new_tokens: a prompt, its answer and a round need up to 513 positions" in said
