"""Small heads that draft with kernels and with torch. Both must give the same drafts.

Letters: B rows, D hidden, V vocabulary, M tokens of an observation.
"""

from typing import Any

import torch
from torch import Tensor

from heads.backends.base import Backend
from heads.backends.selection import TORCH, TRITON
from heads.backends.triton.decoder import TritonDecoder
from heads.base import Observation, Pick, SharedLayers
from heads.draft_model import Draft, DraftState
from heads.eagle3 import Eagle3, Eagle3Config
from heads.mtp import Mtp, MtpConfig
from heads.recurrent.draft import Recurrent
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, parse_shape
from heads.vocab import build_vocab
from tests.closeness import assert_close

SMALL: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1, head_dim=12, rms_norm_eps=1e-5,
    vocab_size=60, num_target_layers=8, draft_vocab_size=40, rope_theta=100.0, max_position_embeddings=256,
)  # fmt: skip
AUX_LAYER_IDS = {"aux_layer_ids": (2, 4, 5)}
NORMS = ("norm_before_fc", "norm_before_residual", "norm_output")
HEADS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "eagle3": (Eagle3, Eagle3Config, AUX_LAYER_IDS),
    "eagle3.1": (Eagle3, Eagle3Config, AUX_LAYER_IDS | {"fc_norm": True, "norm_output": True}),
    "eagle3 as speculators has it": (Eagle3, Eagle3Config, AUX_LAYER_IDS | {name: True for name in NORMS}),
    "eagle3 with a window": (Eagle3, Eagle3Config, AUX_LAYER_IDS | {"sliding_window": 21}),
    "mtp": (Mtp, MtpConfig, {}),
    "mtp, token first": (Mtp, MtpConfig, {"layout": "deepseek"}),
    "mtp of three": (Mtp, MtpConfig, {"num_modules": 3, "layout": "deepseek"}),
    "mtp that reads every token": (Mtp, MtpConfig, {"layout": "qwen"}),
}


def some_head(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Recurrent:
    """Return a small random head of HEADS."""
    kind, config, settings = HEADS[name]
    made = config(**SMALL | settings)
    vocab = build_vocab(torch.arange(made.vocab_size) % 9, made.draft_vocab_size)
    with device, torch.random.fork_rng(devices=[]):
        head: Recurrent = kind(made, vocab)
    head.to(device, dtype)
    draw = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for key, parameter in head.named_parameters():
            norm = "norm" in key
            parameter.normal_(1.0 if norm else 0.0, 0.3, generator=draw)
    return head


def head_rounds(
    head: Any,
    shape: str,
    backend: Backend,
    device: torch.device,
    *,
    prompt: int = 5,
    table: bool = True,
    pick: Pick | None = None,
) -> list[Proposal]:
    """Return a head's drafts with a backend for two rows: after the prompt of each, one after the other, and after
    rounds of a few tokens until the first row's cache is full. `table`: pass the target's embeddings as a module, not
    as a function."""
    D, V = head.config.hidden_size, head.config.vocab_size
    draw = torch.Generator().manual_seed(2)
    rows, out = torch.randn(2, V, D, generator=draw).bfloat16().float().to(device)  # the precision of a CPU's kernels
    embed = torch.nn.Embedding.from_pretrained(rows) if table else lambda ids: rows[ids]
    shared = SharedLayers(embed_tokens=embed, lm_head=lambda hidden: hidden @ out.T, lm_head_weight=out)
    state = head.new_state(shared, batch_size=2, capacity=prompt + 7, shape=parse_shape(shape), backend=backend)
    assert f".{backend.name}." in type(state.steps).__module__
    pick = pick or TRITON.sampling(2, device).pick  # the same for all backends
    proposals, start = [], torch.zeros(2, dtype=torch.int64)
    for counts in ([0, 3], [prompt, 0], [3, 2], [0, 4], [4, 1]):
        count, M = torch.tensor(counts), max(4, *counts)
        tokens = torch.randint(V - 1, (2, M + 1), generator=draw)  # the last one may be a mask
        aux_hidden_states, hidden = torch.randn(2, M, 3 * D, generator=draw), torch.randn(2, M, D, generator=draw)
        tokens, aux_hidden_states, hidden, known, news = (
            x.to(device) for x in (tokens, aux_hidden_states, hidden, start, count)
        )
        head.extend(state, Observation(tokens, aux_hidden_states, hidden, known, news, None))
        proposals.append(head.propose(state, pick))
        start = start + count
    assert state.length.tolist() == [prompt + 7, 10]
    return proposals


def drafts_are_those_of_torch(
    name: str, shape: str, device: torch.device, *, prompt: int = 5, table: bool = True
) -> None:
    """Assert that a head's drafts with kernels and with torch agree, in float32."""
    head = some_head(name, device)
    ours = head_rounds(head, shape, TRITON, device, prompt=prompt, table=table)
    agree(ours, head_rounds(head, shape, TORCH, device, prompt=prompt))


def agree(ours: list[Proposal], theirs: list[Proposal]) -> None:
    """Assert that tokens and parents are equal, and scores equal within the rounding of float32."""
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.parents, expected.parents)
        assert_close(found.scores, expected.scores, roundings=1024)


def draft_of(target: FrozenTarget) -> Draft:
    """Return a draft model of two of the target's three layers."""
    head = build_head("draft", {"layers": [0, 2]}, target, torch.ones(target.vocab_size, dtype=torch.int64))
    assert isinstance(head, Draft)
    return head.to(target.device, target.dtype)


def model_drafts_are_those_of_torch(target: FrozenTarget, shape: str, *, prompt: int = 5) -> None:
    """Assert that a draft model's drafts with kernels and with torch agree, for a target in float32."""
    head = draft_of(target)
    ours, theirs = (model_rounds(head, target, shape, prompt, backend) for backend in (TRITON, TORCH))
    agree(ours, theirs)


def model_rounds(head: Draft, target: FrozenTarget, shape: str, prompt: int, backend: Backend) -> list[Proposal]:
    """Return drafts for two rows after accepted paths of all lengths, and a last one after rounds without drafts."""
    state = head.new_state(target.shared, batch_size=2, capacity=prompt + 40, shape=parse_shape(shape), backend=backend)
    assert isinstance(state.decoder, TritonDecoder) == (backend is TRITON)
    ids = (torch.arange(2 * (prompt + 1)) * 7 % target.vocab_size).view(2, prompt + 1).to(target.device)
    start, count = torch.zeros_like(ids[:, 0]), torch.tensor([prompt, 2], device=target.device)
    accepted_tokens = Observation(ids, *nothing(prompt), start, count, None)
    proposals, pick = [], TRITON.sampling(2, target.device).pick  # the same for both backends
    for number in range(4):
        head.extend(state, accepted_tokens)
        proposals.append(head.propose(state, pick))
        accepted_tokens = accepted(state, proposals[-1], number)
    missed = Observation(ids[:, :4], *nothing(3), state.length.clone(), torch.full_like(start, 3), None, missed=True)
    head.extend(state, missed)
    return [*proposals, head.propose(state, pick)]


def accepted(state: DraftState, proposal: Proposal, number: int) -> Observation:
    """Return accepted paths down to level `number`, each followed by its own root: the last path of one row, and the
    first path of the other."""
    B, M = len(state.root), state.shape.depth + 1
    tokens, nodes = torch.zeros(B, M + 1, dtype=torch.int64), torch.zeros(B, M, dtype=torch.int64)
    count = torch.zeros(B, dtype=torch.int64)
    for b, parents in enumerate(proposal.parents.tolist()):
        path = [0]
        while len(path) <= number and (children := [j for j in range(1, len(parents)) if parents[j] == path[-1]]):
            path.append(children[-1 if b == 0 else 0])
        count[b], nodes[b, : len(path)] = len(path), torch.tensor(path)
        tokens[b, : len(path)], tokens[b, len(path)] = proposal.tokens[b].cpu()[path], 3 + number + b
    tokens, nodes, count = (x.to(state.root.device) for x in (tokens, nodes, count))
    return Observation(tokens, *nothing(M), state.length.clone(), count, nodes)


def nothing(number: int) -> tuple[Tensor, Tensor]:
    """Return empty features of two rows, which a draft model does not read."""
    return torch.zeros(2, number, 0), torch.zeros(2, number, 0)
