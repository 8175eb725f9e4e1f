"""Heads draft by the kernels of a GPU, in Triton's interpreter, what they draft by torch's operations."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import Observation, TargetEnds
from heads.eagle3 import Eagle3, Eagle3Config
from heads.kernels.drafting import TritonMemory, kernels_draft
from heads.kernels.inputs import enter, enter_twin, take_newest
from heads.layers import RMSNorm
from heads.mtp import Mtp, MtpConfig
from heads.native.linear import Norm
from heads.places import Drafted, Observed
from heads.recurrent import Recurrent
from heads.recurrent_memory import TorchMemory
from heads.tree import Proposal, parse_shape
from heads.vocab import build_vocab

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs the kernels themselves")

D, V = 24, 60
WIDTHS = dict(
    hidden_size=D,
    intermediate_size=40,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=12,
    rms_norm_eps=1e-5,
    vocab_size=V,
    num_target_layers=8,
    draft_vocab_size=40,
    rope_theta=100.0,
    max_position_embeddings=256,
    depth=4,
)
SEVERAL = {"mtp of three": (Mtp, MtpConfig, dict(num_modules=3))}
HEADS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "eagle3": (Eagle3, Eagle3Config, dict(taps=(2, 4, 5))),
    "eagle3.1": (Eagle3, Eagle3Config, dict(taps=(2, 4, 5), fc_norm=True, norm_output=True)),
    "mtp": (Mtp, MtpConfig, {}),
    "mtp, token first": (Mtp, MtpConfig, dict(layout="deepseek")),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr("heads.kernels.backend.ON_CPU", True)
    monkeypatch.setattr("heads.native.drafting.load", lambda: None)
    monkeypatch.setattr("heads.recurrent.RecurrentState.extent", lambda state, tokens: len(state.slot))
    yield monkeypatch


def make_head(name: str) -> Recurrent:
    torch.manual_seed(1)
    kind, config, settings = (HEADS | SEVERAL)[name]
    head: Recurrent = kind(config(**WIDTHS, **settings), *build_vocab(torch.randint(0, 9, (V,)), 40))
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.3)
    return head


def likeliest(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logp, columns = logits.log_softmax(-1).topk(count, dim=-1)
    return columns if token_ids is None else token_ids[columns], logp


def rounds(head: Recurrent, shape: str, memory: type, *, prompt: int = 5, embedding: bool = True) -> list[Proposal]:
    """Two rows with prompts, one after the other, then rounds of a few tokens each until the first row's cache is full;
    a draft after every one."""
    generator = torch.Generator().manual_seed(2)
    table, out = torch.randn(2, V, D, generator=generator)
    embed = torch.nn.Embedding.from_pretrained(table) if embedding else lambda ids: table[ids]
    ends = TargetEnds(embed=embed, logits=lambda hidden: hidden @ out.T, weight=out)
    state = head.new_state(ends, batch_size=2, capacity=prompt + 7, shape=parse_shape(shape))
    assert type(state.memory) is memory
    proposals, start = [], torch.zeros(2, dtype=torch.int64)
    for counts in ([0, 3], [prompt, 0], [3, 2], [0, 4], [4, 1]):
        count, M = torch.tensor(counts), max(4, *counts)
        tokens = torch.randint(V, (2, M + 1), generator=generator)
        taps, hidden = torch.randn(2, M, 3 * D, generator=generator), torch.randn(2, M, D, generator=generator)
        head.observe(state, Observation(tokens, taps, hidden, start.clone(), count, None))
        proposals.append(head.propose(state, likeliest))
        start += count
    assert state.length.tolist() == [prompt + 7, 10]
    return proposals


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "chain:3") for name in HEADS),
        *(("eagle3", "chain:1"), ("eagle3", "tree:4x2x7"), ("mtp", "tree:3x3x9"), ("mtp", "static:3.2.1")),
    ],
)
def test_drafts_are_those_of_torch(name: str, shape: str, interpreted: pytest.MonkeyPatch) -> None:
    head = make_head(name)
    ours = rounds(head, shape, TritonMemory, embedding=name != "eagle3.1")
    interpreted.setattr("heads.kernels.backend.ON_CPU", False)
    agree(ours, rounds(head, shape, TorchMemory))


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_many_tokens_and_nodes_take_several_words(name: str, interpreted: pytest.MonkeyPatch) -> None:
    """A prompt of 140 tokens, over two splits of the cache, and 66 nodes that are expanded."""
    head = make_head(name)
    ours = rounds(head, "tree:4x22x40", TritonMemory, prompt=140)
    interpreted.setattr("heads.kernels.backend.ON_CPU", False)
    agree(ours, rounds(head, "tree:4x22x40", TorchMemory, prompt=140))


def agree(ours: list[Proposal], theirs: list[Proposal]) -> None:
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.parents, expected.parents)
        torch.testing.assert_close(found.scores, expected.scores, atol=2e-4, rtol=2e-4)


def test_what_the_kernels_do_not_know_is_left_to_torch(interpreted: pytest.MonkeyPatch) -> None:
    """Several modules, wider numbers, layers that are more than products."""
    rounds(make_head("mtp of three"), "chain:2", TorchMemory)
    wide = make_head("eagle3").double()
    parts = wide.parts()
    assert parts is not None and not kernels_draft(parts)
    head = make_head("mtp")
    block: Any = head.mtp_layers[0].block  # type: ignore[index, union-attr]
    block.mlp.up_proj = Adapted(block.mlp.up_proj)
    rounds(head, "chain:2", TorchMemory)


class Adapted(torch.nn.Linear):
    """A product with something added."""

    def __init__(self, of: torch.nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("observed", [True, False])
@pytest.mark.parametrize("state_first", [True, False])
def test_inputs(observed: bool, state_first: bool) -> None:
    """Three rows of four tokens; 70 slots behind the observed ones, of which paths hold any."""
    B, W, A, S = 3, 4, 5, 90
    tokens, rows = torch.randint(V, (B, W)), torch.randint(A, (B, W))
    table, states = torch.randn(V, D), torch.randn(B, A, D)
    norms = [Norm(RMSNorm(D, 1e-5)) for _ in range(2)]
    for norm in norms:
        norm.weight.normal_()
    slot, length = torch.arange(S), torch.tensor([0, 7, S - 3])
    paths = torch.stack([torch.stack([torch.randperm(70)[:3] for _ in range(W)]) for _ in range(B)])
    drafted = Drafted(length.clamp_max(S - 71), paths, slot, False)
    places = Observed(length, torch.tensor([4, 0, 2]), slot, W) if observed else drafted
    options: dict[str, Any] = dict(behind=70, state_first=state_first)
    for embedded, parents in ((table, rows), (table[tokens], None)):
        given = states if parents is not None else states[:, :W]
        ours = enter(tokens, embedded, given, parents, places, *norms, **options)
        theirs = enter_twin(tokens, embedded, given, parents, places, *norms, **options)
        for field in ("x", "stream", "positions", "slots"):
            torch.testing.assert_close(getattr(ours, field), getattr(theirs, field), msg=field)
        assert torch.equal(ours.words, theirs.words) and ours.words.numel() == (0 if observed else 2 * B * W)
    if not observed:
        for bits, path in zip(ours.words.flatten(0, 1).tolist(), paths.flatten(0, 1).tolist(), strict=True):
            assert {j for j in range(70) if bits[j // 64] >> (j % 64) & 1} == set(path)


def test_the_newest_true_token_is_drafted_from() -> None:
    made, tokens = torch.randn(3, 4, D), torch.randint(V, (3, 5))
    start, count = torch.tensor([5, 9, 2]), torch.tensor([4, 0, 1])
    before = torch.randn(3, D), torch.tensor([50, 51, 52]), torch.tensor([5, 9, 2])
    recycled, root, length = (x.clone() for x in before)
    take_newest(made, tokens, start, count, recycled, root, length)
    assert torch.equal(recycled, torch.stack([made[0, 3], before[0][1], made[2, 0]]))
    assert root.tolist() == [int(tokens[0, 4]), 51, int(tokens[2, 1])] and length.tolist() == [9, 9, 3]
