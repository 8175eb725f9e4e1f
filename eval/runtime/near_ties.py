"""Comparison of an output that differs from plain decoding's with plain decoding at the width of the rounds.

The rounding of a row's product depends on the number of rows, in every dtype and on every device: a product of one row
and a product of eight use different kernels, which sum in another order. If two logits differ by less than that,
another token is chosen. So texts that differ are given to plain decoding in passes of as many rows as the rounds have,
with their own next tokens in place of a draft: the same kernels on the same shapes. If each token of a text is the
choice there, it is a near-tie.

Trees read their ancestors from other slots than plain decoding does, so their sums may have yet another order. There,
each token that plain decoding at that width would not have chosen must be near the chosen one: their scores may differ
by at most NEAR units in the last place.

A filter (top-k, top-p, min-p) has edges, and rounding may move a token over one of them. So the gap of a row with
filters is the distance by which the logits would have to move for the token to be chosen: for it to pass the filters,
and for each token with a higher score to fall behind it or to fail one. The masses are summed in float64.

A wrong result at the width of the rounds would be wrong in both texts. So the texts are also given, whole, to the model
itself. Each token that it would not have chosen must be within FAR units of its choice.

Letters: B rows, N nodes, W tokens, T tokens of a text, D hidden, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from eval.runtime.acceptance_rules import Match
from eval.runtime.distribution import RowSampling
from eval.runtime.engine import Engine
from eval.runtime.request import Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling_params import Sampling
from heads.core.tree import ROOT_ONLY, is_chain
from heads.kernels.gumbel import gumbel
from heads.kernels.product import MAX_ROWS
from heads.kernels.slots import TreeSlots, round_up
from heads.targets.frozen_target import FrozenTarget

NEAR = 2.0
"""Maximum gap of a near-tie between steps of one width, in units in the last place of the target's dtype at the size of
the larger logit."""
FAR = 16.0
"""The same between the model's own pass over a whole text and plain decoding."""
PASS_TOKENS = 4096
"""Maximum number of tokens in a pass over several texts."""
CHOICES = 64
"""Number of positions of a text whose logits are in memory at once."""
MAX_RIVALS = 256
"""Number of tokens with a higher score above which a token is nowhere near the choice."""


Text = tuple[Request, Sequence[int]]
"""A request and the tokens of an output."""


@dataclass(frozen=True)
class Mismatch:
    """A token that plain decoding, given all tokens before it, would not have chosen."""

    position: int
    """Index in the output."""
    token: int
    chosen: int
    """Plain decoding's choice."""
    gap: float
    """Difference between the scores of the two tokens, in units of logits; with filters, as said above."""
    ulp: float
    """Unit in the last place of the larger of the two logits, and with filters of the likeliest token's."""

    def is_within(self, ulps: float) -> bool:
        return self.gap <= ulps * self.ulp


@dataclass(frozen=True)
class NearTieCheck:
    """Result of `check_near_ties` for one text."""

    is_near_tie: bool
    mismatches: list[Mismatch]
    """Mismatches in the model's own pass, then those in passes as wide as the rounds."""


def check_near_ties(
    engine: Engine, given: Sequence[tuple[Request, Sequence[int], Sequence[int]]]
) -> list[NearTieCheck]:
    """Compare texts of `engine` with plain decoding's, from which they differ. `given`: of each its request, plain
    decoding's text and the engine's."""
    pairs = [(request, text) for request, _, text in given]
    own = find_mismatches(engine.target, pairs)
    # A text that ends elsewhere is no near-tie.
    inside = [(first_difference(*texts) or 0) < min(map(len, texts)) for _, *texts in given]
    near = [n for n, found in enumerate(own) if inside[n] and all(mismatch.is_within(FAR) for mismatch in found)]
    wide = dict(zip(near, mismatches_of_rounds(engine, [pairs[n] for n in near]), strict=True))
    # Above MAX_ROWS products are torch's, whose rounding also depends on the place of a row among the others.
    may_differ = not is_chain(engine.shape) or engine.decoder.target.rows > MAX_ROWS
    is_near_tie = {n: all(may_differ and mismatch.is_within(NEAR) for mismatch in found) for n, found in wide.items()}
    return [NearTieCheck(is_near_tie.get(n, False), found + wide.get(n, [])) for n, found in enumerate(own)]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two token sequences differ, or None if they are equal. If one is a prefix of
    the other, the position is its length."""
    return next((position for position, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


@torch.inference_mode()
def find_mismatches(target: FrozenTarget, given: Sequence[Text]) -> list[list[Mismatch]]:
    """Give whole texts to the model itself. Return, for each of them, the tokens that it would not have chosen."""
    found = []
    for (request, text), hidden in zip(given, own_states(target, given), strict=True):
        sampling = target_sampling(target, request)
        ids = torch.tensor([text], dtype=torch.int64, device=target.device)
        mismatches = []
        for start in range(0, len(text), CHOICES):
            tokens = ids[:, start : start + CHOICES]
            positions = len(request.prompt) + start + torch.arange(tokens.shape[1], device=target.device)[None]
            logits = target.shared.lm_head(hidden[None, start : start + tokens.shape[1]])
            counts = counts_before(sampling, ids[:, :start], tokens)
            chosen = sampling.choose(logits, positions, counts)
            for j in (chosen != tokens)[0].nonzero()[:, 0].tolist():
                pair = int(tokens[0, j]), int(chosen[0, j])
                counted = None if counts is None else counts[:, j : j + 1]
                mismatches.append(
                    mismatch_of(target, sampling, request, start + j, pair, logits[:, j : j + 1], counted)
                )
        found.append(mismatches)
    return found


def own_states(target: FrozenTarget, given: Sequence[Text]) -> Iterator[Tensor]:
    """Yield, for each text, the states (T + 1, D) after its prompt and after each of its tokens, as the model computes
    them without a cache, several texts in a pass."""
    rows = [[*request.prompt, *text] for request, text in given]
    start = 0
    while start < len(rows):
        longest = len(rows[start])
        end = start + 1
        # An encoder's input ends at another slot in each row.
        while target.start_token is None and end < len(rows):
            if max(longest, len(rows[end])) * (end + 1 - start) > PASS_TOKENS:
                break
            longest = max(longest, len(rows[end]))
            end += 1
        padded = [row + row[-1:] * (longest - len(row)) for row in rows[start:end]]  # no token sees what follows it
        hidden = target.alone(torch.tensor(padded, device=target.device))
        for n in range(start, end):
            last = hidden.shape[1] - longest + len(rows[n])  # an encoder's states are those of the last slots
            yield hidden[n - start, last - len(given[n][1]) - 1 : last]
        start = end


@torch.inference_mode()
def mismatches_of_rounds(engine: Engine, given: Sequence[Text]) -> list[list[Mismatch]]:
    """Give texts, as many at once as the engine has rows, to plain decoding in passes as wide as the engine's rounds.
    Return, for each of them, the tokens that it would not have chosen. The engine decodes nothing else meanwhile."""
    decoder = replace(engine.decoder, head=None)
    state = decoder.state
    target = decoder.target
    sampling = decoder.sampling
    rule = Match(ROOT_ONLY, sampling, target)
    B = len(state.root)
    N = engine.nodes
    node = target.slot[:N].expand(B, N)
    found: list[list[Mismatch]] = [[] for _ in given]
    for first in range(0, len(given), B):
        rows = given[first : first + B]
        state.done.fill_(True)
        state.length.zero_()
        for row in range(B):
            sampling.set_row(row, Sampling())
        read_prompts(decoder, {n: replace(request, max_new_tokens=len(text)) for n, (request, text) in enumerate(rows)})
        start = state.length.clone()
        longest = max(len(text) for _, text in rows)
        tokens = node.new_zeros(B, longest + N)
        lengths = node.new_ones(B)
        for n, (_, text) in enumerate(rows):
            tokens[n, : len(text)] = torch.tensor(text)
            lengths[n] = len(text)
            if (root := int(state.root[n])) != text[0]:
                found[first + n].append(Mismatch(0, text[0], root, math.inf, 0.0))
        for t in range(0, longest - 1, N):
            # A row whose text has ended repeats its last pass.
            begin = torch.minimum(torch.full_like(start, t), (lengths - 2).clamp_min(0) // N * N)
            place = begin[:, None] + node
            mapping = TreeSlots(start + begin, (node - 1).clamp_min(0), node, None, target.slot)
            extent = min(round_up(int(mapping.slots.max()) + 1), target.spec.capacity)
            hidden = target.forward(tokens.gather(1, place), mapping, extent=extent).hidden
            following = tokens.gather(1, place + 1)
            counts = counts_before(sampling, tokens[:, : t + 1], following)
            chosen = rule.target_outputs(hidden, mapping.positions + 1, counts)
            differs = (chosen != following) & (place + 1 < lengths[:, None]) & (begin == t)[:, None]
            for n, j in differs.nonzero().tolist():
                pair = int(following[n, j]), int(chosen[n, j])
                logits = target.logits(hidden)[n : n + 1, j : j + 1]
                counted = None if counts is None else counts[n : n + 1, j : j + 1]
                found[first + n].append(
                    mismatch_of(engine.target, sampling.row(n), rows[n][0], t + j + 1, pair, logits, counted)
                )
    return found


def target_sampling(target: FrozenTarget, request: Request) -> RowSampling:
    """Return a request's sampling as a batch of one row."""
    sampling = RowSampling(1, target.device, target.vocab_size, target.start_token)
    sampling.set_row(0, request.sampling, request.prompt)
    return sampling


def counts_before(sampling: RowSampling, earlier: Tensor, tokens: Tensor) -> Tensor | None:
    """Return (B, W, V) float32: how often the output has each token of the vocabulary before each of `tokens` (B, W),
    which follow those `earlier` (B, any). None if no row has a penalty."""
    if not sampling.penalised:
        return None
    each = torch.zeros(*tokens.shape, sampling.vocab_size, device=tokens.device).scatter_(2, tokens[..., None], 1.0)
    before = torch.zeros_like(each[:, 0]).scatter_add_(1, earlier, torch.ones_like(earlier, dtype=each.dtype))
    return before[:, None] + each.cumsum(1) - each


def mismatch_of(
    target: FrozenTarget,
    sampling: RowSampling,
    request: Request,
    position: int,
    pair: tuple[int, int],
    logits: Tensor,
    counts: Tensor | None,
) -> Mismatch:
    """Return the mismatch of a pair, the text's token and the chosen one, at a position of an output. sampling: of one
    row; logits (1, 1, V), before penalties, and counts (1, 1, V): as in `RowSampling.penalise`."""
    token, chosen = pair
    penalised = sampling.penalise(logits, counts)
    place = torch.full((1, 1), len(request.prompt) + position, device=logits.device)
    noise = gumbel(sampling.seed, place, torch.arange(logits.shape[-1], device=logits.device))
    edges = Edges(request.sampling, penalised[0, 0].double(), noise[0, 0].double())
    sizes = [1e-30, *logits[0, 0, [token, chosen]].tolist(), *penalised[0, 0, [token, chosen]].tolist()]
    if request.sampling.filters:
        sizes.append(edges.top)
    ulp = torch.finfo(target.dtype).eps * 2.0 ** math.floor(math.log2(max(map(abs, sizes))))
    gap = edges.gap(token, ulp) if request.sampling.filters else float(edges.scores[chosen] - edges.scores[token])
    return Mismatch(position, token, chosen, gap, ulp)


class Edges:
    """Logits (V,) of a position, after penalties, and its noise, both in float64, with the edges of its filters."""

    def __init__(self, sampling: Sampling, logits: Tensor, noise: Tensor) -> None:
        self.sampling, self.logits = sampling, logits
        self.scores = logits + sampling.temperature * noise
        self.falling = logits.sort(descending=True).values
        self.top = float(self.falling[0])
        self.weights = ((logits - self.top) / (sampling.temperature or 1.0)).exp()
        lowest = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self.floor = self.top + (sampling.temperature or 1.0) * lowest  # of min-p

    def gap(self, token: int, ulp: float) -> float:
        """Return the least distance by which logits must move for the token to be chosen, to 1/16 of a unit; infinity
        if it is far beyond what rounding does."""
        low, high = 0.0, 4 * FAR * ulp
        if not self.may_be_chosen(token, high):
            return math.inf
        while high - low > ulp / 16:
            middle = (low + high) / 2
            low, high = (low, middle) if self.may_be_chosen(token, middle) else (middle, high)
        return high

    def may_be_chosen(self, token: int, distance: float) -> bool:
        """Return True if the token passes all filters, and each token with a higher score fails one, where two logits
        may move by `distance` against each other."""
        z, k, p = self.logits, self.sampling.top_k or len(self.logits), self.sampling.top_p
        rivals = (self.scores > self.scores[token] + distance).nonzero()[:, 0]
        if len(rivals) > MAX_RIVALS:
            return False
        shift = math.exp(distance / self.sampling.temperature)
        kept = self.weights[z >= self.falling[min(k, len(z)) - 1] - distance].sum()  # the most and the least of top-k
        surely = self.weights[z > (self.falling[k] + distance if k < len(z) else -math.inf)].sum().clamp_min(1.0)
        higher = z > z[token] + distance
        if bool(z[token] < self.floor - distance) or int(higher.sum()) >= k:
            return False
        if p < 1 and bool(odds(self.weights[higher].sum(), kept) / shift >= p / (1 - p)):
            return False
        others = (z >= z[rivals, None] - distance).double()  # (rivals, V)
        others[torch.arange(len(rivals)), rivals] = 0.0
        fails = (others.sum(1) >= k) | (z[rivals] <= self.floor + distance)
        if p < 1:
            fails |= odds(others @ self.weights, surely) * shift >= p / (1 - p)
        return bool(fails.all())


def odds(mass: Tensor, whole: Tensor) -> Tensor:
    """Return the odds of a part of a whole, which is at most the whole."""
    share = (mass / whole).clamp(max=1.0)
    return share / (1 - share)
