"""results.json and what is said of it."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from eval import report
from eval.measure.command import exit_status
from eval.measure.figures import pieces, pooled_exactness
from eval.measure.results import read_results, write_record
from eval.measure.speedup_checks import headline
from eval.pages.format import audit_line, exact_cell, is_exact
from eval.runtime.engine import Output
from heads.core.errors import UserError
from tests.faults import small_files


def output(tokens: list[int], accepted: list[int]) -> Output:
    return Output(tokens, "length", accepted, accepted)


def test_pieces_know_their_round_and_who_made_them(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = list(tiny_tokenizer("abcdefg")["input_ids"])
    assert len(tokens) == 6  # "de" is one token
    found = pieces(output(tokens, [2, 1]), tiny_tokenizer)
    assert [piece["round"] for piece in found] == [0, 1, 1, 1, 2, 2]
    assert [piece["drafted"] for piece in found] == [False, True, True, False, True, False]
    assert "".join(piece["text"] for piece in found) == "abcdefg"
    cut = pieces(output(list(tiny_tokenizer("abcfg")["input_ids"]), [1, 2]), tiny_tokenizer)
    assert [piece["drafted"] for piece in cut] == [False, True, False, True, True], "a cut round ends on a drafted one"


def measurement(tree: str, temperature: float, speed: float | None) -> dict[str, Any]:
    speedup = None if speed is None else {"measured": speed}
    exact = {"prompts": 2, "identical": 2, "divergences": []}
    times = {"tau": {"mean": 3.0}, "baseline": {"ms_per_token": 1.0}}
    return {"tree": tree, "temperature": temperature, "speedup": speedup, "exact": exact, **times}


def test_near_ties_are_given_of_wherever_identity_is() -> None:
    without, tied = measurement("chain:3", 0, 1.2), measurement("tree:3x2x6", 0, 1.3)
    tied["exact"]["near_ties"] = [{"prompt": "1", "near_tie": True}]
    results = {"exact": pooled_exactness([without, tied], []), "measurements": [without, tied], "target": {}}
    line = "output identical to plain decoding: 4 of 4 prompts (2 prompts x 2 settings), 1 of them but for near-ties"
    assert audit_line(results) == line and is_exact(results)
    assert [exact_cell(m) for m in (without, tied)] == ["2 of 2", "2 of 2, 1 of them but for near-ties"]


def test_the_headline_is_the_fastest_at_the_first_temperature() -> None:
    slow, fast, hot = measurement("a", 0, 1.2), measurement("b", 0, 1.5), measurement("b", 1, 1.9)
    assert headline([slow, fast, hot]) == 1
    assert headline([slow, measurement("b", 0, None), hot]) == 0
    busy = {**fast, "baseline": {"ms_per_token": 9.0, "token_ms": {"p50": 1.0}}}
    assert headline([busy, slow, hot]) == 1 and headline([busy, hot]) == 0


def test_plain_decoding_that_does_not_repeat_itself_fails_the_audit() -> None:
    exact = pooled_exactness([measurement("a", 0, 1.2), measurement("b", 0, 1.5)], [{"prompt": "1"}])
    assert (exact["prompts"], exact["identical"], len(exact["divergences"])) == (4, 3, 1)


def test_what_is_no_number_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_record({"schema_version": 1, "tau": (math.nan, 1.5), "out": Path("x")}, path)
    assert json.loads(path.read_text()) == {"schema_version": 1, "tau": [None, 1.5], "out": "x"}
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_record({"old": 1}, path)
    before = path.read_bytes()
    with small_files(10), pytest.raises(UserError, match="could not be written"):
        write_record({"new": "x" * 100}, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def render(path: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Render the report of a file: the status, 2 with one line that names the file."""
    capsys.readouterr()
    status = exit_status(lambda: report.main([str(path)]))
    said = capsys.readouterr()
    if status == 2:
        assert said.err.startswith(f"error: {path}: ") and said.err.count("\n") == 1 and not said.out, said.err
    return status


def test_a_whole_results_file_is_rendered(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"measured": 1.5, "ci95": [1.625, 1.75]}  # beside the point itself, as of few prompts
    results["measurements"][1]["speedup"] |= figures
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert render(tmp_path / "results.json", capsys) == 0
    assert {"report.html", "README.md", "plots"} < {path.name for path in tmp_path.iterdir()}


WRONG: list[tuple[tuple[Any, ...], Any]] = [
    (("schema_version",), 99),
    (("tau", "mean"), 1e300),
    (("measurements",), []),
    (("measurements", 0, "tree"), "$x$"),
    (("measurements", 1, "speedup", "ci95"), [None, 1.0]),
    (("exact", "divergences"), [{}]),
    (("exact", "kind"), "distribution"),
    (("auto", 0, "chosen"), "chain:9"),
]


def test_a_wrong_value_is_named(results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for keys, value in WRONG:
        spoiled = copy.deepcopy(results)
        holder: Any = spoiled
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = value
        path.write_text(json.dumps(spoiled))
        with pytest.raises(UserError, match=rf"json: .*{keys[0]}.*; expected a results\.json"):
            read_results(path)
    for text in ("", "[]", "{"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"results\.json: .*expected a results\.json"):
            read_results(path)


def test_speeds_of_an_audit_that_failed_are_refused(failed_results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(failed_results))
    assert not is_exact(read_results(path))
    for place in (failed_results, failed_results["measurements"][1], failed_results["suites"]["code"]):
        place["speedup"] = {"measured": 2.0, "ci95": None, "predicted": 2.0}
        path.write_text(json.dumps(failed_results))
        with pytest.raises(UserError, match="expected null"):
            read_results(path)
        place["speedup"] = None
