"""One round of speculative decoding: propose, verify, choose, accept, commit.

All state is in static tensors on the target's device and nothing waits for the host, so that a CUDA graph can capture
a round. The host may run any number of rounds ahead: a row that is done does not change.

State of row b: its first length[b] tokens are in the target's cache. The root is the next token (decided, not yet in
the cache). Node j is in slot length + j at position length + depth_j. The token chosen after it has position length
+ depth_j + 1.

A prompt is read one row at a time, so that the result of a request cannot depend on the other rows. The head works on
a whole batch, so it reads the chunks of all new rows together.

Letters: B rows, N nodes, M = depth + 1 tokens a round can emit, or the longest chunk of a step, C tokens of a prompt's
chunk, D hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.runtime.accept import take_path
from eval.runtime.commit import Commit, RoundState
from eval.runtime.distribution import RowSampling
from eval.runtime.request import Request
from eval.runtime.rules import Rule
from heads.core.contract import Drafter, Observation
from heads.core.tree import Acceptance, Proposal, TreeShape, is_chain
from heads.targets.cached_decoder import CachedDecoder
from heads.targets.model import Features, FrozenTarget
from heads.targets.slots import PrefillSlots, TreeSlots, ancestors, round_up

CHUNK = 256
"""Maximum number of prompt tokens in one prefill step."""


class TargetStep:
    """The frozen target with the caches of one batch."""

    def __init__(self, target: FrozenTarget, decoder: CachedDecoder, *, pads: bool = False) -> None:
        """`pads`: pad prompts to a few shapes, which kernels and graphs need. On a CPU padding only costs time."""
        self.target, self.decoder, self.pads = target, decoder, pads
        self.batch_size, self.capacity = decoder.spec.batch_size, decoder.spec.capacity
        # One index more than there are slots, so that the tokens of a padded chunk that do not fit go to the last slot,
        # which no prompt fills.
        self.slot = torch.arange(self.capacity + 1, device=target.device)

    def chunk_size(self, remaining: int) -> int:
        """Return the number of slots of the next prefill step: with padding, the power of two that covers the remaining
        tokens, at least 16 and at most all slots. At most CHUNK, except for an encoder, which reads a prompt in one
        step."""
        size = min(max(16, 1 << (remaining - 1).bit_length()), self.capacity) if self.pads else remaining
        return size if self.target.start_token is not None else min(CHUNK, size)

    def prefill(self, row: int, tokens: Tensor, start: int) -> Features:
        """Read one chunk of a prompt, tokens (1, C) at positions start .., into a row's cache.

        Tokens after the prompt's end are padding. Later tokens overwrite their keys before anything can see them.
        """
        C = tokens.shape[1]
        mapping = PrefillSlots(self.slot[start : start + 1], None, self.slot, C)
        extent = min(round_up(start + C), self.capacity)
        return self.decoder.forward(tokens, mapping, extent=extent, row=row, prompt=True)

    def verify(self, proposal: Proposal, above: Tensor | None, length: Tensor, extent: int) -> Features:
        """Run one pass over a tree: node j of row b is in slot length[b] + j, at position length[b] + its depth.

        above (B, N, N): `heads.targets.slots.ancestors`, or None for a chain; length (B,): tokens in the cache; extent:
        slots visible to attention, at least length + N of every row.
        """
        mapping = TreeSlots(length, proposal.parents, proposal.depths, above, self.slot)
        return self.decoder.forward(proposal.tokens, mapping, extent=extent)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V), float32 or wider, of hidden states (..., D) after the final norm."""
        return self.decoder.logits(hidden)

    def choose(self, hidden: Tensor, positions: Tensor, sampling: RowSampling) -> Tensor:
        """Return token ids (B, N), chosen from hidden (B, N, D) for positions (B, N).

        Rows with filters need the whole distribution. The choices of the other rows must not depend on such rows.
        """
        fused = None
        if not sampling.filtered or len(hidden) > 1:
            fused = self.decoder.choose(hidden, positions, sampling.temperature, sampling.seed, random=sampling.random)
        if fused is not None and not sampling.filtered:
            return fused
        chosen = sampling.choose(self.logits(hidden), positions)
        return chosen if fused is None else torch.where(sampling.filters()[:, None], chosen, fused)

    def compact(self, start: Tensor, acceptance: Acceptance) -> None:
        """Move the accepted nodes to their final slots: those from `start` (B,) on, in order."""
        self.decoder.compact(start, acceptance.path)


@dataclass(frozen=True)
class Decoder:
    """Parts of a round, and the round itself."""

    step: TargetStep
    shape: TreeShape
    head: Drafter | None
    head_state: Any
    sampling: RowSampling
    rule: Rule
    state: RoundState
    update: Commit
    zeros: Tensor  # (B, 1) int64
    pinned: int = 1
    """Number of nodes of a plain step. All but the root are padding."""

    def round(self, extent: int) -> None:
        """Advance every row that is not done. Attention sees `extent` slots, at least length + N of every row."""
        proposal = self.propose()
        features, judged = self.verify(proposal, extent)
        acceptance = self.rule.accept(*judged)
        self.commit(judged[0], acceptance, features)

    def verify(
        self, proposal: Proposal, extent: int
    ) -> tuple[Features, tuple[Proposal, Tensor, Tensor, Tensor | None]]:
        """Return the target's features of a draft, and what the rule's `accept` takes."""
        above = None if is_chain(self.shape) else ancestors(proposal.parents, self.shape.depth)
        features = self.step.verify(proposal, above, self.state.length, extent)
        positions = self.state.length[:, None] + 1 + proposal.depths  # (B, N)
        consulted = self.rule.consult(self.step, features.hidden, positions)
        if self.pinned > 1:
            proposal, consulted = self.roots(), consulted[:, :1]
        return features, (proposal, consulted, positions, above)

    def propose(self) -> Proposal:
        """Return the head's tree below each root. Without a head, return the roots, followed by padding if pinned."""
        if self.head is not None:
            return self.head.propose(self.head_state, self.rule.begin())
        if self.pinned == 1:
            return self.roots()
        B, depths = len(self.state.root), self.step.slot[: self.pinned].expand(len(self.state.root), -1)
        tokens = self.state.root[:, None].expand(B, self.pinned).contiguous()
        return Proposal(tokens, (depths - 1).clamp_min(0), depths, depths)

    def roots(self) -> Proposal:
        """Return the roots alone."""
        return Proposal(self.state.root[:, None], self.zeros, self.zeros, self.zeros)

    def commit(self, proposal: Proposal, acceptance: Acceptance, features: Features) -> None:
        """Add the accepted tokens to the state, cut at EOS and at the limit, and let the head read the new tokens."""
        chain = is_chain(self.shape)
        result = self.update(acceptance.accepted, acceptance.emitted, None if chain else proposal.depths)
        if not chain:
            self.step.compact(result.start, acceptance)
        if self.head is None:
            return
        aux_hidden_states, hidden = features.aux_hidden_states, features.hidden
        if not chain:  # the path of a chain is its nodes in order
            aux_hidden_states, hidden = take_path(aux_hidden_states, hidden, acceptance.path)
        observation = Observation(
            tokens=result.tokens,
            aux_hidden_states=aux_hidden_states,
            hidden=hidden,
            start=result.start,
            count=result.count,
            nodes=acceptance.path,
        )
        self.head.extend(self.head_state, observation)


def read_prompts(decoder: Decoder, newcomers: dict[int, Request]) -> None:
    """Start each request in its row: read its prompt into the caches, choose its first token, set its state."""
    if decoder.head is not None:
        fresh = [row in newcomers for row in range(len(decoder.state.done))]
        decoder.head.reset_rows(decoder.head_state, torch.tensor(fresh, device=decoder.state.done.device))
    start = 0
    while rows := [row for row, request in newcomers.items() if len(request.prompt) > start]:
        features, spans = {}, {}
        for row in rows:
            features[row], spans[row] = read_chunk(decoder, row, newcomers[row], start)
        if decoder.head is not None:
            extend(decoder, features, spans, start)
        start += max(len(span) - 1 for span in spans.values())


def read_chunk(decoder: Decoder, row: int, request: Request, start: int) -> tuple[Features, Tensor]:
    """Read one row's next chunk. Return its features (1, C, ..), and the tokens of the chunk with the token after
    it."""
    device, prompt = decoder.state.root.device, torch.tensor(request.prompt, dtype=torch.int64)
    C = decoder.step.chunk_size(len(prompt) - start)
    chunk = prompt[start : start + C]
    tokens = torch.zeros(1, C, dtype=torch.int64)
    tokens[0, : len(chunk)] = chunk
    features = decoder.step.prefill(row, tokens.to(device), start)
    if start + C < len(prompt):
        return features, prompt[start : start + C + 1].to(device)
    root = open_row(decoder, row, request, features.hidden[:, len(chunk) - 1 : len(chunk)])
    return features, torch.cat([chunk.to(device), root])


def open_row(decoder: Decoder, row: int, request: Request, hidden: Tensor) -> Tensor:
    """Choose the first token (1,) from the hidden state (1, 1, D) of the prompt's last token, and set the row's
    state."""
    state, P = decoder.state, len(request.prompt)
    decoder.sampling.set_row(row, request.sampling)
    position = torch.full((1, 1), P, device=hidden.device)
    root = decoder.sampling.row(row).choose(decoder.step.logits(hidden), position)[0]
    state.length[row] = P
    state.root[row : row + 1] = root
    state.limit[row] = request.max_new_tokens
    state.stops_at_eos[row] = not request.ignore_eos
    state.output[row, :1] = root
    state.output_length[row] = 1
    state.rounds[row] = 0
    state.accepted[row] = state.reached[row] = 0  # rounds that draft nothing do not write them
    state.done[row] = request.max_new_tokens == 1
    if not request.ignore_eos:
        state.done[row : row + 1].logical_or_((root == decoder.update.eos).any())
    return root


def extend(decoder: Decoder, features: dict[int, Features], spans: dict[int, Tensor], start: int) -> None:
    """Let the head read one chunk of every new row's prompt. Other rows are unchanged."""
    assert decoder.head is not None
    B, M = len(decoder.state.done), max(f.hidden.shape[1] for f in features.values())
    some = next(iter(features.values()))
    tokens = decoder.state.root.new_zeros(B, M + 1)
    aux_hidden_states = some.aux_hidden_states.new_zeros(B, M, some.aux_hidden_states.shape[-1])
    hidden = some.hidden.new_zeros(B, M, some.hidden.shape[-1])
    count = decoder.state.root.new_zeros(B)
    for row, span in spans.items():
        C = features[row].hidden.shape[1]
        tokens[row, : len(span)] = span
        aux_hidden_states[row, :C], hidden[row, :C] = features[row].aux_hidden_states[0], features[row].hidden[0]
        count[row] = len(span) - 1
    decoder.head.extend(
        decoder.head_state, Observation(tokens, aux_hidden_states, hidden, torch.full_like(count, start), count, None)
    )
