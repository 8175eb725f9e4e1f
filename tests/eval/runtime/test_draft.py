"""A draft model in the runtime changes no token of any output, and is always right where it is the target."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from eval.runtime.sampling import Sampling
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from tests.small_targets import open_engine

TargetOf = Callable[[str], FrozenTarget]


def draft_of(target: FrozenTarget) -> Any:
    """Two of the target's three layers: right often enough that paths of every length are accepted."""
    return build_head("draft", {"layers": [0, 2]}, target, torch.ones(target.vocab_size)).to(target.dtype)


@pytest.mark.parametrize(
    ("family", "batch_size"),
    [("llama", 1), ("llama", 8), ("gemma2", 8), ("gpt2", 8), ("mistral-window", 8), ("deepseek_v3", 8)],
)
def test_the_output_is_the_targets_own(family: str, batch_size: int, target_of: TargetOf) -> None:
    """Greedy and sampled, chain and trees, every batch; and drafts are accepted at every depth."""
    target = target_of(family)
    requests = [
        Request([5, 6, 7 + i][: 1 + i % 3], 12 + i % 3, Sampling(temperature=float(i % 2), seed=i), ignore_eos=True)
        for i in range(4 if batch_size == 1 else 10)
    ]
    plain = open_engine(target, None, batch_size=4, max_length=128).generate(requests)
    for shape in ("chain:3", "tree:3x3x10", "static:3.2"):
        engine = open_engine(target, draft_of(target), shape, batch_size=batch_size, max_length=128)
        outputs = engine.generate(requests)
        assert [output.tokens for output in outputs] == [output.tokens for output in plain], shape
        accepted = [number for output in outputs for number in output.accepted]
        assert {0, 1, 2} <= set(accepted), shape


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float64), ("gemma2", torch.float64), ("gpt2", torch.float64), ("llama", torch.float32)],
)
def test_a_draft_that_is_the_target_is_always_right(family: str, dtype: torch.dtype, target_of: TargetOf) -> None:
    """Whatever was lost of its cache would show as a wrong guess, in the model's own attention as in the native
    decoders'. (A dynamic tree may prune the right path.)"""
    model: Any = copy.deepcopy(target_of(family).model)
    target = FrozenTarget(model.to(dtype), family)
    head: Any = build_head("draft", {"fresh": {}}, target, torch.ones(target.vocab_size))
    head.model.load_state_dict(target.model.state_dict())
    head = head.to(target.dtype)
    requests = [
        Request([5, 6, 7 + i], 25, Sampling(temperature=float(i % 2), seed=i), ignore_eos=True) for i in range(3)
    ]
    for shape in ("chain:3", "static:2.1.1", "static:3.2.1"):
        outputs = open_engine(target, head, shape, batch_size=2, max_length=128).generate(requests)
        assert all(output.rounds == 6 and output.accepted == [3] * 6 for output in outputs), shape
