"""Prompts: reading into the caches of the target and the head, and the choice of the first token of each.

The target reads one row at a time, so that what a request computes cannot depend on its neighbours; the head, which
takes a whole batch, reads the chunks of all new rows together.

Letters: B rows, C tokens of one row's chunk, M the longest chunk of a step, D hidden.
"""

import torch
from torch import Tensor

from eval.runtime.request import Request
from eval.runtime.round import Decoder
from heads.base import Observation
from heads.target.frozen import Features


def read_prompts(decoder: Decoder, newcomers: dict[int, Request]) -> None:
    """Start each request in its row: prompt in the caches, first token chosen, ready for rounds."""
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
    """Read one row's next chunk. Return its features (1, C, ..), and the tokens from `start` on, one more than the
    chunk has."""
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
    """Choose the first token (1,) from the hidden state (1, 1, D) of the prompt's last, and set the row's state."""
    state, P = decoder.state, len(request.prompt)
    decoder.sampling.set_row(row, request.sampling)
    position = torch.full((1, 1), P, device=hidden.device)
    root = decoder.sampling.row(row).choose(decoder.step.logits(hidden), position)[0]
    state.length[row] = P
    state.root[row : row + 1] = root
    state.limit[row] = request.max_new_tokens
    state.heeds_eos[row] = not request.ignore_eos
    state.output[row, :1] = root
    state.output_length[row] = 1
    state.rounds[row] = 0
    state.accepted[row] = state.reached[row] = 0  # rounds that draft nothing leave them as they are
    state.done[row] = request.max_new_tokens == 1
    if not request.ignore_eos:
        state.done[row : row + 1].logical_or_((root == decoder.update.eos).any())
    return root


def extend(decoder: Decoder, features: dict[int, Features], spans: dict[int, Tensor], start: int) -> None:
    """Let the head read one chunk of every new row's prompt; the other rows are unchanged."""
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
