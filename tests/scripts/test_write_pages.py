"""Tables of pages from records of several files: variants, suites, rules and servers."""

from pathlib import Path
from typing import Any

import pytest

from eval.records.figures_schema import Measurement
from eval.records.results import as_record, write_record
from scripts import write_pages
from scripts.write_pages import all_table, cost_table, first_table
from tests.support.annotations import Patch
from tests.support.measurements import measurement, results_of

TIE: dict[str, Any] = dict.fromkeys(("suite", "prompt", "tree", "plain_text", "text"), "x")
TIE |= dict.fromkeys(("temperature", "position", "top_two_margin"), 0)


def record(temperature: float, *, rule: str = "match", **changes: Any) -> dict[str, Any]:
    """A record of chain:2 and chain:4 on two suites, of which the tau of the first is twice as high."""

    def figures(depth: int, tau: float, **more: Any) -> Measurement:
        tau += depth
        return measurement(
            f"chain:{depth}",
            temperature,
            rule=rule,
            draft_bytes=2_000_000,
            tau={"mean": tau, "ci95": [tau - 1, tau + 1]},
            speedup={"measured": tau / 2, "ci95": [1.0, tau], "tokens": 99},
            baseline={"tokens_per_second": 1, "ms_per_token": 2, "token_ms": {}, "step_ms": {"mean": 2, "median": 2}},
            speculative={"round_ms": {"mean": 3.0, "median": 3.0}},
            **more,
        )

    measured = []
    for depth in (2, 4):
        suites = {name: figures(depth, tau) for name, tau in (("mt_bench/a", 0), ("mt_bench", 1), ("gsm8k_test", 3))}
        measured.append(figures(depth, 9, suites=suites))
    exact = {"prompts": 12, "identical": 12, "near_ties": [TIE]}
    results = results_of(*measured, head={"budget_tokens": 7_000}, **{"exact": exact, **changes})
    results.settings.suites, results.settings.num_prompts = ["d/gsm8k_test.jsonl", "mt_bench"], 6
    return as_record(results)


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: Patch) -> None:
    server, drawn = {"name": "vLLM", "url": "", "model": "", "plain_url": None}, {"prompts": 12}
    files = {"eagle3": record(0), "eagle3-large": record(0), "eagle3.sampled": record(1)}
    files["eagle3.ratio"] = record(1, rule="ratio", exact=drawn)
    files["eagle3.vllm"] = record(0, rule="server", server=server, exact=drawn)
    for name, text in files.items():
        write_record(text, tmp_path / f"{name}.json")
    monkeypatch.setattr(write_pages, "RESULTS", tmp_path)


def test_the_first_table_has_each_variant_s_longest_chain() -> None:
    assert first_table("*.json").splitlines() == [
        "| method | draft | tau, GSM8K | tau, MT-Bench | tau, mean, T = 1 | speedup | speedup, T = 1 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| EAGLE-3 | chain:4 | 7.00 | 5.00 | 6.00 | 6.50x [1.00, 13.00] | 6.50x [1.00, 13.00] |",
        "| EAGLE-3, large | chain:4 | 7.00 | 5.00 | – | 6.50x [1.00, 13.00] | – |",  # noqa: RUF001
        "",
        "6 prompts of GSM8K, MT-Bench, 64 new tokens; CPU, 2 threads, float32; commit abcdef0; 95% intervals. "
        "Identical to plain decoding: 36 of 36 outputs, 3 of them but for near-ties.",
    ]


def test_the_whole_table_has_a_column_for_each_rule_and_server() -> None:
    head, _, *rows = all_table("*.json").splitlines()
    ways = ["mean, greedy", "mean, T = 1", "mean, T = 1, ratio", "mean, greedy, served"]
    assert all(f"| tau, {way} " in head for way in ways) and "T = 1, served" not in head
    assert "| EAGLE-3 | chain:2 | 5.00 [4.00, 6.00] | 3.00 [2.00, 4.00] | 4.00 | 4.00 | 4.00 | 4.00 |" in rows[0]


def test_the_table_of_costs_has_a_row_for_each_draft() -> None:
    figures = "| chain:4 | 5.0k | 2.0 | 1.50 | 7.0k |"
    assert cost_table("*.json").splitlines()[2:] == [f"| EAGLE-3 {figures}", f"| EAGLE-3, large {figures}"]
