"""Checks of an engine that is built: kernels are right, or left out with one warning; the model is able."""

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.engine import Request
from eval.runtime.sampling_params import Sampling
from heads.core.errors import warn_once
from heads.kernels.choose_token import choose_in_tiles
from heads.kernels.tree_attention import tree_attention
from heads.targets import cached_decoder, native_decoder
from tests.eval.runtime.conftest import target_of
from tests.support.annotations import Log, Patch
from tests.support.refusals import refused
from tests.support.small_targets import make_drafter, make_target, open_engine, texts
from tests.support.switches import kernels_on_cpu

interpreted = pytest.mark.skipif(torch.cuda.is_available() or not find_spec("triton"), reason="no interpreter")
pytestmark = pytest.mark.filterwarnings("ignore:(All-NaN|invalid value)")  # by the interpreter's numpy
SIZES: Any = dict(hidden_size=64, intermediate_size=64, vocab_size=128)
REQUESTS = [Request([5, 6, 7], 8, ignore_eos=True)]


def failing(*given: Any, **options: Any) -> Tensor:
    raise RuntimeError("OutOfResources: shared memory, Required: 147456, Hardware limit: 101376\nmore")


def off(*given: Any, **options: Any) -> Tensor:
    return tree_attention(*given, **options) * 1.01


def unsteady(*given: Any, **options: Any) -> Tensor:
    return tree_attention(*given, **options) + 1e-6 * torch.rand(())


def next_token(*given: Any, **options: Any) -> Tensor:
    return choose_in_tiles(*given, **options) + 1


@interpreted
@pytest.mark.parametrize(
    ("module", "name", "wrong", "words"),
    [
        (native_decoder, "tree_attention", failing, "OutOfResources: shared memory"),
        (native_decoder, "tree_attention", off, "tree_attention is off by"),
        (native_decoder, "tree_attention", unsteady, "tree_attention repeats itself differently"),
        (cached_decoder, "choose_in_tiles", next_token, "choose takes a token"),
    ],
)
def test_a_kernel_that_is_wrong_is_left_out(
    module: Any, name: str, wrong: Callable[..., Tensor], words: str, monkeypatch: Patch, caplog: Log
) -> None:
    target = make_target("llama", torch.float32, **SIZES)
    expected = open_engine(target, None, max_length=64).generate(REQUESTS)
    monkeypatch.setattr(module, name, wrong)
    warn_once.cache_clear()
    with kernels_on_cpu():
        engine = open_engine(target, None, max_length=64)
        assert engine.decoder.target.reads_masks
        assert texts(engine.generate(REQUESTS)) == texts(expected)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and words in caplog.text


@interpreted
def test_kernels_that_are_right_decode(caplog: Log) -> None:
    target = make_target("qwen3", torch.float32, **SIZES)
    head, shape = make_drafter("eagle3", target), "tree:2x2x4"
    samplings = Sampling(), Sampling(repetition_penalty=0.1)  # a row that needs its logits beside one that does not
    requests = [replace(REQUESTS[0], max_new_tokens=3, sampling=sampling) for sampling in samplings]
    expected = open_engine(target, head, shape, batch_size=2, max_length=64).generate(requests)
    assert expected[0].tokens != expected[1].tokens
    with kernels_on_cpu():
        engine = open_engine(target, head, shape, batch_size=2, max_length=64)
        assert not engine.decoder.target.reads_masks and engine.decoder.target.in_tiles
        assert texts(engine.generate(requests)) == texts(expected)
    assert not caplog.records


@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask"])
def test_a_decoder_that_ignores_what_it_is_given_is_found_out(ignored: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(native_decoder, "CLASSES", set())  # the model's own code
    target = copy.deepcopy(target_of("llama"))
    forward = target.base.forward

    @functools.wraps(forward)
    def deaf(**given: Any) -> Any:
        if given["use_cache"]:  # the model's own pass stays as it is
            given[ignored] = given[ignored] * 0
        return forward(**given)

    target.base.forward = deaf
    assert "does not take tree masks, positions and states" in refused(open_engine, target, None, max_length=64)


@pytest.mark.parametrize(
    ("dtype", "weight", "value", "fault"),
    [
        ("float32", "mlp.up_proj", torch.nan, "from layer 1 on, and model.layers.1.mlp.up_proj.weight holds"),
        ("float16", "mlp.down_proj", 6e4, "from layer 1 on; float16 overflows above 65504: ask for bfloat16"),
        ("bfloat16", "mlp.down_proj", 3e38, "from layer 1 on; bfloat16 may not suffice: ask for float32"),
    ],
)
def test_states_that_are_not_finite_are_said_to_be_so(dtype: str, weight: str, value: float, fault: str) -> None:
    target = copy.deepcopy(target_of("llama"))
    target.model.to(getattr(torch, dtype))
    target.layers[1].get_parameter(f"{weight}.weight").data.fill_(value)
    for check in (target.check, lambda: open_engine(target, None, max_length=64)):
        assert f"the target's states are not finite {fault}" in refused(check)
