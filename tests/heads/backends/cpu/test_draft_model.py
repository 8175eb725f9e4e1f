"""A draft model's chain in one call of the CPU kernels is the chain drafted step by step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from eval.runtime.sampling import Sampling
from heads.backends.base import take_newest
from heads.backends.cpu import library
from heads.backends.cpu.decoder import CpuDecoder
from heads.backends.cpu.draws import CompiledPick, CpuSampling
from heads.backends.selection import CPU
from heads.base import Observation
from heads.draft_model import DraftState
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, parse_shape
from tests.closeness import assert_close
from tests.heads.backends.cpu.test_kernels import BASE, VARIANTS

pytestmark = pytest.mark.skipif(library.load() is None, reason="no C compiler")
B, V, COMMON = 3, 61, 50


def make_head(variant: str) -> Any:
    """Two layers of a random target in float32, of whose tokens not all are common."""
    config = AutoConfig.for_model(variant.split()[0], **{**BASE, **VARIANTS[variant]})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        target = FrozenTarget(AutoModelForCausalLM.from_config(config, dtype=torch.float32), variant)
        head = build_head("draft", {"layers": [0, 2]}, target, torch.ones(target.vocab_size)).float()
    head.config = replace(head.config, common_size=COMMON)
    return head


def sampling() -> CpuSampling:
    rows = CpuSampling(B)
    rows.set_row(1, Sampling(temperature=0.8, seed=7))
    return rows


def rounds(head: Any, shape: str, how: str) -> tuple[list[Proposal], list[Tensor]]:
    """Prompts of many tokens, of few and, at first, of none; then rounds that accept a few tokens each. What was
    drafted after each, and from what."""
    generator = torch.Generator().manual_seed(2)
    state: DraftState = head.new_state(None, batch_size=B, capacity=150, shape=parse_shape(shape), backend=CPU)
    pick: Any = sampling().pick
    assert isinstance(pick, CompiledPick) and isinstance(state.decoder, CpuDecoder)
    if how != "call":
        pick = lambda *draw, known=pick: known(*draw)  # noqa: E731
    if how == "tensors":
        state.backend = replace(CPU, take_newest=take_newest)
    proposals, stood, start = [], [], torch.zeros(B, dtype=torch.int64)
    root = torch.randint(V, (B,), generator=generator)
    for counts in ([70, 3, 0], [2, 1, 9], [1, 3, 2], [0, 3, 1], [3, 0, 2], [2, 2, 1]):
        count, M = torch.tensor(counts), max(3, *counts)
        tokens = torch.randint(V, (B, M + 1), generator=generator)
        tokens[:, 0] = root
        nodes = None if start.min() == 0 else torch.arange(M).expand(B, M)
        nothing = torch.zeros(B, M, 0)
        head.extend(state, Observation(tokens, nothing, nothing, start.clone(), count, nodes))
        proposals.append(head.propose(state, pick))
        stood.append(torch.stack([state.previous, state.root, state.length]).clone())
        start += count
        root = tokens.gather(1, count[:, None])[:, 0]
    return proposals, stood


@pytest.mark.parametrize("shape", ["chain:1", "chain:4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_drafts_what_steps_draft(variant: str, shape: str) -> None:
    head = make_head(variant)
    ours, from_ours = rounds(head, shape, "call")
    assert max(int(one.tokens[:, 1:].max()) for one in ours) < COMMON
    for how in ("steps", "tensors"):
        theirs, from_theirs = rounds(head, shape, how)
        assert all(torch.equal(one, other) for one, other in zip(from_ours, from_theirs, strict=True))
        for one, other in zip(ours, theirs, strict=True):
            for field in ("tokens", "parents", "depths"):
                assert torch.equal(getattr(one, field), getattr(other, field)), field
            assert_close(one.scores, other.scores, roundings=256)


def test_what_kernels_cannot_draft_goes_by_steps() -> None:
    head = make_head("llama").double()
    state = head.new_state(None, batch_size=1, capacity=60, shape=parse_shape("chain:2"), backend=CPU)
    rows = sampling()
    tokens, nothing, one = torch.randint(V, (1, 6)), torch.zeros(1, 5, 0), torch.ones(1, dtype=torch.int64)
    head.extend(state, Observation(tokens, nothing, nothing, 0 * one, 5 * one, None))
    assert head.propose(state, rows.row(1).pick).tokens.shape == (1, 3)
