"""Progress without a terminal: an announcement, no long silence and no flood of lines, and an estimate of the time."""

import re
from itertools import pairwise

import pytest

from eval.core.progress import Progress
from tests.support.annotations import Capture, Patch


def said(capsys: Capture) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_figures_come_at_the_first_and_the_last_step_and_seldom_in_between(capsys: Capture, monkeypatch: Patch) -> None:
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


def test_an_estimate_does_not_jump_at_a_slow_unit_or_a_phase_within(capsys: Capture, monkeypatch: Patch) -> None:
    now = 1000.0
    monkeypatch.setattr("eval.core.progress.time.monotonic", lambda: now)
    ends = []
    with Progress("step", 400, announced=True) as steps:
        for step in range(400):
            now += 30.0 if step == 100 else 1.0
            steps.advance()
            if step % 100 == 50:
                with Progress("measuring", announced=True):
                    now += 50.0
                steps.more = 50.0 * (3 - step // 100)
            if step >= 60 and step % 10 == 0:
                ends.append(now + (steps.seconds_left() or 0.0))
    assert all(abs(end - now) < 60 for end in ends)
    assert max(abs(one - other) for one, other in pairwise(ends)) < 45


def test_an_estimate_forgets_a_slow_start(capsys: Capture, monkeypatch: Patch) -> None:
    now = 1000.0
    monkeypatch.setattr("eval.core.progress.time.monotonic", lambda: now)
    with Progress("step", 2000, announced=True) as steps:
        for step in range(1900):
            now += 8.0 if step < 200 else 1.0
            steps.advance()
            left = steps.seconds_left()
    assert left is not None and 100 <= left < 400


def test_only_one_process_of_a_launch_speaks(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("RANK", "1")
    with Progress("loading") as phase:
        phase.advance()
    assert not said(capsys) and not Progress.open_phases
