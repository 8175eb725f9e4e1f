"""Kernels that fail, are wrong or do not repeat themselves are left out with one warning, and the text is the same."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.engine import Request
from heads.errors import warn_once
from heads.target import cached, decoder
from heads.target.choose import choose_in_tiles
from heads.target.tree_attention import tree_attention
from tests.small_targets import make_drafter, make_target, open_engine, texts
from tests.switches import kernels_on_cpu

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs"),
    pytest.mark.filterwarnings("ignore:(All-NaN|invalid value)"),  # by the interpreter's numpy
]
SIZES: Any = dict(hidden_size=64, intermediate_size=64, vocab_size=128, num_attention_heads=4)
REQUESTS = [Request([5, 6, 7], 8, ignore_eos=True)]


def failing(*given: Any, **options: Any) -> Tensor:
    raise ValueError("OutOfResources: shared memory, Required: 147456, Hardware limit: 101376\nmore")


def off(*given: Any, **options: Any) -> Tensor:
    return tree_attention(*given, **options) * 1.01


def unsteady(*given: Any, **options: Any) -> Tensor:
    return tree_attention(*given, **options) + 1e-6 * torch.rand(())


def next_token(*given: Any, **options: Any) -> Tensor:
    return choose_in_tiles(*given, **options) + 1


@pytest.mark.parametrize(
    ("module", "name", "wrong", "words"),
    [
        (decoder, "tree_attention", failing, "OutOfResources: shared memory"),
        (decoder, "tree_attention", off, "tree_attention is off by"),
        (decoder, "tree_attention", unsteady, "tree_attention repeats itself differently"),
        (cached, "choose_in_tiles", next_token, "choose takes a token"),
    ],
)
def test_a_kernel_that_is_wrong_is_left_out(
    module: Any,
    name: str,
    wrong: Callable[..., Tensor],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = make_target("llama", torch.float32, **SIZES)
    expected = open_engine(target, None, max_length=64).generate(REQUESTS)
    monkeypatch.setattr(module, name, wrong)
    warn_once.cache_clear()
    with kernels_on_cpu():
        engine = open_engine(target, None, max_length=64)
        assert engine.decoder.step.decoder.reads_masks
        assert texts(engine.generate(REQUESTS)) == texts(expected)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and words in caplog.text


def test_kernels_that_are_right_decode(caplog: pytest.LogCaptureFixture) -> None:
    target = make_target("qwen3", torch.float32, **SIZES)
    head, shape = make_drafter("eagle3", target), "tree:3x3x8"
    expected = open_engine(target, head, shape, max_length=64).generate(REQUESTS)
    with kernels_on_cpu():
        engine = open_engine(target, head, shape, max_length=64)
        assert not engine.decoder.step.decoder.reads_masks and engine.decoder.step.decoder.in_tiles
        assert texts(engine.generate(REQUESTS)) == texts(expected)
    assert not caplog.records
