"""results.json and what is said of it."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json
from transformers import PreTrainedTokenizerBase

from eval.measure.figures import pieces, pooled_exactness
from eval.pages.run_report import write_report
from eval.pages.texts import audit_line, exact_cell
from eval.records.figures_schema import Divergence
from eval.records.results import as_record, read_results, write_record
from eval.records.schema import Piece, Results
from eval.records.speedup_checks import headline_index
from eval.runtime.engine import Output
from heads.core.errors import UserError
from tests.support.faults import small_files
from tests.support.measurements import measurement, results_of
from tests.support.refusals import refused

RECORDS = Path(__file__).resolve().parents[3] / "eval/results"
PLACE: dict[str, Any] = {"suite": "code", "prompt": "1", "tree": "chain:3", "temperature": 0, "position": 1}
PLACE |= {"plain_text": "a", "text": "b", "top_two_margin": 0.1}


def test_pieces_know_their_round_and_who_made_them(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    def cut(text: str, accepted: list[int]) -> list[Piece]:
        output = Output(list(tiny_tokenizer(text)["input_ids"]), "length", accepted, accepted)
        return pieces(output, tiny_tokenizer)

    found = cut("abcdefg", [2, 1])  # "de" is one token
    assert [piece.round for piece in found] == [0, 1, 1, 1, 2, 2]
    assert [piece.drafted for piece in found] == [False, True, True, False, True, False]
    assert "".join(piece.text for piece in found) == "abcdefg"
    drafted = [piece.drafted for piece in cut("abcfg", [1, 2])]
    assert drafted == [False, True, False, True, True], "a cut round ends on a drafted one"


def test_near_ties_are_given_of_wherever_identity_is() -> None:
    tie = Divergence(**PLACE, near_tie=True)
    without, tied = (measurement(exact={"prompts": 2, "identical": 2, "near_ties": ties}) for ties in ([], [tie]))
    results = results_of(without, tied, exact=pooled_exactness([without.exact, tied.exact], []))
    line = "output identical to plain decoding: 4 of 4 prompts (2 prompts x 2 settings), 1 of them but for near-ties"
    assert audit_line(results) == line and results.is_exact
    assert [exact_cell(m.exact) for m in (without, tied)] == ["2 of 2", "2 of 2, 1 of them but for near-ties"]


def test_the_headline_is_the_fastest_at_the_first_temperature() -> None:
    slow, fast, hot = measurement(speedup=1.2), measurement(speedup=1.5), measurement(temperature=1, speedup=1.9)
    assert headline_index([slow, fast, hot]) == 1
    assert headline_index([slow, measurement(speedup=None), hot]) == 0
    assert fast.baseline is not None
    fast.baseline.ms_per_token = 9.0
    assert headline_index([fast, slow, hot]) == 1 and headline_index([fast, hot]) == 0


def test_plain_decoding_that_does_not_repeat_itself_fails_the_audit() -> None:
    exact = pooled_exactness([measurement().exact, measurement().exact], [Divergence(**PLACE)])
    assert (exact.prompts, exact.identical, len(exact.divergences)) == (4, 3, 1)


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


def test_a_speedup_outside_of_its_interval_is_drawn(results: dict[str, Any], tmp_path: Path) -> None:
    results["measurements"][1]["speedup"] |= {"measured": 1.5, "ci95": [1.625, 1.75]}  # as of few prompts
    write_report(Results.model_validate(results), tmp_path)
    assert {"report.html", "README.md", "plots"} == {path.name for path in tmp_path.iterdir()}


WRONG: list[tuple[tuple[Any, ...], Any]] = [
    (("schema_version",), 99),
    (("measurements",), []),
    (("measurements", 0, "tau"), 2.0),
    (("measurements", 1, "speedup", "ci95"), [None, 1.0]),
    (("exact", "divergences"), [{}]),
    (("auto", 0, "chosen"), "chain:9"),
]


def test_every_committed_record_loads() -> None:
    paths = [path for path in RECORDS.rglob("*.json") if '"measurements"' in path.read_text()]
    assert len(paths) > 20
    for path in paths:
        results, record = read_results(path), json.loads(path.read_text())
        assert len(results.measurements) == len(record["measurements"])
        written = json.loads(to_json(as_record(results), inf_nan_mode="null"))
        assert written.pop("measurements")[0].items() >= record.pop("measurements")[0].items() and written == record


def test_a_wrong_value_is_named(results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    texts = dict.fromkeys(("", "[]", "{"), "")
    for keys, value in WRONG:
        spoiled = copy.deepcopy(results)
        holder: Any = spoiled
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = value
        texts[json.dumps(spoiled)] = str(keys[0])
    for text, named in texts.items():
        path.write_text(text)
        assert re.search(rf"results\.json: .*{named}.*expected a results\.json", refused(read_results, path))


def test_speeds_of_an_audit_that_failed_are_refused(failed_results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(failed_results))
    assert not read_results(path).is_exact
    for place in (failed_results["measurements"][1], failed_results["measurements"][0]["suites"]["code"]):
        place["speedup"] = {"measured": 2.0, "ci95": None, "predicted": 2.0}
        path.write_text(json.dumps(failed_results))
        assert "expected null" in refused(read_results, path)
        place["speedup"] = None
