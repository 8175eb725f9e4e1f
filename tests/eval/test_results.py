"""results.json and what is said of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from eval.figures import headline, pieces, pooled_exactness
from eval.files import write_text
from eval.results import read_results, write_results
from eval.runtime.engine import Output
from eval.wording import (
    audit_line,
    count,
    exact_cell,
    is_exact,
    number,
    percent,
    sampling_text,
    short_name,
    with_interval,
)
from heads.errors import UserError


def output(tokens: list[int], accepted: list[int]) -> Output:
    return Output(tokens, "length", len(accepted), accepted, accepted)


def test_pieces_know_their_round_and_who_made_them(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = list(tiny_tokenizer("abcdefg")["input_ids"])
    assert len(tokens) == 6  # "de" is one token
    found = pieces(output(tokens, [2, 1]), tiny_tokenizer)
    assert [piece["round"] for piece in found] == [0, 1, 1, 1, 2, 2]
    assert [piece["drafted"] for piece in found] == [False, True, True, False, True, False]
    assert "".join(piece["text"] for piece in found) == "abcdefg"


def test_a_cut_round_ends_on_a_drafted_piece(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = list(tiny_tokenizer("abcfg")["input_ids"])
    assert [piece["drafted"] for piece in pieces(output(tokens, [1, 2]), tiny_tokenizer)] == [
        *(False, True, False),
        *(True, True),
    ]


class Halves:
    """A tokenizer whose tokens 1 and 2 are the two bytes of one character."""

    def decode(self, ids: list[int]) -> str:
        return b"".join({0: b"a", 1: b"\xc3", 2: b"\xa9"}[i] for i in ids).decode(errors="replace")


def test_a_character_of_two_tokens_comes_whole() -> None:
    tokenizer: Any = Halves()
    found = pieces(output([0, 1, 2, 0], [1, 0]), tokenizer)
    assert [piece["text"] for piece in found] == ["a", "", "é", "a"]


def measurement(tree: str, temperature: float, speed: float | None) -> dict[str, Any]:
    speedup = None if speed is None else {"measured": speed}
    exact = {"prompts": 2, "identical": 2, "divergences": []}
    return {"tree": tree, "temperature": temperature, "speedup": speedup, "exact": exact}


def test_near_ties_are_told_of_wherever_identity_is() -> None:
    without, tied = measurement("chain:3", 0, 1.2), measurement("tree:3x2x6", 0, 1.3)
    tied["exact"]["near_ties"] = [{"prompt": "1"}]
    results = {"exact": pooled_exactness([without, tied], []), "measurements": [without, tied], "target": {}}
    line = "output identical to plain decoding: 4 of 4 prompts (2 prompts x 2 settings), 1 of them but for near-ties"
    assert audit_line(results) == line and is_exact(results)
    assert [exact_cell(m) for m in (without, tied)] == ["2 of 2", "2 of 2, 1 of them but for near-ties"]


def test_the_headline_is_the_fastest_at_the_first_temperature() -> None:
    slow, fast, hot = measurement("a", 0, 1.2), measurement("b", 0, 1.5), measurement("b", 1, 1.9)
    assert headline([slow, fast, hot]) == 1
    assert headline([slow, measurement("b", 0, None), hot]) == 0


def test_plain_decoding_that_does_not_repeat_itself_fails_the_audit() -> None:
    exact = pooled_exactness([measurement("a", 0, 1.2), measurement("b", 0, 1.5)], [{"prompt": "1"}])
    assert (exact["prompts"], exact["identical"], len(exact["divergences"])) == (4, 3, 1)


def test_what_is_no_number_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_results({"schema_version": 1, "tau": (math.nan, 1.5), "out": Path("x")}, path)
    assert json.loads(path.read_text()) == {"schema_version": 1, "tau": [None, 1.5], "out": "x"}
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device\)"):
        write_text(path, "new")
    assert path.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 99}', "{"])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=r"results\.json: expected a results\.json"):
        read_results(tmp_path / "results.json")


def test_figures_are_put_into_words() -> None:
    assert with_interval(1.618, [1.5, 1.75], unit="x") == "1.62x [1.50, 1.75]"
    assert with_interval(1.618, None) == "1.62" and with_interval(1.618, [None, None]) == "1.62"
    assert number(None) == percent(None) == "\N{EN DASH}" and percent(0.641) == "64%"
    assert [count(n) for n in (12, 1_240, 7_300_000, 8e9)] == ["12", "1.2k", "7.3M", "8.0B"]
    assert sampling_text(0) == "greedy" and sampling_text(0.7) == "T = 0.7"
    paths = ["Qwen/Qwen3-8B", "recipes/quickstart/target", "/data/models/llama-8b/", "./x", "runs/a/head"]
    assert [short_name(p) for p in paths] == ["Qwen/Qwen3-8B", "quickstart/target", "llama-8b", "x", "a/head"]
