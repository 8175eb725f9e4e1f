"""One round of speculative decoding: propose, verify, choose, accept, commit.

All state is in static tensors on the target's device and nothing waits for the host, so that a CUDA graph can capture
a round. The host may run any number of rounds ahead: a row that is done does not change.

State of row b: its first length[b] tokens are in the target's cache. The root is the next token (decided, not yet in
the cache). Node j is in slot length + j at position length + depth_j. The token chosen after it has position length
+ depth_j + 1.

Prompts are read in passes whose shape depends on the length of a prompt alone, so that the result of a request cannot
depend on the other rows: on a GPU several rows at a time, as many as make CHUNK tokens, whether they have a prompt or
not; on a CPU one row at a time, where a row without a prompt would cost as much as one with it. The head works on a
whole batch, so it reads the chunks of all new rows together.

Letters: B rows, R rows of a prefill pass, N nodes, at most the shape's, M = depth + 1 tokens a round can emit, or the
longest chunk of a step, C tokens of a prompt's chunk, D hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.runtime.acceptance_rules import Rule
from eval.runtime.distribution import RowSampling
from eval.runtime.request import Request
from eval.runtime.round_state import Commit, RoundState
from heads.core.contract import Drafter, Observation
from heads.core.tree import Acceptance, Proposal, TreeShape, is_chain
from heads.kernels.slots import TreeSlots, ancestors
from heads.targets.cached_decoder import CachedDecoder
from heads.targets.encoder_decoder import EncoderDecoder
from heads.targets.frozen_target import Features

CHUNK = 256
"""Maximum number of prompt tokens in one prefill pass."""


@dataclass(frozen=True)
class Decoder:
    """Parts of a round, and the round itself."""

    target: CachedDecoder
    shape: TreeShape
    head: Drafter | None
    head_state: object
    sampling: RowSampling
    rule: Rule
    state: RoundState
    update: Commit
    zeros: Tensor  # (B, 1) int64

    def round(self, extent: int) -> None:
        """Advance every row that is not done. Attention sees `extent` slots, at least length + N of every row."""
        proposal = self.propose()
        features, verified = self.verify(proposal, extent)
        acceptance = self.rule.accept(*verified)
        self.commit(proposal, acceptance, features)

    def propose(self) -> Proposal:
        """Return the head's tree below each root. Without a head, return the roots alone."""
        if self.head is None:
            return Proposal(self.state.root[:, None], self.zeros, self.zeros, self.zeros)
        return self.head.propose(self.head_state, self.rule.begin()).first(self.shape.nodes)

    def verify(
        self, proposal: Proposal, extent: int
    ) -> tuple[Features, tuple[Proposal, Tensor, Tensor, Tensor | None]]:
        """Return the target's features of a draft, and what the rule's `accept` takes. Node j of row b is in slot
        length[b] + j, at position length[b] + its depth."""
        length = self.state.length
        above = None if is_chain(self.shape) else ancestors(proposal.parents, self.shape.depth)
        mapping = TreeSlots(length, proposal.parents, proposal.depths, above, self.target.slot)
        features = self.target.forward(proposal.tokens, mapping, extent=extent)
        positions = length[:, None] + 1 + proposal.depths  # (B, N)
        outputs = self.rule.target_outputs(features.hidden, positions, self.counts(proposal.tokens, above))
        return features, (proposal, outputs, positions, above)

    def counts(self, tokens: Tensor, above: Tensor | None) -> Tensor | None:
        """Return (B, N, V) float32: how often the output up to each node, the node included, has each token. None if no
        row has a penalty. tokens (B, N): of the nodes; above: `ancestors` of the proposal, or None for a chain."""
        if not self.sampling.penalised:
            return None
        output = self.state.output
        B, N = tokens.shape
        index = torch.arange(output.shape[1], device=output.device)
        before = (index < self.state.output_length[:, None] - 1).float()  # the root, the last of them, is a node
        counts = before.new_zeros(B, self.sampling.vocab_size).scatter_add_(1, output, before)
        if above is None:
            above = (index[:N] <= index[:N, None]).expand(B, N, N)
        return counts[:, None].repeat(1, N, 1).scatter_add_(2, tokens[:, None].expand(B, N, N), above.float())

    def commit(self, proposal: Proposal, acceptance: Acceptance, features: Features) -> None:
        """Add the accepted tokens to the state, cut at EOS and at the limit, and let the head read the new tokens."""
        chain = is_chain(self.shape)
        path = acceptance.path
        depths = None if chain else proposal.depths
        result = self.update(acceptance.accepted, acceptance.emitted, depths, proposal.copied)
        if not chain:
            self.target.compact(result.start, path)
        if self.head is None:
            return
        aux_hidden_states = features.aux_hidden_states
        hidden = features.hidden
        if not chain:  # the path of a chain is its nodes in order
            aux_hidden_states, hidden = (x.take_along_dim(path[..., None], 1) for x in (aux_hidden_states, hidden))
        observation = Observation(
            tokens=result.tokens,
            aux_hidden_states=aux_hidden_states,
            hidden=hidden,
            start=result.start,
            count=result.count,
            nodes=path,
        )
        self.head.extend(self.head_state, observation)


def read_prompts(decoder: Decoder, new_requests: dict[int, Request]) -> None:
    """Start each request in its row: read its prompt into the caches, choose its first token, set its state."""
    if decoder.head is not None:
        is_new = [row in new_requests for row in range(len(decoder.state.done))]
        decoder.head.reset_rows(decoder.head_state, torch.tensor(is_new, device=decoder.state.done.device))
    start = 0
    while sizes := {
        row: chunk_size(decoder.target, len(request.prompt) - start)
        for row, request in new_requests.items()
        if len(request.prompt) > start
    }:
        features: dict[int, Features] = {}
        spans: dict[int, Tensor] = {}
        for C in sorted(set(sizes.values())):
            R = rows_of_pass(decoder.target, C)
            for first in range(0, len(decoder.state.done), R):
                reading = {row: new_requests[row] for row in range(first, first + R) if sizes.get(row) == C}
                if reading:
                    read_chunks(decoder, (first, R, C), reading, start, features, spans)
        if decoder.head is not None:
            extend(decoder, features, spans, start)
        start += max(len(span) - 1 for span in spans.values())


def read_chunks(
    decoder: Decoder,
    shape: tuple[int, int, int],
    reading: dict[int, Request],
    start: int,
    features: dict[int, Features],
    spans: dict[int, Tensor],
) -> None:
    """Read the next chunk of some rows' prompts in a pass of a `shape`: its first row, R and C. Add each row's features
    (1, C, ..), and the tokens of its chunk with the token after it."""
    first, R, C = shape
    device = decoder.state.root.device
    tokens = torch.zeros(R, C, dtype=torch.int64)
    reads = torch.zeros(R, dtype=torch.bool)
    for row, request in reading.items():
        chunk = torch.tensor(request.prompt[start : start + C])
        tokens[row - first, : len(chunk)] = chunk
        reads[row - first] = True
    tokens = tokens.to(device)
    read = decoder.target.prefill(first, tokens, start, reads.to(device) if R > 1 else None)
    for row, request in reading.items():
        of_row = slice(row - first, row - first + 1)
        features[row] = Features(read.aux_hidden_states[of_row], read.hidden[of_row])
        count = min(C, len(request.prompt) - start)
        if start + C < len(request.prompt):
            root = torch.tensor(request.prompt[start + C : start + C + 1], device=device)
        else:
            root = open_row(decoder, row, request, read.hidden[of_row, count - 1 : count])
        spans[row] = torch.cat([tokens[row - first, :count], root])


def rows_of_pass(target: CachedDecoder, C: int) -> int:
    """Return the number of rows of a pass with chunks of C tokens: a divisor of the batch's."""
    B = target.spec.batch_size
    if not target.pads or isinstance(target.model.base, EncoderDecoder):
        return 1
    return max(R for R in range(1, B + 1) if B % R == 0 and (R == 1 or R * C <= CHUNK))


def chunk_size(target: CachedDecoder, remaining: int) -> int:
    """Return the number of slots of the next prefill step: with padding, the power of two that covers the remaining
    tokens, at least 16 and at most all slots. At most CHUNK, except for an encoder, which reads a prompt in one
    step."""
    size = min(max(16, 1 << (remaining - 1).bit_length()), target.spec.capacity) if target.pads else remaining
    return size if isinstance(target.model.base, EncoderDecoder) else min(CHUNK, size)


def open_row(decoder: Decoder, row: int, request: Request, hidden: Tensor) -> Tensor:
    """Choose the first token (1,) from the hidden state (1, 1, D) of the prompt's last token, and set the row's
    state."""
    state = decoder.state
    P = len(request.prompt)
    decoder.sampling.set_row(row, request.sampling, request.prompt)
    position = torch.full((1, 1), P, device=hidden.device)
    logits = decoder.target.logits(hidden)
    counts = torch.zeros_like(logits) if request.sampling.penalises else None
    root = decoder.sampling.row(row).choose(logits, position, counts)[0]
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
    B = len(decoder.state.done)
    M = max(f.hidden.shape[1] for f in features.values())
    first = next(iter(features.values()))
    tokens = decoder.state.root.new_zeros(B, M + 1)
    aux_hidden_states = first.aux_hidden_states.new_zeros(B, M, first.aux_hidden_states.shape[-1])
    hidden = first.hidden.new_zeros(B, M, first.hidden.shape[-1])
    count = decoder.state.root.new_zeros(B)
    for row, span in spans.items():
        C = features[row].hidden.shape[1]
        tokens[row, : len(span)] = span
        aux_hidden_states[row, :C] = features[row].aux_hidden_states[0]
        hidden[row, :C] = features[row].hidden[0]
        count[row] = len(span) - 1
    decoder.head.extend(
        decoder.head_state, Observation(tokens, aux_hidden_states, hidden, torch.full_like(count, start), count, None)
    )
