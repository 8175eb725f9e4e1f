"""A confidence head's temperatures: what is recorded, what is fitted, and the file that SGLang reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from heads.core.tree import Proposal
from heads.saved import save_head, target_record
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from scripts.calibrate_head import calibration_error, fit_temperatures, main, record_confidence
from tests.support.annotations import Capture, Patch
from tests.support.refusals import refused
from tests.support.small_targets import make_drafter, open_engine

SETTINGS: dict[str, Any] = {"block_size": 4, "num_layers": 2, "markov_rank": 6}


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir), dtype=torch.float32)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Arguments of the command for the head in `head`, which writes sts.json; both are in the test's folder."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "the sea"}\n{"text": "ten birds"}\n')
    given = {"--prompts": prompts, "--out": tmp_path / "sts.json", "--max-new-tokens": 8}
    return [str(tmp_path / "head"), *(str(word) for option in given.items() for word in option)]


def save(folder: Path, target: FrozenTarget, **changes: Any) -> None:
    save_head(make_drafter("dspark", target, **SETTINGS | changes), folder, target=target_record(target))


def test_the_calibration_error_is_that_of_fifteen_bins() -> None:
    estimates, kept = torch.tensor([[0.1, 0.12, 0.9, 0.95], [0.0, 1.0, 1.0, 1.0]]), torch.tensor([0.0, 1, 1, 1])
    apart = (abs(0.22 - 1) + abs(0.9 - 1) + abs(0.95 - 1)) / 4
    torch.testing.assert_close(calibration_error(estimates, kept), torch.tensor([apart, 0.0]))


def test_temperatures_that_outcomes_were_drawn_with_are_found() -> None:
    torch.manual_seed(0)
    true = torch.logspace(-1, 1, 41, dtype=torch.float64)[[29, 12, 20]]
    logits = torch.randn(50_000, 3, dtype=torch.float64) * 2 + 1
    accepted = (torch.rand(logits.shape) < (logits / true).sigmoid()).long().cumprod(1).sum(1)
    fitted = fit_temperatures(logits, accepted)
    ratios = torch.tensor(fitted["temperatures"]) / true
    assert (ratios.log10().abs() < 0.11).all()  # two steps of the grid
    assert max(fitted["ece_after"]) < 0.01 and min(fitted["ece_before"]) > 0.02


def test_the_rounds_that_are_recorded_are_the_runtime_s(target: FrozenTarget, monkeypatch: Patch) -> None:
    """Of a head that is given the first tokens of some drafts."""
    head, request = make_drafter("dspark", target, **SETTINGS), Request([5, 9, 17], 24)
    plain = open_engine(target, None, max_length=64).generate([request])[0].tokens
    text, propose = torch.tensor([*request.prompt, *plain]), head.propose

    def partly_right(state: Any, pick: Any) -> Proposal:
        proposal, root = propose(state, pick), int(state.length)
        true = text[root + 1 : root + 1 + root // 2 % 4]
        proposal.tokens[0, 1 : 1 + len(true)] = true
        return proposal  # type: ignore[no-any-return]

    monkeypatch.setattr(head, "propose", partly_right)
    engine = open_engine(target, head, "chain:4", max_length=64)
    logits, accepted = record_confidence(engine, [request, request])
    first, second = engine.generate([request, request])
    assert logits.shape == (first.rounds + second.rounds, 4) and {*first.accepted} >= {0, 1, 2, 3}
    for part, output in zip(accepted.view(2, -1), (first, second), strict=True):
        assert part[:-1].tolist() == output.accepted[:-1]  # the output may end within the last round


def test_the_file_is_sglangs(words: list[str], target: FrozenTarget, tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path / "head", target)
    assert main([*words, "--depth", "3"]) == 0
    made = json.loads((tmp_path / "sts.json").read_text())
    lists = ("temperatures", "ece_before", "ece_after")
    assert made.keys() == {*lists, "dataset", "num_samples"} and made["dataset"] == "prompts.jsonl"
    assert all(len(made[name]) == 3 and {type(value) for value in made[name]} == {float} for name in lists)
    assert min(made["temperatures"]) > 0
    said = capsys.readouterr().out
    assert said.startswith(f"{made['num_samples']} rounds of 2 prompts, chain:3") and "block-size 3 " in said


@pytest.mark.parametrize(
    ("settings", "options", "named"),
    [({"confidence_weight": 0}, "", "with a confidence head"), ({}, "--max-new-tokens 1", "nothing was drafted")],
)
def test_what_is_refused(
    settings: dict[str, Any], options: str, named: str, words: list[str], target: FrozenTarget, tmp_path: Path
) -> None:
    save(tmp_path / "head", target, **settings)
    assert named in refused(main, [*words, *options.split()])
    assert not (tmp_path / "sts.json").exists()
