"""No round makes the host wait for a device: every operation of it, with the kernels on and all code for CPUs off, is
one that a GPU takes in without a word."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eval.runtime.engine import Engine, Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling import Sampling
from heads.tree import parse_shape
from tests.small_targets import make_drafter, make_target, open_engine
from tests.switches import as_on_a_gpu, kernels_on_cpu, without_c
from tests.waiting import NoWaiting

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU torch itself refuses to wait")


@pytest.fixture(autouse=True)
def every_kernel() -> Iterator[None]:
    with without_c(), kernels_on_cpu(), as_on_a_gpu():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "shape", "rule"),
    [
        ("llama", "eagle3", "tree:3x3x8", "match"),
        ("qwen3_moe", "medusa", "static:3.2", "match"),
        ("llama", "mtp", "chain:2", "match"),
        ("llama", "draft", "tree:2x3x7", "match"),
        ("llama", "eagle3", "static:3.2", "ratio"),
    ],
)
def test_no_round_waits(family: str, kind: str, shape: str, rule: str) -> None:
    requests = [Request([5, 6, 7], 20, ignore_eos=True), Request([9, 8], 20, Sampling(0.9, top_k=9, seed=3), (), True)]
    engine = warm_engine(family, kind, shape, requests, rule=rule)
    with torch.inference_mode():
        before = engine.decoder.state.output_length.clone()
        with NoWaiting(constants=False):
            engine.decoder.round(64)
            engine.reports.send()
    assert (engine.decoder.state.output_length > before).all()


def warm_engine(family: str, kind: str, shape: str, requests: list[Request], **options: Any) -> Engine:
    """An engine with the requests in its rows and everything made that is made once."""
    sizes: Any = dict(hidden_size=64, intermediate_size=64, vocab_size=128, num_attention_heads=4)
    target = make_target(family, torch.float32, **sizes)
    options |= {"shape": parse_shape(shape), "batch_size": len(requests), "max_length": 64}
    engine = open_engine(target, make_drafter(kind, target), **options)
    with torch.inference_mode():
        read_prompts(engine.decoder, dict(enumerate(requests)))
        engine.decoder.round(64)
    return engine


def test_the_watch_sees_what_waits() -> None:
    x, mask = torch.arange(4), torch.tensor([True, False, True, False])
    for work in (
        lambda: x[mask],
        lambda: float(x.sum()),
        lambda: torch.tensor([1, 2]),
        lambda: x.repeat_interleave(x),
        lambda: x.masked_select(mask),
    ):
        with pytest.raises(AssertionError, match="wait"), NoWaiting(constants=False):
            work()
