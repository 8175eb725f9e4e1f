"""Several heads in one comparison: the table, the record, and what is refused."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import bench as module
from eval.core.command_line import exit_status
from eval.measure.bench_heads import fitting_shapes, head_names
from eval.pages.texts import MISSING, count
from eval.records.measure_settings import to_settings
from heads.core.errors import UserError
from heads.registry import build_head, build_untrained
from heads.saved import save_head, target_record
from heads.targets.frozen_target import FrozenTarget
from tests.eval.conftest import Bench
from tests.eval.measure.test_roofline import linear_bytes


@pytest.mark.usefixtures("lenient_limits")
def test_all_heads_run_in_one_comparison_with_the_trees_they_can_draft(
    tiny_target: FrozenTarget, pair_head: Any, bench: Bench, tmp_path: Path
) -> None:
    out, trees = tmp_path / "out", ("chain:2", "tree:2x2x5")
    heads = {
        "pairs": pair_head,
        **{name: build_untrained(name, tiny_target) for name in ("lookup:3", "early_exit:6", "ngram:3")},
    }
    results, text = bench(out, heads, trees=trees)
    assert [(m["head"], m["tree"]) for m in results["measurements"]] == [
        *(("pairs", "chain:2"), ("pairs", "tree:2x2x5"), ("lookup:3", "chain:2")),
        *(("early_exit:6", "chain:2"), ("early_exit:6", "tree:2x2x5"), ("ngram:3", "chain:2")),
    ]
    assert len({m["baseline"]["ms_per_token"] for m in results["measurements"]}) == 1, "one plain decoding for all"
    assert results["exact"] == {"prompts": 24, "identical": 24, "divergences": []}
    assert [head["parameters"] for head in results["heads"]] == [128 * 128, 0, 0, 0]
    read = json.loads((out / "compare.json").read_text())
    assert read["measurements"][0]["tau"]["mean"] == results["measurements"][0]["tau"]["mean"]
    table = (out / "compare.md").read_text()
    assert table.count("\n| ") == 2 + 6 and "\n| early_exit:6 | tree:2x2x5, greedy |" in table
    assert "24 of 24 prompts" in text and text.count("4 of 4") == 6
    page = (out / "compare.html").read_text()
    assert "24 of 24 prompts" in page and page.count("<td>4 of 4</td>") >= 6


def test_rows_say_what_a_head_was_trained_on_and_mark_other_data_and_budgets(
    tiny_target: FrozenTarget, bench: Bench, tmp_path: Path
) -> None:
    head = build_head("medusa", {"depth": 2}, tiny_target, torch.ones(tiny_target.vocab_size, dtype=torch.int64))
    trained = {"one": (10, 1000, "a"), "kept-earlier": (5, 490, "a"), "longer": (10, 3000, "b")}
    for name, (step, tokens, data) in trained.items():
        made = {"step": step, "steps": 10, "tokens": tokens, "data": {"sha256": data}}
        save_head(head, tmp_path / name, target=target_record(tiny_target), provenance=made)
    heads = {str(tmp_path / name): head for name in trained} | {"lookup:3": build_untrained("lookup:3", tiny_target)}
    results, text = bench(tmp_path / "out", heads, trees=("chain:2",))
    size = sum(p.numel() for p in head.parameters())
    drafted = linear_bytes(head)
    assert {m["draft_bytes"] for m in results["measurements"]} == {drafted, 0}
    table = (tmp_path / "out/compare.md").read_text()
    read = f"{drafted / 1e6:.1f}"
    for name, trained_on in (("one", "1.0k"), ("kept-earlier", "490"), ("longer", "3.0k, other data, other budget")):
        row = rf"^\| medusa, {name} \| chain:2, greedy \| .* \| {read} \| {count(size)} \| {trained_on} \|$"
        assert re.search(row, table, re.MULTILINE), name
    assert re.search(rf"^\| lookup:3 \| chain:2, greedy \| .* \| 0.0 \| 0 \| {MISSING} \|$", table, re.MULTILINE)
    said = "trained on different data or budgets (longer: other data and other budget)"
    assert said in text and said in (tmp_path / "out/compare.html").read_text()


def test_heads_of_different_targets_are_refused(
    tiny_target: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, record = build_head("medusa", {"depth": 2}, tiny_target, torch.ones(128)), target_record(tiny_target)
    save_head(head, tmp_path / "one", target=record)
    save_head(head, tmp_path / "two", target=record | {"hidden_size": 64})
    for second in (str(tmp_path / "two"), f"lookup:3+{tmp_path / 'two'}"):
        arguments = [str(tmp_path / "one"), second, "--out", str(tmp_path / "out")]
        assert exit_status(partial(module.main, arguments)) == 2
        error = capsys.readouterr().err
        assert error.count("error:") == 1 and str(tmp_path / "two") in error and "hidden size 64" in error
        assert not (tmp_path / "out").exists()


def test_without_a_tree_named_every_head_finds_one(tiny_target: FrozenTarget, pair_head: Any) -> None:
    """A head of three depths and one that cannot branch, as the README compares them."""
    short = build_head("medusa", {"depth": 3}, tiny_target, torch.ones(128, dtype=torch.int64))
    short.config = short.config.model_copy(update={"tree": ((0,), (1,), (0, 0))})
    heads = {"short": short, "pairs": pair_head, "lookup": build_untrained("lookup:2", tiny_target)}
    shapes = {}
    for rule in ("match", "block"):
        chosen = to_settings(module.parse_arguments(["x", "y", "--temperature", "1", "--rule", rule]))
        for name, head in heads.items():
            shapes[rule, name] = [str(shape) for shape in fitting_shapes(head, name, tiny_target, chosen)]
    assert shapes["match", "short"] == ["chain:3", "head"] and shapes["block", "short"] == ["chain:3"]
    assert shapes["match", "pairs"] == shapes["block", "pairs"] == ["chain:5", "chain:3"]
    assert shapes["match", "lookup"] == ["chain:5", "chain:3"]


def test_heads_are_given_apart_by_name() -> None:
    assert head_names(["/runs/a", "/runs/b/head", "lookup:3"]) == ["a", "b/head", "lookup:3"]
    assert head_names(["/runs/a", "lookup:3+/runs/a", "lookup:4+x/a"]) == ["a", "lookup:3+a", "lookup:4+x/a"]
    assert head_names(["x/run", "y/run"]) == ["x/run", "y/run"]
    with pytest.raises(UserError, match="runs/a: named twice"):
        head_names(["runs/a", "runs/b", "runs/a"])
