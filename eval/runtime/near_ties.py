"""Comparison of an output that differs from plain decoding's with plain decoding at the width of the rounds.

The rounding of a row's product depends on the number of rows, in every dtype and on every device: a product of one row
and a product of eight use different kernels, which sum in another order. If two logits differ by less than that,
another token is chosen. So a text that differs is given, token by token, to plain decoding in steps of as many nodes as
the rounds have, of which all but the root are padding: the same kernels on the same shapes. If each of its tokens is
the choice there, it is a near-tie.

Trees read their ancestors from other slots than plain decoding does, so their sums may have yet another order. There,
each token that plain decoding at that width would not have chosen must be near the chosen one: their scores may differ
by at most NEAR units in the last place.

A filter (top-k, top-p, min-p) has edges, and rounding may move a token over one of them. So the gap of a row with
filters is the distance by which the logits would have to move for the token to be chosen: for it to pass the filters,
and for each token with a higher score to fall behind it or to fail one. The masses are summed in float64.

A wrong result at the width of the rounds would be wrong in both texts. So the text is also given to plain decoding in
steps of one row. Each token that it would not have chosen must be within FAR units of its choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from eval.runtime.distribution import RowSampling
from eval.runtime.engine import Engine
from eval.runtime.request import Request
from eval.runtime.round import read_prompts
from eval.runtime.rules import Match
from eval.runtime.sampling_params import Sampling
from heads.core.tree import ROOT_ONLY, is_chain
from heads.kernels.gumbel import gumbel
from heads.kernels.product import MAX_ROWS
from heads.kernels.slots import TreeSlots, round_up

NEAR = 2.0
"""Maximum gap of a near-tie between steps of one width, in units in the last place of the target's dtype at the size of
the larger logit."""
FAR = 16.0
"""The same between steps of one row and of several."""
MAX_RIVALS = 256
"""Number of tokens with a higher score above which a token is nowhere near the choice."""


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
    """Result of `check_near_tie`."""

    is_near_tie: bool
    mismatches: list[Mismatch]
    """Mismatches in steps of one row, then those in steps as wide as the rounds."""


def check_near_tie(
    engine: Engine, plain: Engine, request: Request, expected: Sequence[int], tokens: Sequence[int]
) -> NearTieCheck:
    """Compare a text of `engine` with the one `expected`, which plain decoding gave and which differs. `plain`: an
    engine for plain decoding."""
    position = first_difference(expected, tokens)
    if position is None or position >= min(len(expected), len(tokens)):  # a text that ends elsewhere is no near-tie
        return NearTieCheck(False, [])
    narrow = find_mismatches(plain, request, tokens)
    if not all(mismatch.is_within(FAR) for mismatch in narrow):
        return NearTieCheck(False, narrow)
    wide = find_mismatches(engine, request, tokens)
    # Above MAX_ROWS products are torch's, whose rounding also depends on the place of a row among the others.
    may_differ = not is_chain(engine.options.shape) or engine.decoder.target.rows > MAX_ROWS
    is_near_tie = all(may_differ and mismatch.is_within(NEAR) for mismatch in wide)
    return NearTieCheck(is_near_tie, narrow + wide)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two token sequences differ, or None if they are equal. If one is a prefix of
    the other, the position is its length."""
    return next((position for position, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


@torch.inference_mode()
def find_mismatches(engine: Engine, request: Request, tokens: Sequence[int]) -> list[Mismatch]:
    """Give a whole output, token by token, to plain decoding in steps as wide as the engine's rounds. Return the tokens
    that it would not have chosen. The engine decodes nothing else meanwhile."""
    decoder = replace(engine.decoder, head=None)
    state, target, sampling = decoder.state, decoder.target, decoder.sampling
    rule = Match(ROOT_ONLY, sampling, target)
    state.done.fill_(True)
    state.length.zero_()
    read_prompts(decoder, {0: replace(request, max_new_tokens=len(tokens))})
    given = torch.tensor(tokens, device=state.root.device)
    state.output[0, : len(tokens)] = given
    first = int(state.root[0])
    mismatches = [Mismatch(0, tokens[0], first, math.inf, 0.0)] if first != tokens[0] else []
    depths = target.slot[: engine.nodes].expand(len(state.root), -1)
    found = []
    edges: dict[int, Edges] = {}
    for t in range(len(tokens) - 1):
        state.root[:1] = given[t : t + 1]
        mapping = TreeSlots(state.length, (depths - 1).clamp_min(0), depths, None, target.slot)
        extent = min(round_up(len(request.prompt) + t + engine.nodes), target.spec.capacity)
        nodes = state.root[:, None].expand(depths.shape).contiguous()  # the root, and padding
        hidden = target.forward(nodes, mapping, extent=extent).hidden
        positions = state.length[:, None] + 1 + depths
        counts = decoder.counts(nodes, None)
        chosen, logits = rule.target_outputs(hidden, positions, counts)[0, 0], target.logits(hidden)
        penalised = sampling.penalise(logits, counts)
        scores = scores_of(sampling, penalised, positions)
        pair = torch.stack([chosen, given[t + 1]])
        parts = (pair, scores[pair], logits[0, 0, pair], penalised[0, 0, pair])
        found.append(torch.cat([part.double() for part in parts]))
        if request.sampling.filters and not torch.equal(*pair):
            noise = gumbel(sampling.seed, positions[:, :1], torch.arange(logits.shape[-1], device=logits.device))[0, 0]
            edges[t + 1] = Edges(request.sampling, penalised[0, 0].double(), noise.double())
        state.length[:1] += 1
        state.output_length[:1] += 1
    for t, (chosen, token, best, score, *sizes) in enumerate(torch.stack(found).tolist() if found else [], start=1):
        if chosen != token:
            largest = max(abs(size) for size in [*sizes, *([edges[t].top] if t in edges else [])])
            ulp = torch.finfo(engine.target.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30)))
            gap = edges[t].gap(int(token), ulp) if t in edges else best - score
            mismatches.append(Mismatch(t, int(token), int(chosen), gap, ulp))
    return mismatches


class Edges:
    """A filtered distribution's logits (V,), after penalties, with the noise of its position, both in float64."""

    def __init__(self, sampling: Sampling, logits: Tensor, noise: Tensor) -> None:
        self.sampling, self.logits = sampling, logits
        self.scores = logits + sampling.temperature * noise
        self.falling = logits.sort(descending=True).values
        self.top = float(self.falling[0])
        self.weights = ((logits - self.top) / sampling.temperature).exp()
        lowest = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self.floor = self.top + sampling.temperature * lowest  # of min-p

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


def scores_of(sampling: RowSampling, logits: Tensor, positions: Tensor) -> Tensor:
    """Return the scores (V,) of all tokens after row 0's root, in units of logits, given penalised logits. A score is
    the logit, plus the scaled noise in a row that samples."""
    first = logits[0, 0].float()
    if not sampling.random:
        return first
    ids = torch.arange(logits.shape[-1], device=logits.device)
    logp = sampling.log_distribution(logits[:, :1])[0, 0]
    noise = gumbel(sampling.seed, positions[:, :1], ids)[0, 0]
    temperature = sampling.temperature[0]
    return torch.where(temperature > 0, (logp + noise) * temperature, first)
