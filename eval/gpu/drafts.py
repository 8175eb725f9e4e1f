"""Heads that recycle their state on a GPU: that kernels draft what torch drafts, and their steps to time.

Letters: D hidden, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.benchmark.roofline import Part
from eval.benchmark.shapes import ModelShape
from heads.backends.base import Backend
from heads.backends.selection import TORCH, TRITON
from heads.backends.slot_mapping import Drafted
from heads.backends.triton.pick import best_columns, best_columns_twin, serves
from heads.backends.triton.recurrent import TritonRecurrent
from heads.backends.triton.timing import device_seconds
from heads.base import Observation, SharedLayers
from heads.eagle3 import Eagle3, Eagle3Config
from heads.mtp import Mtp, MtpConfig
from heads.recurrent import Recurrent, RecurrentState
from heads.tree import Proposal, parse_shape
from heads.vocab import build_vocab

CUDA = torch.device("cuda")
SMALL: dict[str, Any] = dict(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=12,
    rms_norm_eps=1e-5,
    vocab_size=60,
    num_target_layers=8,
    draft_vocab_size=40,
    rope_theta=100.0,
    max_position_embeddings=256,
)
AUX_LAYER_IDS = {"aux_layer_ids": (2, 4, 5)}
HEADS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "eagle3": (Eagle3, Eagle3Config, AUX_LAYER_IDS),
    "eagle3.1": (Eagle3, Eagle3Config, AUX_LAYER_IDS | {"fc_norm": True, "norm_output": True}),
    "mtp": (Mtp, MtpConfig, {}),
    "mtp, token first": (Mtp, MtpConfig, {"layout": "deepseek"}),
    "mtp of three": (Mtp, MtpConfig, {"num_modules": 3}),
}


def some_head(name: str, device: torch.device, dtype: torch.dtype = torch.float32, **widths: Any) -> Recurrent:
    """A random head of HEADS, small unless told otherwise."""
    kind, config, settings = HEADS[name]
    made = config(**SMALL | settings | widths)
    vocab = build_vocab(torch.arange(made.vocab_size) % 9, made.draft_vocab_size)
    with device, torch.random.fork_rng(devices=[]):
        head: Recurrent = kind(made, *vocab)
    head.to(device, dtype)
    if device.type == "meta":  # of no memory: to be counted, not run
        return head
    draw = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            norm = "norm" in key
            scale = 0.3 if norm or made.hidden_size < 100 else made.hidden_size**-0.5
            parameter.normal_(1.0 if norm else 0.0, scale, generator=draw)
    return head


def likeliest(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A `heads.base.Pick`."""
    best = best_columns if serves(logits, count) else best_columns_twin
    return best(logits, count, token_ids)


def rounds(
    head: Recurrent, shape: str, backend: Backend, device: torch.device, *, prompt: int = 5, table: bool = True
) -> list[Proposal]:
    """What a head drafts, by that backend, for two rows: after the prompt of each, one after the other, and
    after rounds of a few tokens until the first row's cache is full. `table`: whether it sees the target's embeddings
    as such."""
    D, V = head.config.hidden_size, head.config.vocab_size
    draw = torch.Generator().manual_seed(2)
    rows, out = torch.randn(2, V, D, generator=draw).to(device)
    embed = torch.nn.Embedding.from_pretrained(rows) if table else lambda ids: rows[ids]
    shared = SharedLayers(embed_tokens=embed, lm_head=lambda hidden: hidden @ out.T, lm_head_weight=out)
    state = head.new_state(shared, batch_size=2, capacity=prompt + 7, shape=parse_shape(shape), backend=backend)
    assert isinstance(state.steps, TritonRecurrent) == (backend is TRITON)
    proposals, start = [], torch.zeros(2, dtype=torch.int64)
    for counts in ([0, 3], [prompt, 0], [3, 2], [0, 4], [4, 1]):
        count, M = torch.tensor(counts), max(4, *counts)
        tokens = torch.randint(V, (2, M + 1), generator=draw)
        aux_hidden_states, hidden = torch.randn(2, M, 3 * D, generator=draw), torch.randn(2, M, D, generator=draw)
        tokens, aux_hidden_states, hidden, known, news = (
            x.to(device) for x in (tokens, aux_hidden_states, hidden, start, count)
        )
        head.extend(state, Observation(tokens, aux_hidden_states, hidden, known, news, None))
        proposals.append(head.propose(state, likeliest))
        start = start + count
    assert state.length.tolist() == [prompt + 7, 10]
    return proposals


def drafts_are_those_of_torch(
    name: str, shape: str, device: torch.device = CUDA, *, prompt: int = 5, table: bool = True
) -> None:
    """In float32: tokens, parents, and scores within rounding."""
    head = some_head(name, device)
    ours = rounds(head, shape, TRITON, device, prompt=prompt, table=table)
    agree(ours, rounds(head, shape, TORCH, device, prompt=prompt))


def agree(ours: list[Proposal], theirs: list[Proposal]) -> None:
    """Tokens and parents equal, scores within the rounding of float32."""
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.parents, expected.parents)
        torch.testing.assert_close(found.scores, expected.scores, atol=2e-4, rtol=2e-4)


def heads_draft_alike_with_and_without_kernels(device: torch.device = CUDA) -> None:
    """EAGLE-3 and MTP; chains, dynamic and static trees; a long prompt."""
    for name in ("eagle3", "eagle3.1", "mtp", "mtp, token first"):
        for shape in ("chain:1", "chain:4", "tree:4x3x12", "tree:4x22x40", "static:3.2.1"):
            drafts_are_those_of_torch(name, shape, device)
        drafts_are_those_of_torch(name, "tree:4x3x12", device, prompt=300, table=False)


@torch.no_grad()
def draft_parts(shape: ModelShape, length: int, device: torch.device) -> list[Part]:
    """A draft step of one node and of eight, with its picks, and what it takes to tell a head of six tokens; by kernels
    and by torch; bfloat16. The floor is to read layer and output head, and the cache as long as it is."""
    cache = 4 * length * shape.num_key_value_heads * shape.head_dim
    parts = []
    for name in ("eagle3", "mtp"):
        head, shared = large_head(name, shape, device)
        lm_head_weight = head.lm_head_weight(shared)
        fuse = head.fc.weight.numel() if isinstance(head, Eagle3) else 0
        own = sum(p.numel() for p in head.parameters() if p.data_ptr() != lm_head_weight.data_ptr())
        for form, backend in (("kernels", TRITON), ("torch", TORCH)):
            tree = parse_shape("tree:6x8x32")
            state = head.new_state(shared, batch_size=1, capacity=length + 64, shape=tree, backend=backend)
            state.length.fill_(length)
            for width in (1, 8):
                size, work = 2 * (own - fuse + lm_head_weight.numel()) + cache, one_step(head, state, width)
                parts.append(Part(f"{name} draft step by {form}, {width} rows", size, device_seconds(work, device)))
            size, work = 2 * own + cache, partial(head.extend, state, some_news(state, 6))
            parts.append(Part(f"{name} told by {form}, 6 rows", size, device_seconds(work, device)))
    return parts


def large_head(name: str, shape: ModelShape, device: torch.device) -> tuple[Recurrent, SharedLayers]:
    """A random head of a target's shape, in bfloat16, and the target's embeddings and output head."""
    widths = {name: getattr(shape, name) for name in SMALL if hasattr(shape, name)} | {"rope_theta": 5e5}
    drafted = min(32_000, shape.vocab_size) if name == "eagle3" else shape.vocab_size
    table = torch.nn.Embedding(shape.vocab_size, shape.hidden_size, device=device, dtype=torch.bfloat16)
    shared = SharedLayers(
        embed_tokens=table, lm_head=lambda hidden: hidden @ table.weight.T, lm_head_weight=table.weight
    )
    return some_head(name, device, torch.bfloat16, **widths, draft_vocab_size=drafted), shared


def one_step(head: Recurrent, state: RecurrentState, width: int) -> Callable[[], Any]:
    """The second level of a draft: of a chain, or of a tree that draws as many children as it expands."""
    ids = state.slot[: 2 * width].view(1, width, 2)
    tokens, rows = ids[..., 1].contiguous(), None if width == 1 else ids[..., 0] // 2
    states = state.recycled[0][:, None].repeat(1, width, 1)

    def work() -> tuple[Tensor, Tensor]:
        places = Drafted(state.length, ids, state.slot, width == 1)
        _, read = state.steps.step(0, tokens, states, rows, places, len(state.slot))
        return likeliest(state.steps.logits(read), tokens, width, head.kept)

    return work


def some_news(state: RecurrentState, number: int) -> Observation:
    """So many tokens, none of them true, so that they may be told again and again."""
    aux_hidden_states = state.recycled[0].new_zeros(1, number, 3 * state.recycled[0].shape[1])
    hidden, count = aux_hidden_states[..., : state.recycled[0].shape[1]].clone(), torch.zeros_like(state.length)
    return Observation(state.slot[: number + 1][None], aux_hidden_states, hidden, state.length.clone(), count, None)
