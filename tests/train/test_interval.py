"""The time left is that of the steps and measurements to come, as the latest ones were."""

import pytest

from train.interval import Pace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that it shows, to be moved."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_the_time_left_leaves_out_the_first_step_and_measurements(clock: list[float]) -> None:
    pace = Pace()
    for step in range(1, 11):
        clock[0] += 60.0 if step == 1 else 2.0
        if step in (1, 10):
            pace.mark(step)
    assert pace.seconds_left(90, measurements=2) == pytest.approx(180)
    clock[0] += 30.0
    pace.measured(30.0)
    clock[0] += 20.0
    pace.mark(20)
    assert pace.seconds_left(80, measurements=1) == pytest.approx(160 + 30)


def test_the_first_step_is_better_than_nothing(clock: list[float]) -> None:
    """As where a run goes on right before a line of the log."""
    pace = Pace(199)
    clock[0] += 3.0
    for _ in range(2):
        pace.mark(200)
    assert pace.seconds_left(10, measurements=0) == pytest.approx(30)


def test_a_machine_that_becomes_slower_is_noticed(clock: list[float]) -> None:
    pace = Pace()
    for step in range(0, 2000, 10):
        pace.mark(step)
        clock[0] += 10.0 if step < 1000 else 40.0
    assert pace.seconds_left(100, measurements=0) == pytest.approx(400)
