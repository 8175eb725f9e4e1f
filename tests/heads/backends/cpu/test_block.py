"""Heads that draft a block draft on the CPU kernels what they draft without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads.backends.cpu import library
from heads.backends.selection import CPU, TORCH
from heads.block.draft import DraftBlockHead
from heads.dflash import DFlash, DFlashConfig
from heads.dflash2 import DFlash2, DFlash2Config
from heads.dspark import DSpark, DSparkConfig
from tests.drafting import SMALL, agree
from tests.heads.backends.cpu.test_recurrent import narrowed, rounds
from tests.heads.published_heads import filled

pytestmark = pytest.mark.skipif(library.load() is None, reason="no C compiler")
CONFIG: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name != "draft_vocab_size"},
    **dict(aux_layer_ids=(2, 4, 5), mask_token_id=SMALL["vocab_size"] - 1, block_size=6, num_layers=3),
}
ALL_SLIDE: dict[str, Any] = dict(sliding_window=6, layer_types=("sliding_attention",) * 3, sliding_causal=False)
HEADS: dict[str, Callable[[], DraftBlockHead]] = {
    "dflash": lambda: DFlash(DFlashConfig(**CONFIG)),
    "dflash that is causal": lambda: DFlash(DFlashConfig(**CONFIG, causal=True)),
    "dflash with windows": lambda: DFlash(DFlashConfig(**CONFIG, sliding_window=7)),
    "dflash with windows alone": lambda: DFlash(DFlashConfig(**CONFIG, **ALL_SLIDE)),
    "dflash2": lambda: DFlash2(DFlash2Config(**CONFIG, conv_group_size=8, selector_rank=5)),
    "dflash2 of three taps": lambda: DFlash2(
        DFlash2Config(**CONFIG, conv_kernel_size=3, conv_group_size=4, sliding_window=7)
    ),
    "dspark": lambda: DSpark(DSparkConfig(**CONFIG, markov_rank=16)),
    "dspark, gated": lambda: DSpark(DSparkConfig(**CONFIG, markov_rank=16, markov_head_type="gated")),
    "dspark, rnn": lambda: DSpark(DSparkConfig(**CONFIG, markov_rank=16, markov_head_type="rnn")),
}


def make_head(name: str) -> Any:
    return narrowed(filled(HEADS[name]()))


@pytest.mark.parametrize("shape", ["chain:1", "chain:5", "tree:4x3x12", "static:3.2.1"])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_without_kernels(name: str, shape: str) -> None:
    head = make_head(name)
    agree(rounds(head, shape, CPU), rounds(head, shape, TORCH))


def test_weights_that_change_are_read_by_the_next_state() -> None:
    head = make_head("dspark")
    before = rounds(head, "chain:5", CPU)
    with torch.no_grad():
        head.layers[1].self_attn.k_proj.weight.mul_(-3)
    after = rounds(head, "chain:5", CPU)
    assert any(not torch.equal(a.scores, b.scores) for a, b in zip(before, after, strict=True))
