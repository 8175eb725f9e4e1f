"""A stop string ends a generation at the token that completes it, however the tokens came."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from eval.runtime.request import StopWatch
from eval.runtime.sampling import Sampling
from heads.target.load import load_target, load_tokenizer
from heads.target.model import FrozenTarget
from tests.small_targets import open_engine


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir), dtype=torch.float64)


def test_the_earliest_completing_token_wins(tiny_target_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_target_dir))
    text = "def f(x):\n    return x\n\ndef g"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for stop in ("return", "\n\n", "f(", "g", ":", "nowhere"):
        whole = StopWatch([stop], tokenizer).find(tokens)
        expected = next((i for i in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:i])), None)
        assert whole == expected
        piecewise = StopWatch([stop], tokenizer)
        found = [piecewise.find(tokens[:i]) for i in range(1, len(tokens) + 1)]
        assert next((place for place in found if place is not None), None) == expected


def test_long_outputs_are_read_by_their_tail(tiny_target_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_target_dir))
    tokens = tokenizer.encode("a = 1\n" * 200 + "END", add_special_tokens=False)
    assert StopWatch(["END"], tokenizer).find(tokens) == len(tokens)


@pytest.mark.parametrize("poll_interval", [1, 7])
@pytest.mark.parametrize("drafting", [False, True])
def test_outputs_end_with_the_stop_string(
    drafting: bool, poll_interval: int, target: FrozenTarget, scripted_head: Callable[..., Any], tiny_target_dir: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_target_dir))
    prompt, sampling = [10, 20, 30], Sampling(temperature=1.0, seed=2)
    free = (
        open_engine(target, None, max_length=128).generate([Request(prompt, 40, sampling, ignore_eos=True)])[0].tokens
    )
    assert len(set(free)) > 10
    for end in (1, 9):
        stop = str(tokenizer.decode(free[:end]))[-3:]
        first = next(i for i in range(1, 41) if stop in tokenizer.decode(free[:i]))
        engine = open_engine(target, None, max_length=128, poll_interval=poll_interval, tokenizer=tokenizer)
        if drafting:
            head = scripted_head(target, [[*prompt, *free]], right=0.9)
            engine = open_engine(
                target, head, "chain:4", batch_size=2, max_length=128, poll_interval=poll_interval, tokenizer=tokenizer
            )
        requests = [Request(prompt, 40, sampling, stop=(stop, "\0never"), ignore_eos=True)] * 3
        streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}

        def take(index: int, tokens: list[int], streamed: dict[int, list[int]] = streamed) -> None:
            streamed[index] += tokens

        for output in engine.generate(requests, on_tokens=take):
            assert output.tokens == free[:first]
            assert output.finish_reason == "stop"
            assert output.rounds == len(output.accepted) == len(output.reached)
            assert sum(output.accepted) + output.rounds - (first - 1) in (0, 1)
        assert list(streamed.values()) == [free[:first]] * 3
