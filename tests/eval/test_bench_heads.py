"""Several heads in one comparison: the table, the record, and what is refused."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eval import bench as module
from eval.core.command_line import exit_status
from eval.measure.bench_heads import fitting_shapes, head_names
from eval.pages.texts import MISSING, count
from eval.records.measure_settings import to_settings
from heads.registry import build_untrained
from heads.saved import save_head, target_record
from heads.targets.frozen_target import FrozenTarget
from tests.eval.conftest import Bench
from tests.eval.measure.test_roofline import linear_bytes
from tests.support.annotations import Capture
from tests.support.refusals import refused
from tests.support.small_targets import make_drafter


@pytest.mark.usefixtures("lenient_limits")
def test_all_heads_run_in_one_comparison_with_the_trees_they_can_draft(
    tiny_target: FrozenTarget, pair_head: Any, bench: Bench, tmp_path: Path
) -> None:
    out, trees = tmp_path / "out", ("chain:2", "tree:2x2x5")
    heads = {name: build_untrained(name, tiny_target) for name in ("lookup:3", "early_exit:6", "ngram:3")}
    heads = {"pairs": pair_head, **heads}
    results, text = bench(out, heads, trees=trees)
    both = {"pairs": trees, "lookup:3": trees[:1], "early_exit:6": trees, "ngram:3": trees[:1]}
    pairs = [(m["head"], m["tree"]) for m in results["measurements"]]
    assert pairs == [(head, tree) for head, drafted in both.items() for tree in drafted]
    assert len({m["baseline"]["ms_per_token"] for m in results["measurements"]}) == 1, "one plain decoding for all"
    assert results["exact"] == {"prompts": 24, "identical": 24, "divergences": []}
    assert [head["parameters"] for head in results["heads"]] == [128 * 128, 0, 0, 0]
    read = json.loads((out / "compare.json").read_text())
    assert [m["tau"] for m in read["measurements"]] == [m["tau"] for m in results["measurements"]]
    table, page = ((out / f"compare.{form}").read_text() for form in ("md", "html"))
    assert table.count("\n| ") == 2 + 6 and "\n| early_exit:6 | tree:2x2x5, greedy |" in table
    assert all("24 of 24 prompts" in shown and shown.count("4 of 4") >= 6 for shown in (text, page))


def test_rows_say_what_a_head_was_trained_on_and_mark_other_data_and_budgets(
    tiny_target: FrozenTarget, bench: Bench, tmp_path: Path
) -> None:
    head = make_drafter("medusa", tiny_target, depth=2)
    trained = {"one": (10, 1000, "a"), "kept-earlier": (5, 490, "a"), "longer": (10, 3000, "b")}
    for name, (step, tokens, data) in trained.items():
        made = {"step": step, "steps": 10, "tokens": tokens, "data": {"sha256": data}}
        save_head(head, tmp_path / name, target=target_record(tiny_target), provenance=made)
    heads = {str(tmp_path / name): head for name in trained} | {"lookup:3": build_untrained("lookup:3", tiny_target)}
    results, text = bench(tmp_path / "out", heads, trees=("chain:2",))
    size, drafted = sum(p.numel() for p in head.parameters()), linear_bytes(head)
    assert {m["draft_bytes"] for m in results["measurements"]} == {drafted, 0}
    table = (tmp_path / "out/compare.md").read_text()
    read = f"{drafted / 1e6:.1f}"
    for name, trained_on in (("one", "1.0k"), ("kept-earlier", "490"), ("longer", "3.0k, other data, other budget")):
        row = rf"^\| medusa, {name} \| chain:2, greedy \| .* \| {read} \| {count(size)} \| {trained_on} \|$"
        assert re.search(row, table, re.MULTILINE), name
    assert re.search(rf"^\| lookup:3 \| chain:2, greedy \| .* \| 0.0 \| 0 \| {MISSING} \|$", table, re.MULTILINE)
    said = "trained on different data or budgets (longer: other data and other budget)"
    assert said in text and said in (tmp_path / "out/compare.html").read_text()


def test_heads_of_different_targets_are_refused(tiny_target: FrozenTarget, tmp_path: Path, capsys: Capture) -> None:
    head, record = make_drafter("medusa", tiny_target, depth=2), target_record(tiny_target)
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
    short = make_drafter("medusa", tiny_target)
    short.config = short.config.model_copy(update={"tree": ((0,), (1,), (0, 0))})
    heads = {"short": short, "pairs": pair_head, "lookup": build_untrained("lookup:2", tiny_target)}
    for rule, of_short in (("match", ["chain:3", "head"]), ("block", ["chain:3"])):
        chosen = to_settings(module.parse_arguments(["x", "y", "--temperature", "1", "--rule", rule]))
        shapes = [[str(s) for s in fitting_shapes(heads[name], name, tiny_target, chosen)] for name in heads]
        assert shapes == [of_short, ["chain:5", "chain:3"], ["chain:5", "chain:3"]]


def test_heads_are_given_apart_by_name() -> None:
    assert head_names(["/runs/a", "/runs/b/head", "lookup:3"]) == ["a", "b/head", "lookup:3"]
    assert head_names(["/runs/a", "lookup:3+/runs/a", "lookup:4+x/a"]) == ["a", "lookup:3+a", "lookup:4+x/a"]
    assert head_names(["x/run", "y/run"]) == ["x/run", "y/run"]
    assert "runs/a: named twice" in refused(head_names, ["runs/a", "runs/b", "runs/a"])
