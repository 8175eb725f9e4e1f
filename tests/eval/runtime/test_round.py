"""A round leaves rows that are done alone."""

from collections.abc import Callable

import pytest
import torch

from eval.runtime.engine import Request
from eval.runtime.round import read_prompts
from heads.target.model import FrozenTarget
from tests.small_targets import make_drafter, open_engine

TargetOf = Callable[[str], FrozenTarget]


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
