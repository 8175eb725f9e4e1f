"""Speedup against batch and context: every point measured and audited, written and drawn."""

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from eval import scaling as module
from eval.benchmark.results import Results
from eval.benchmark.settings import ScalingSettings
from eval.command import exit_status
from eval.commands.scaling_run import measure_scaling, windows
from eval.reporting.format import heading
from heads.errors import UserError
from heads.target.frozen import FrozenTarget


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "code.jsonl"
    lines = [{"prompt": f"def f{i}(x, y):\n    return {i} * x + y\n"} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(
    target: FrozenTarget,
    head: Any,
    tokenizer: PreTrainedTokenizerBase,
    suite: Path,
    out: Path | None = None,
    **settings: Any,
) -> tuple[Results, str]:
    console = Console(file=io.StringIO(), width=120)
    chosen: dict[str, Any] = {"batch_sizes": (1, 3), "contexts": (8, 24), "max_new_tokens": 10, "repeats": 1}
    chosen |= {"prompts": str(suite), "trees": ("chain:2",), **settings}
    results = measure_scaling(
        target, head, tokenizer, ScalingSettings(**chosen), head_path="runs/x/head", out=out, console=console
    )
    assert isinstance(console.file, io.StringIO)
    return results, console.file.getvalue()


@pytest.fixture
def scale(tiny_target: FrozenTarget, pair_head: Any, tiny_tokenizer: PreTrainedTokenizerBase, suite: Path) -> Any:
    return partial(run, tiny_target, pair_head, tiny_tokenizer, suite)


@pytest.mark.parametrize("adaptive", [False, True])
def test_every_pair_is_measured_written_and_drawn(adaptive: bool, tmp_path: Path, scale: Any) -> None:
    results, text = scale(tmp_path, adaptive=adaptive)
    points = [(point["context"], point["batch_size"]) for point in results["points"]]
    assert points == [(8, 1), (8, 3), (24, 1), (24, 3)]
    assert results["exact"] == {"prompts": 8, "identical": 8, "divergences": []}
    for point in results["points"]:
        assert point["speedup"]["measured"] > 0 and point["baseline"]["tokens_per_second"] > 0
        assert ("adaptive" in point) == adaptive
    assert json.loads((tmp_path / "scaling.json").read_text())["points"][0]["tree"] == "chain:2"
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "scaling.svg").read_text()
    assert f"{heading(results)}; " in drawn and "batches of " in drawn
    assert text.count("chain:2") == 4 and "identical to plain decoding: 8 of 8 prompts" in text


def test_windows_are_as_long_as_asked_for_and_do_not_overlap(
    tiny_tokenizer: PreTrainedTokenizerBase, suite: Path
) -> None:
    prompts = windows(str(suite), tiny_tokenizer, 16, 5)
    assert [len(prompt.ids) for prompt in prompts] == [16] * 5
    joined = [token for prompt in prompts for token in prompt.ids]
    assert joined == [token for prompt in windows(str(suite), tiny_tokenizer, 40, 2) for token in prompt.ids]
    with pytest.raises(UserError, match="5 prompts of 1000 need 5000; ask for smaller batches"):
        windows(str(suite), tiny_tokenizer, 1000, 5)


def test_what_does_not_fit_is_left_out(
    tmp_path: Path, tiny_target: FrozenTarget, hungry_head: Any, tiny_tokenizer: PreTrainedTokenizerBase, suite: Path
) -> None:
    results, text = run(tiny_target, hungry_head, tiny_tokenizer, suite, tmp_path, contexts=(8, 100))
    assert [bool(point["speedup"]) for point in results["points"]] == [True, True, True, False]
    assert text.count("out of memory") == 1 and (tmp_path / "scaling.png").exists()


def test_no_speedup_where_an_output_is_not_the_targets_own(
    tmp_path: Path, tiny_target: FrozenTarget, faulty_head: Any, tiny_tokenizer: PreTrainedTokenizerBase, suite: Path
) -> None:
    results, text = run(tiny_target, faulty_head, tiny_tokenizer, suite, tmp_path, contexts=(8,))
    assert results["exact"]["divergences"] and all(point["speedup"] is None for point in results["points"])
    assert "withheld" in text and not (tmp_path / "scaling.png").exists()
    assert "top-two margin" in text and "no speedup is stated" in text


def test_what_leaves_no_room_is_refused(scale: Any) -> None:
    with pytest.raises(UserError, match=r"--contexts 505: with 10 new tokens and the draft .* has room for 499"):
        scale(contexts=(8, 505))


def test_the_command_says_in_one_line_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["nowhere", "--batch-sizes", "0"], "--batch-sizes: expected at least 1, got 0"),
        (["lookup:2"], "does not name its target; give --target"),
    ):
        assert exit_status(lambda: module.main(arguments)) == 2  # noqa: B023
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
