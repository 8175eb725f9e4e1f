"""Heads that recycle their state draft on the CPU kernels what they draft without."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.sampling import Sampling
from heads.backends.base import Backend
from heads.backends.cpu import library
from heads.backends.cpu.draws import CompiledPick, CpuSampling
from heads.backends.selection import CPU, TORCH
from heads.backends.torch.recurrent import TorchRecurrent
from heads.base import Observation, Pick, SharedLayers
from heads.tree import Proposal, parse_shape
from tests.closeness import assert_close
from tests.drafting import HEADS, SMALL, agree, head_rounds, some_head
from tests.heads.small_heads import greedy

pytestmark = pytest.mark.skipif(library.load() is None, reason="no C compiler")
D, V, HOST = SMALL["hidden_size"], SMALL["vocab_size"], torch.device("cpu")


def make_head(name: str) -> Any:
    return narrowed(some_head(name, HOST))


@torch.no_grad()
def narrowed(head: Any) -> Any:
    """The head with its weights as narrow as the kernels hold them."""
    for parameter in head.parameters():
        parameter.copy_(parameter.bfloat16())
    return head


def rounds(head: Any, shape: str, backend: Backend, *, table: bool = True, pick: Pick = greedy) -> list[Proposal]:
    return head_rounds(head, shape, backend, HOST, prompt=90, table=table, pick=pick)


@pytest.mark.parametrize("shape", ["chain:1", "chain:4", "tree:4x3x12", "static:3.2.1"])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_without_kernels(name: str, shape: str) -> None:
    head = make_head(name)
    ours = rounds(head, shape, CPU)
    rows = rounds(head, shape, CPU, table=False)
    assert all(torch.equal(one.scores, other.scores) for one, other in zip(ours, rows, strict=True))
    agree(ours, rounds(head, shape, TORCH, table=False))


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", HEADS)
def test_chains_drafted_in_one_call_are_those_drafted_step_by_step(name: str, depth: int, table: bool) -> None:
    head, rows = make_head(name), CpuSampling(2)
    rows.set_row(1, Sampling(temperature=0.8, seed=7))
    assert isinstance(rows.pick, CompiledPick)
    ours = rounds(head, f"chain:{depth}", CPU, table=table, pick=rows.pick)
    steps = rounds(head, f"chain:{depth}", CPU, table=table, pick=lambda *draw: rows.pick(*draw))
    for one, other in zip(ours, steps, strict=True):
        for field in ("tokens", "parents", "depths"):
            assert torch.equal(getattr(one, field), getattr(other, field)), field
        assert_close(one.scores, other.scores)


@pytest.mark.parametrize(("layout", "same"), [("mimo", True), ("qwen", False)])
def test_the_token_at_position_0_is_read_as_zeros_where_engines_do(layout: str, same: bool) -> None:
    """The one token of a prompt's second place decides what is drafted behind it, or does not."""
    head = make_head("mtp that reads every token" if layout == "qwen" else "mtp")
    table, out = torch.randn(2, V, D).bfloat16().float()
    shared = SharedLayers(
        embed_tokens=torch.nn.Embedding.from_pretrained(table), lm_head=lambda h: h @ out.T, lm_head_weight=out
    )
    hidden, start, count = torch.randn(1, 4, D), torch.zeros(1, dtype=torch.int64), torch.tensor([4])

    def scores(second: int, backend: Backend) -> Tensor:
        state = head.new_state(shared, batch_size=1, capacity=40, shape=parse_shape("chain:2"), backend=backend)
        tokens = torch.tensor([[3, second, 5, 7, 11]])
        head.extend(state, Observation(tokens, hidden[..., :0], hidden, start, count, None))
        made: Tensor = head.propose(state, greedy).scores
        return made

    for backend in (CPU, TORCH):
        assert torch.equal(scores(20, backend), scores(40, backend)) is same


def test_weights_that_change_are_read_by_the_next_state_and_stay_where_they_are() -> None:
    head = make_head("eagle3")
    where = [parameter.data_ptr() for parameter in head.parameters()]
    before = rounds(head, "chain:4", CPU)
    assert [parameter.data_ptr() for parameter in head.parameters()] == where  # an optimizer holds them
    with torch.no_grad():
        head.midlayer.self_attn.q_proj.weight.mul_(-3)
    after = rounds(head, "chain:4", CPU)
    assert any(not torch.equal(a.scores, b.scores) for a, b in zip(before, after, strict=True))


def test_other_types_and_places_take_torch() -> None:
    head = make_head("eagle3").double()
    state = head.new_state(
        SharedLayers(torch.nn.Embedding(V, D), lambda hidden: hidden),
        batch_size=1, capacity=40, shape=parse_shape("chain:2"), backend=CPU,
    )  # fmt: skip
    assert isinstance(state.steps, TorchRecurrent)
