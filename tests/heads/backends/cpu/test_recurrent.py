"""Heads that recycle their state draft on the CPU kernels what they draft without."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.sampling import Sampling
from heads.backends.base import Backend
from heads.backends.cpu import library
from heads.backends.cpu.block import CpuBlock
from heads.backends.cpu.draws import CompiledPick, CpuSampling
from heads.backends.cpu.recurrent import CpuRecurrent, compiled_draft
from heads.backends.selection import CPU, TORCH
from heads.base import Observation, Pick, SharedLayers
from heads.eagle3 import Eagle3, Eagle3Config
from heads.mtp import Mtp, MtpConfig
from heads.recurrent.draft import Recurrent
from heads.tree import Proposal, parse_shape
from heads.vocab import build_vocab
from tests.drafting import agree

pytestmark = pytest.mark.skipif(library.load() is None, reason="no C compiler")
D, V = 48, 60
WIDTHS = dict(
    hidden_size=D,
    intermediate_size=72,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    rms_norm_eps=1e-5,
    vocab_size=V,
    num_target_layers=8,
    draft_vocab_size=40,
    rope_theta=100.0,
    max_position_embeddings=256,
    depth=4,
)
HEADS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "eagle3": (Eagle3, Eagle3Config, dict(aux_layer_ids=(2, 4, 5))),
    "eagle3.1": (Eagle3, Eagle3Config, dict(aux_layer_ids=(2, 4, 5), fc_norm=True, norm_output=True)),
    "mtp": (Mtp, MtpConfig, {}),
    "mtp of three": (Mtp, MtpConfig, dict(num_modules=3, layout="deepseek")),
    "mtp that reads every token": (Mtp, MtpConfig, dict(layout="qwen")),
}


def make_head(name: str) -> Recurrent:
    torch.manual_seed(1)
    kind, config, settings = HEADS[name]
    head: Recurrent = kind(config(**WIDTHS, **settings), build_vocab(torch.randint(0, 9, (V,)), 40))
    randomise(head)
    return head


@torch.no_grad()
def randomise(head: torch.nn.Module) -> None:
    """Random weights, as wide as the kernels hold them."""
    for key, parameter in head.named_parameters():
        parameter.normal_(1.0 if "norm" in key else 0.0, 0.3)
        parameter.copy_(parameter.bfloat16())


def likeliest(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logp, columns = logits.log_softmax(-1).topk(count, dim=-1)
    return columns if token_ids is None else token_ids[columns], logp


def rounds(
    head: Any, shape: str, backend: Backend, *, embedding: bool = True, pick: Pick = likeliest
) -> list[Proposal]:
    """Two rows with prompts of many tokens, then rounds of a few each; a draft after every one."""
    generator = torch.Generator().manual_seed(2)
    table, out = torch.randn(2, V, D, generator=generator).bfloat16().float()
    embed = torch.nn.Embedding.from_pretrained(table) if embedding else lambda ids: table[ids]
    shared = SharedLayers(embed_tokens=embed, lm_head=lambda hidden: hidden @ out.T, lm_head_weight=out)
    state = head.new_state(shared, batch_size=2, capacity=120, shape=parse_shape(shape), backend=backend)
    assert isinstance(state.steps, CpuRecurrent | CpuBlock) == (backend is CPU)
    proposals, start = [], torch.zeros(2, dtype=torch.int64)
    for counts in ([90, 61], [5, 2], [1, 4], [4, 1], [0, 3], [2, 4]):
        count, M = torch.tensor(counts), max(6, *counts)
        tokens = torch.randint(V - 1, (2, M + 1), generator=generator)  # the last one may be a mask
        aux_hidden_states, hidden = (torch.randn(2, M, n * D, generator=generator) for n in (3, 1))
        head.extend(state, Observation(tokens, aux_hidden_states, hidden, start.clone(), count, None))
        proposals.append(head.propose(state, pick))
        start += count
    return proposals


@pytest.mark.parametrize("shape", ["chain:1", "chain:4", "tree:4x3x12", "static:3.2.1"])
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_without_kernels(name: str, shape: str) -> None:
    head = make_head(name)
    ours = rounds(head, shape, CPU)
    rows = rounds(head, shape, CPU, embedding=False)
    assert all(torch.equal(one.scores, other.scores) for one, other in zip(ours, rows, strict=True))
    agree(ours, rounds(head, shape, TORCH, embedding=False))


@pytest.mark.parametrize("embedding", [True, False])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", HEADS)
def test_chains_drafted_in_one_call_are_those_drafted_step_by_step(name: str, depth: int, embedding: bool) -> None:
    head, rows = make_head(name), CpuSampling(2)
    rows.set_row(1, Sampling(temperature=0.8, seed=7))
    assert isinstance(rows.pick, CompiledPick)
    ours = rounds(head, f"chain:{depth}", CPU, embedding=embedding, pick=rows.pick)
    steps = rounds(head, f"chain:{depth}", CPU, embedding=embedding, pick=lambda *draw: rows.pick(*draw))
    for one, other in zip(ours, steps, strict=True):
        for field in ("tokens", "parents", "depths"):
            assert torch.equal(getattr(one, field), getattr(other, field)), field
        torch.testing.assert_close(one.scores, other.scores, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("layout", "same"), [("mimo", True), ("qwen", False)])
def test_the_token_at_position_0_is_read_as_zeros_where_engines_do(layout: str, same: bool) -> None:
    """The one token of a prompt's second place decides what is drafted behind it, or does not."""
    head = Mtp(MtpConfig(**WIDTHS, layout=layout), build_vocab(torch.ones(V), 40))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter).bfloat16())
    table, out = torch.randn(2, V, D).bfloat16().float()
    shared = SharedLayers(
        embed_tokens=torch.nn.Embedding.from_pretrained(table), lm_head=lambda h: h @ out.T, lm_head_weight=out
    )
    hidden, start, count = torch.randn(1, 4, D), torch.zeros(1, dtype=torch.int64), torch.tensor([4])

    def scores(second: int, backend: Backend) -> Tensor:
        state = head.new_state(shared, batch_size=1, capacity=40, shape=parse_shape("chain:2"), backend=backend)
        tokens = torch.tensor([[3, second, 5, 7, 11]])
        head.extend(state, Observation(tokens, hidden[..., :0], hidden, start, count, None))
        return head.propose(state, likeliest).scores

    for backend in (CPU, TORCH):
        assert torch.equal(scores(20, backend), scores(40, backend)) is same


def test_weights_that_change_are_read_by_the_next_state_and_stay_where_they_are() -> None:
    head = make_head("eagle3")
    where = [parameter.data_ptr() for parameter in head.parameters()]
    before = rounds(head, "chain:4", CPU)
    assert [parameter.data_ptr() for parameter in head.parameters()] == where  # an optimizer holds them
    with torch.no_grad():
        head.midlayer.self_attn.q_proj.weight.mul_(-3)  # type: ignore[union-attr, operator]
    after = rounds(head, "chain:4", CPU)
    assert any(not torch.equal(a.scores, b.scores) for a, b in zip(before, after, strict=True))


def test_other_types_and_places_take_torch() -> None:
    head = make_head("eagle3").double()
    parts = head.parts()
    assert parts is not None and compiled_draft(parts, torch.zeros(40, D)) is None
