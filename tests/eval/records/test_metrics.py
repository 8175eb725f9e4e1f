"""The figures, by hand."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from eval.records import metrics
from eval.records.figures_schema import DraftUse
from eval.runtime.request import Output


def made(emitted: int, accepted: Sequence[int], reached: Sequence[int], **rest: Any) -> Output:
    return Output([0] * (1 + emitted), "length", list(accepted), list(reached), **rest)


WHOLE = made(emitted=7, accepted=(3, 0, 1), reached=(3, 1, 2))  # 3+1, 0+1, 1+1 tokens
CUT = made(emitted=5, accepted=(2, 2), reached=(3, 2))  # 2+1, then 2 and the text ended


def test_tau_pools_tokens_and_rounds_and_counts_the_bonus_token() -> None:
    assert metrics.tau([WHOLE]) == 7 / 3
    assert metrics.tau([WHOLE, CUT]) == 12 / 5  # not the mean of 7/3 and 5/2
    assert metrics.tau([made(9, (0,) * 9, (0,) * 9)]) == 1  # plain decoding
    assert math.isnan(metrics.tau([made(0, (), ())]))  # the text ended with the prefill's token


def test_tau_by_position_puts_each_round_where_its_root_stands() -> None:
    near = made(emitted=7, accepted=(3, 0, 1), reached=(3, 1, 2), start=123)  # roots at 123, 127, 128
    far = made(emitted=5, accepted=(2, 2), reached=(3, 2), start=255)  # roots at 255, 258; the last bonus cut off
    bins = metrics.tau_by_position([near, made(0, (), (), start=5), far])
    found = [(b.start, b.to, b.mean, b.rounds) for b in bins]
    assert found == [(0, 128, 5 / 2, 2), (128, 256, (2 + 3) / 2, 2), (256, 512, 2.0, 1)]
    assert [b.ci95 is None for b in bins] == [True, False, True]  # one prompt has no spread
    assert sum(b.mean * b.rounds for b in bins) == 7 + 5


def test_acceptance_is_conditional_on_the_depths_before() -> None:
    # depth 1: 2 of 3; depth 2: 1 of 2; depth 3: 1 of 1
    assert metrics.acceptance_by_depth([WHOLE], 3) == [2 / 3, 1 / 2, 1.0]
    # A cut round is no evidence of the depth it never reached: depth 3 was tested by the first round only, and refused
    assert metrics.acceptance_by_depth([CUT], 3) == [1.0, 1.0, 0.0]
    # A last token is no gain where plain decoding would have given one too: depth and histogram agree with tau
    short = [made(3, (0, 0, 1), (1, 1, 1)), made(1, (1,), (1,))]
    assert metrics.acceptance_by_depth(short, 2) == [0.0, None]
    assert (metrics.tau(short), metrics.accepted_histogram(short, 2)) == (1, [4, 0, 0])
    histogram = metrics.accepted_histogram([WHOLE, CUT], 3)
    assert sum(k * n for k, n in enumerate(histogram)) / 5 + 1 == metrics.tau([WHOLE, CUT])


def there(interval: metrics.Interval | None) -> metrics.Interval:
    assert interval is not None
    return interval


def test_a_bootstrap_interval_covers_a_known_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    drawn = [there(metrics.ratio_interval(list(rng.normal(2.0, 1.0, size=60)), [1.0] * 60)) for _ in range(100)]
    assert 88 <= sum(low <= 2.0 <= high for low, high in drawn) <= 100


def test_what_prompts_have_in_common_drops_out() -> None:
    assert metrics.rate_ratio(([6, 4], [2.0, 2.0]), ([3, 2], [2.0, 2.0])) == pytest.approx(2.0)
    lengths = [float(x) for x in np.random.default_rng(3).uniform(1, 50, size=40)]  # prompts differ fiftyfold in length
    halves = [length / 2 for length in lengths]
    rates = metrics.rate_ratio_interval((lengths, halves), (lengths, lengths))
    for low, high in (there(metrics.ratio_interval(lengths, halves)), there(rates)):
        assert low == pytest.approx(2.0) and high == pytest.approx(2.0)


def test_one_unit_that_gave_something_has_no_interval() -> None:
    nothing = made(0, (), ())
    assert metrics.tau_interval([WHOLE]) is None and metrics.rate_ratio_interval(([], []), ([], [])) is None
    assert metrics.tau_interval([nothing, WHOLE, nothing]) is None
    assert metrics.tau_interval([nothing, WHOLE, CUT]) is not None
    assert metrics.ratio_interval([0.0, 2.0], [0.0, 1.0]) is None
    assert metrics.rate_ratio_interval(([0, 4], [0.0, 2.0]), ([0, 4], [0.0, 1.0])) is None


def test_a_loop_is_a_tail_that_repeats() -> None:
    for period in (1, 2, 7, 16):
        assert metrics.is_loop([99, 98, *(i % period for i in range(48))])
    assert not metrics.is_loop([i % 17 for i in range(200)])  # too long a period
    assert not metrics.is_loop([0] * 47)  # ended by itself before
    assert not metrics.is_loop([0] * 100 + [1])
    assert metrics.loop_share([[0] * 48, list(range(48))]) == 0.5
    assert metrics.loop_share([]) == 0.0


def test_a_rounds_time_is_shared_among_its_tokens() -> None:
    seconds = metrics.token_seconds(made(6, [2, 0, 2], [3, 1, 2], first_round=1), [9.0, 0.3, 0.2, 0.1, 9.0])
    assert seconds == pytest.approx([0.1, 0.1, 0.1, 0.2, 0.05, 0.05])
    assert sum(seconds) == pytest.approx(0.6), "no time is lost or counted twice"
    spread = metrics.token_percentiles([0.001 * n for n in range(1, 102)])
    assert dict(spread) == pytest.approx({"p50": 51.0, "p95": 96.0, "p99": 100.0})
    assert all(math.isnan(value) for value in dict(metrics.token_percentiles([])).values())


def test_rounds_that_a_lookup_drafted_are_counted_as_tau_counts_them() -> None:
    whole = made(7, [2, 0, 2], [3, 1, 3], copied=[True, True, False])
    cut = made(2, [2], [3], copied=[True])  # without its bonus token
    assert metrics.use_of_lookup([whole, cut]) == DraftUse(rounds=3, accepted=2 + 0 + 1)
