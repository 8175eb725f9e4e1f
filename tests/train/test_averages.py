"""The time left is that of the steps and measurements to come, as the latest ones were."""

import pytest

from train.averages import Pace


def test_the_time_left_leaves_out_the_first_step_and_measurements() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    for step in range(1, 11):
        now[0] += 60.0 if step == 1 else 2.0
        if step in (1, 10):
            pace.mark(step)
    assert pace.seconds_left(90, measurements=2) == pytest.approx(180)
    now[0] += 30.0
    pace.measured(30.0)
    now[0] += 20.0
    pace.mark(20)
    assert pace.seconds_left(80, measurements=1) == pytest.approx(160 + 30)


def test_the_first_step_is_better_than_nothing() -> None:
    """As where a run goes on right before a line of the log."""
    now = [0.0]
    pace = Pace(199, clock=lambda: now[0])
    now[0] += 3.0
    for _ in range(2):
        pace.mark(200)
    assert pace.seconds_left(10, measurements=0) == pytest.approx(30)
