"""Heads that draft a block draft on the CPU kernels what they draft without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads.backends.base import Backend
from heads.backends.cpu import library
from heads.backends.cpu.block import CpuBlock
from heads.backends.selection import CPU, TORCH
from heads.base import Observation, SharedLayers
from heads.block.draft import DraftBlockHead
from heads.dflash import DFlash, DFlashConfig
from heads.dspark import DSpark, DSparkConfig
from heads.tree import Proposal, parse_shape
from tests.heads.backends.cpu.test_recurrent import WIDTHS, D, V, likeliest

pytestmark = pytest.mark.skipif(library.load() is None, reason="no C compiler")
CONFIG: dict[str, Any] = {
    **{name: value for name, value in WIDTHS.items() if name not in ("draft_vocab_size", "depth")},
    **dict(aux_layer_ids=(2, 4, 5), mask_token_id=V - 1, block_size=6, num_layers=3),
}
HEADS: dict[str, Callable[[], DraftBlockHead]] = {
    "dflash": lambda: DFlash(DFlashConfig(**CONFIG)),
    "dflash that is causal": lambda: DFlash(DFlashConfig(**CONFIG, causal=True)),
    "dspark": lambda: DSpark(DSparkConfig(**CONFIG, markov_rank=16)),
}


def make_head(name: str) -> DraftBlockHead:
    torch.manual_seed(1)
    head = HEADS[name]()
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.3)
            parameter.copy_(parameter.bfloat16())  # as the kernels hold them
    return head


def rounds(head: DraftBlockHead, shape: str, backend: Backend) -> list[Proposal]:
    """Two rows with prompts of uneven length, then rounds of a few tokens each; a draft after every one."""
    generator = torch.Generator().manual_seed(2)
    table, out = torch.randn(2, V, D, generator=generator).bfloat16().float()
    shared = SharedLayers(lambda ids: table[ids], lambda hidden: hidden @ out.T, out)
    state = head.new_state(shared, batch_size=2, capacity=120, shape=parse_shape(shape), backend=backend)
    assert isinstance(state.steps, CpuBlock) == (backend is CPU)
    proposals, start = [], torch.zeros(2, dtype=torch.int64)
    for counts in ([90, 61], [5, 2], [1, 4], [4, 1], [0, 3], [2, 4]):
        count, M = torch.tensor(counts), max(6, *counts)
        tokens = torch.randint(V - 1, (2, M + 1), generator=generator)
        aux_hidden_states, hidden = (torch.randn(2, M, n * D, generator=generator) for n in (3, 1))
        head.extend(state, Observation(tokens, aux_hidden_states, hidden, start.clone(), count, None))
        proposals.append(head.propose(state, likeliest))
        start += count
    return proposals


@pytest.mark.parametrize("shape", ["chain:1", "chain:5", "tree:4x3x12", "static:3.2.1"])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_without_kernels(name: str, shape: str) -> None:
    head = make_head(name)
    for found, expected in zip(rounds(head, shape, CPU), rounds(head, shape, TORCH), strict=True):
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.parents, expected.parents)
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-4)


def test_weights_that_change_are_read_by_the_next_state() -> None:
    head = make_head("dspark")
    before = rounds(head, "chain:5", CPU)
    with torch.no_grad():
        head.layers[1].self_attn.k_proj.weight.mul_(-3)  # type: ignore[union-attr, operator]
    after = rounds(head, "chain:5", CPU)
    assert any(not torch.equal(a.scores, b.scores) for a, b in zip(before, after, strict=True))
