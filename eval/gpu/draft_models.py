"""Draft models on a GPU: that kernels draft what torch drafts.

Letters: B rows, M tokens of an observation.
"""

import torch
from torch import Tensor

from eval.gpu.drafts import agree, likeliest
from heads.backends.base import Backend
from heads.backends.selection import TORCH, TRITON
from heads.backends.triton.cached_decoder import TritonDecoder
from heads.base import Observation
from heads.draft_model import Draft, DraftState
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, parse_shape

LAYERS = [0, 2]


def draft_of(target: FrozenTarget) -> Draft:
    """Two of the target's three layers."""
    head = build_head("draft", {"layers": LAYERS}, target, torch.ones(target.vocab_size, dtype=torch.int64))
    assert isinstance(head, Draft)
    return head.to(target.device, target.dtype)


def model_drafts_are_those_of_torch(target: FrozenTarget, shape: str, *, prompt: int = 5) -> None:
    """By kernels and without, of a target in float32."""
    head = draft_of(target)
    ours, theirs = (rounds(head, target, shape, prompt, backend) for backend in (TRITON, TORCH))
    agree(ours, theirs)


def rounds(head: Draft, target: FrozenTarget, shape: str, prompt: int, backend: Backend) -> list[Proposal]:
    """What it drafts for two rows of which paths are accepted, of all lengths; then one after rounds without drafts."""
    state = head.new_state(target.shared, batch_size=2, capacity=prompt + 40, shape=parse_shape(shape), backend=backend)
    assert isinstance(state.decoder, TritonDecoder) == (backend is TRITON)
    ids = (torch.arange(2 * (prompt + 1)) * 7 % target.vocab_size).view(2, prompt + 1).to(target.device)
    start, count = torch.zeros_like(ids[:, 0]), torch.tensor([prompt, 2], device=target.device)
    accepted_tokens = Observation(ids, *nothing(prompt), start, count, None)
    proposals = []
    for number in range(4):
        head.extend(state, accepted_tokens)
        proposals.append(head.propose(state, likeliest))
        accepted_tokens = accepted(state, proposals[-1], number)
    missed = Observation(ids[:, :4], *nothing(3), state.length.clone(), torch.full_like(start, 3), None, missed=True)
    head.extend(state, missed)
    return [*proposals, head.propose(state, likeliest)]


def accepted(state: DraftState, proposal: Proposal, number: int) -> Observation:
    """One row's last path down to level `number`, the other's first, and a root of its own behind each."""
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
    """Features of two rows that no draft model reads."""
    return torch.zeros(2, number, 0), torch.zeros(2, number, 0)
