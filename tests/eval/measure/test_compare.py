"""The comparison of plain and speculative decoding, and the audit that compares their tokens."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from eval.data.prompts import Prompt
from eval.measure.compare import Comparison, compare, split_units
from eval.measure.figures import figures, find_differences, top_two_margins
from eval.records.figures_schema import Turns
from eval.records.measure_settings import BenchSettings
from eval.records.speedup_checks import MACHINE_BUSY, why_unreliable
from eval.runtime.engine import Engine, Timings
from heads.core.tree import Proposal, parse_shape
from heads.targets.frozen_target import FrozenTarget
from tests.eval.runtime.test_graph import Tape
from tests.support.annotations import Patch
from tests.support.small_targets import make_drafter
from tests.support.switches import as_on_a_gpu

SHAPES = [parse_shape("chain:3"), parse_shape("tree:3x2x6")]


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def run(request: Any, tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: list[Prompt]) -> Comparison:
    settings = BenchSettings(max_new_tokens=24, batch_size=2, repeats=2, seed=5)
    return compare(tiny_target, [(pair_head, shape) for shape in SHAPES], tiny_prompts, request.param, settings)


def test_every_variant_decodes_every_prompt_in_every_repeat(run: Comparison) -> None:
    for variant in [run.plain, *run.drafting]:
        assert [sorted(outputs) for outputs in variant.outputs] == [[0, 1, 2, 3, 4, 5]] * 2
        assert all(seconds > 0 for seconds in run.rate(variant, run.turns(range(3)))[1])
    for breakdown in run.breakdowns:
        assert set(breakdown) == {"draft", "verify", "accept", "commit", "plain"} and min(breakdown.values()) > 0
    assert [request.sampling.seed for request in run.requests] == [5, 6, 7, 8, 9, 10]
    tokens = 2 * sum(len(run.plain.outputs[0][i].tokens) - 1 for i in (0, 1))
    assert run.rate(run.plain, run.turns([0]))[0] == [tokens, 0, 0]


def test_cores_that_others_use_are_recorded_and_no_speedup_is_reliable(
    tiny_target: FrozenTarget, pair_head: Any, tiny_prompts: list[Prompt], monkeypatch: Patch
) -> None:
    monkeypatch.setattr("eval.measure.compare.busy_cores", lambda device: 1.9)
    given: Any = tiny_target, [(pair_head, SHAPES[0])], tiny_prompts, 0.0, BenchSettings(max_new_tokens=24)
    timed, counted = (compare(*given, phases=phases) for phases in (True, False))
    m = figures(timed, timed.drafting[0], [], range(len(timed.units)))
    assert m.busy_cores == 1.9 and why_unreliable(m) == MACHINE_BUSY and counted.others is None


def test_the_margin_is_by_how_much_the_chosen_token_won(run: Comparison, tiny_target: FrozenTarget) -> None:
    request, output = run.requests[0], run.plain.outputs[0][0].tokens
    (margin,) = top_two_margins(tiny_target, [(request, output[:5])])
    assert margin > 0
    if request.sampling.temperature == 0:
        logits = tiny_target.model(torch.tensor([[*request.prompt, *output[:5]]])).logits[0, -1]
        best = logits.float().log_softmax(-1).topk(2)
        assert int(best.indices[0]) == output[5]
        assert margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)


def test_units_hold_one_suite_and_category_each() -> None:
    prompts = [Prompt("0", suite, category, "", (1,)) for suite, category in ("ax", "ax", "ax", "ay", "ay", "by")]
    assert split_units(prompts, 2) == [[0, 1], [2], [3, 4], [5]]
    assert split_units(prompts, 1) == [[0], [1], [2], [3], [4], [5]]


def paced(run: Comparison, repeats: int) -> Comparison:
    """The same outputs in so many repeats: a plain step takes 4 ms, a round 5 ms."""
    made = []
    for variant, seconds in zip((run.plain, *run.drafting), (0.004, 0.005, 0.005), strict=True):
        rounds = {unit: variant.timings[0][unit].rounds for unit in range(len(run.units))}
        timings = [
            {unit: Timings(round_seconds=[seconds] * n, decode_seconds=seconds * n) for unit, n in rounds.items()}
            for _ in range(repeats)
        ]
        made.append(replace(variant, outputs=[dict(variant.outputs[0]) for _ in range(repeats)], timings=timings))
    return replace(run, plain=made[0], drafting=made[1:])


def test_the_slowest_tenth_of_turns_is_left_out_on_both_sides(run: Comparison) -> None:
    for repeats, left_out in ((3, 0), (4, 1), (7, 2)):  # of 9, 12 and 21 turns
        quiet, paused = paced(run, repeats), paced(run, repeats)
        for place, slow in enumerate([paused.plain, paused.drafting[1]][:left_out]):  # in two turns, on one side each
            timing = slow.timings[place][2]
            timing.round_seconds[0] += 3.0
            timing.decode_seconds += 3.0
        for variant in (0, 1):
            calm, found = (figures(c, c.drafting[variant], [], range(3)) for c in (quiet, paused))
            assert found.turns == Turns(timed=3 * repeats - left_out, left_out=left_out)
            if left_out:
                assert (2, 0) in paused.timed_turns(range(3)) and (0, 2) not in paused.timed_turns(range(3))
            for name in ("baseline", "speculative"):
                rates = [getattr(each, name).tokens_per_second for each in (found, calm)]
                assert rates[0] == pytest.approx(rates[1], rel=0.1)
            assert found.tau == calm.tau


def test_a_speedup_is_of_each_sides_own_tokens_and_seconds(run: Comparison) -> None:
    """Though a near-tie ended one of the plain texts early."""
    short = paced(run, 1)
    output = short.plain.outputs[0][4]
    short.plain.outputs[0][4] = replace(output, tokens=output.tokens[:3], accepted=[0, 0], reached=[0, 0])
    found = figures(short, short.drafting[0], [], range(3))
    assert found.baseline is not None and found.speedup is not None
    rates = found.speculative.tokens_per_second, found.baseline.tokens_per_second
    assert found.speedup.measured == pytest.approx(rates[0] / rates[1])
    assert found.speedup.tokens == sum(short.rate(short.plain, short.turns(range(3)))[0])
    if run.requests[0].sampling.temperature == 0:
        assert found.speedup.ratio_of_medians == pytest.approx(found.tau.mean * 4 / 5)


@pytest.mark.parametrize("repeat", [0, 1])
def test_a_divergence_in_any_repeat_is_recorded_with_its_place_tokens_and_margin(
    run: Comparison, tiny_tokenizer: PreTrainedTokenizerBase, repeat: int
) -> None:
    variant = run.drafting[1]
    i = next(i for i, output in run.plain.outputs[0].items() if len(output.tokens) == 24)
    tokens = variant.outputs[repeat][i].tokens
    kept, tokens[5] = tokens[5], (tokens[5] + 1) % 128
    try:
        (found,) = find_differences(run, variant, tiny_tokenizer)
    finally:
        tokens[5] = kept
    assert not found.near_tie and (found.prompt, found.position, found.repeat) == (str(i), 5, repeat)
    assert (found.plain_token, found.token, found.tree) == (kept, (kept + 1) % 128, "tree:3x2x6")
    assert found.top_two_margin > 0 and found.flips[0].position == 5


def test_on_a_gpu_the_phases_are_those_of_the_graphs(
    tiny_target: FrozenTarget, tiny_prompts: list[Prompt], monkeypatch: Patch
) -> None:
    """They leave out the time that a head's own Python takes beside its operations."""

    def taped(*arguments: Any) -> Engine:
        engine = Engine(*arguments)
        engine.rounds.capture = Tape
        return engine

    head, settings = make_drafter("early_exit:2", tiny_target), BenchSettings(max_new_tokens=6, batch_size=2, repeats=1)
    given: Any = tiny_target, [(head, parse_shape("chain:2"))], tiny_prompts[:2], 0.0, settings
    propose = head.propose

    def slowly(*arguments: Any) -> Proposal:
        time.sleep(0.1)
        return propose(*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(head, "propose", slowly)
    with as_on_a_gpu():
        (launched,) = compare(*given).breakdowns
        monkeypatch.setattr("eval.measure.compare.Engine", taped)
        run = compare(*given)
    (replayed,) = run.breakdowns
    assert launched["draft"] > 0.1 > replayed["draft"]
    assert replayed.keys() == launched.keys() and min(replayed.values()) > 0
    outputs = run.drafting[0].outputs[0]
    assert [o.tokens for o in outputs.values()] == [o.tokens for o in run.plain.outputs[0].values()]
