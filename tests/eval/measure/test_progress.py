"""Progress without a terminal: an announcement, no long silence and no flood of lines, and an estimate of the time."""

import re
import time

import pytest

from eval.measure import progress
from eval.measure.progress import Progress


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become tenths of seconds, so that the test of a long phase is short."""
    monkeypatch.setattr(progress, "LEAST_WAIT", 0.01)
    monkeypatch.setattr(progress, "SILENT", 0.15)


@pytest.mark.usefixtures("impatient")
def test_a_long_unit_is_not_silent_and_of_nested_phases_the_inner_one_speaks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress("training: step", 100) as outer:
        outer.advance(50)
        with Progress("measuring: prompt", 8) as inner:
            assert said(capsys) == ["training: step 0/100", "measuring: prompt 0/8"]
            time.sleep(0.5)
            during = said(capsys)
            inner.advance(4)
        assert 2 <= len(during) <= 4 and all(line.startswith("measuring: prompt 0/8") for line in during), during
        time.sleep(0.4)
        after = said(capsys)
    assert 1 <= len(after) <= 3 and all(line.startswith("training: step 50/100, ") for line in after), after
    time.sleep(0.3)
    assert not said(capsys), "a phase that has ended is silent"


def test_figures_come_at_the_first_and_the_last_step_and_seldom_in_between(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("eval.measure.progress.time.monotonic", lambda: now)
    with Progress("step", 1000, announced=True, cold=True) as steps:
        for step in range(1000):
            now += 60.0 if step == 0 else 0.5  # the first step compiles
            steps.advance()
            if step == 0 or (step + 1) % 10 == 0:
                steps.log(f"loss {step}")
    lines = said(capsys)
    assert lines[0] == "step 1/1,000, loss 0" and lines[-1] == "step 1,000/1,000, loss 999, 00:00 left"
    assert 30 <= len(lines) <= 50
    for line in lines[1:]:
        done, minutes, seconds = re.match(r"step ([\d,]+)/1,000, .* (\d\d):(\d\d) left", line).groups()  # type: ignore[union-attr]
        assert 60 * int(minutes) + int(seconds) == pytest.approx(0.5 * (1000 - int(done.replace(",", ""))), abs=1)


def test_only_one_process_of_a_launch_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with Progress("loading") as phase:
        phase.advance()
    assert not said(capsys) and not Progress.opened
