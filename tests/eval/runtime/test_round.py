"""A round never waits for the host, allocates no new state, and leaves rows that are done alone."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling import Sampling
from heads.target.frozen import FrozenTarget
from heads.tree import parse_shape
from tests.small_targets import make_drafter, open_engine

TargetOf = Callable[[str], FrozenTarget]


TREE = "tree:3x3x10"
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=3)]


@pytest.mark.parametrize(
    ("family", "drafter", "shape", "rule"),
    [
        *((family, "none", "none", "match") for family in ("llama", "gemma3_text")),
        *((family, "medusa", shape, "match") for family in ("llama", "gemma3_text") for shape in ("chain:3", TREE)),
        *(("llama", "medusa", shape, "ratio") for shape in ("chain:3", "static:3.2")),
        ("llama", "medusa", "chain:3", "block"),
        ("llama", "lookup:3", "chain:3", "match"),
        *(("llama", "early_exit:2", shape, "match") for shape in ("chain:3", TREE)),
        *((family, "draft", shape, "match") for family in ("llama", "gemma2") for shape in ("chain:3", TREE)),
        ("llama", "draft", "static:3.2.1", "match"),
    ],
)
def test_a_round_never_waits_for_the_host(
    family: str, drafter: str, shape: str, rule: str, target_of: TargetOf, no_waiting: Any
) -> None:
    target = target_of(family)
    options = EngineOptions(shape=parse_shape(shape), batch_size=2, max_length=128, rule=rule)
    engine = Engine(target, make_drafter(drafter, target), options)
    requests = [Request([5, 6, 7], 40, sampling, ignore_eos=True) for sampling in SAMPLINGS]
    with torch.inference_mode():
        read_prompts(engine.decoder, dict(enumerate(requests)))
        state = engine.decoder.state
        pointers = [getattr(state, f.name).data_ptr() for f in fields(state)]
        with no_waiting():
            for _ in range(3):
                engine.decoder.round(128)
        assert [getattr(state, f.name).data_ptr() for f in fields(state)] == pointers
        assert (state.rounds == 3).all()
        if drafter == "draft":
            assert torch.equal(engine.decoder.head_state.length, state.length)


@pytest.mark.parametrize("shape", ["none", "chain:3", "tree:3x3x10"])
def test_a_row_that_is_done_stays_as_it_is(shape: str, target_of: TargetOf) -> None:
    target = target_of("llama")
    head = make_drafter("none" if shape == "none" else "medusa", target)
    engine = open_engine(target, head, shape, batch_size=2, max_length=128)
    with torch.inference_mode():
        newcomers = {0: Request([5, 6, 7], 2, ignore_eos=True), 1: Request([8, 9], 60, ignore_eos=True)}
        read_prompts(engine.decoder, newcomers)
        engine.decoder.round(64)
        state = engine.decoder.state
        assert state.done.tolist() == [True, False]
        recorded = ("length", "output_length", "rounds")
        before = {name: getattr(state, name)[0].item() for name in recorded}
        output = state.output[0, :2].tolist()
        for _ in range(4):
            engine.decoder.round(64)
        assert {name: getattr(state, name)[0].item() for name in recorded} == before
        assert state.output[0, :2].tolist() == output
        assert state.rounds[1] == 5 and not state.done[1]
