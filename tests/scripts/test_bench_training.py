"""Variants of a recipe are trained in turns, and only the second half of each run is timed."""

from pathlib import Path

import pytest

from eval.core.command_line import exit_status
from heads.core.errors import UserError
from scripts.bench_training import main, timed_run
from tests.conftest import small_recipe
from tests.support.runs import write_recipe


@pytest.fixture
def recipe(tmp_path: Path, tiny_target_dir: Path) -> str:
    return str(write_recipe(small_recipe(tmp_path, tiny_target_dir)))


def test_a_wrong_key_of_a_variant_ends_it_before_the_first_run(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: main([recipe, "--variant", "--variant", "head.dept=1"])) == 2
    assert "head.dept" in capsys.readouterr().err


@pytest.mark.slow
def test_variants_are_timed_in_turns(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["--variant", "--variant", "train.lr=0.02", "train.batch_size=1"]
    assert main([recipe, "train.seed=1", *variants, "--steps", "2", "--turns", "1"]) == 0
    *_, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (first[1], first[-2:], second[-2:]) == ("1.00", ["the", "recipe"], ["train.lr=0.02", "train.batch_size=1"])
    assert float(second[0]) > 0
    assert first[-3] != second[-3], "the losses of other batches"


@pytest.mark.slow
def test_a_run_that_fails_is_named_with_its_last_line(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.path=none: .*none"):
        timed_run("medusa", [recipe, "target.path=none"], 1, tmp_path / "run")
