"""Progress without a terminal: an announcement, no long silence and no flood of lines, and an estimate of the time."""

import re

import pytest

from eval.core.progress import Progress


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_figures_come_at_the_first_and_the_last_step_and_seldom_in_between(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("eval.core.progress.time.monotonic", lambda: now)
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
    assert not said(capsys) and not Progress.open_phases
