"""Comparison of an output that differs from plain decoding's with plain decoding at the width of the rounds.

The rounding of a row's product depends on the number of rows, in every dtype and on every device: a product of one row
and a product of eight use different kernels, which sum in another order. If two logits differ by less than that,
another token is chosen. So a text that differs is compared with plain decoding in steps of as many nodes as the rounds
have (`EngineOptions.pinned`): the same kernels on the same shapes. If it is equal to that, it is a near-tie.

Trees read their ancestors from other slots than plain decoding does, so their sums may have yet another order. There,
each token that plain decoding at that width would not have chosen must be near the chosen one: their scores may differ
by at most NEAR units in the last place.

A wrong result at the width of the rounds would be wrong in both texts. So the text is also given, token by token, to
plain decoding in steps of one row. Each token that it would not have chosen must be within FAR units of its choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from eval.runtime.engine import Engine
from eval.runtime.request import Request
from eval.runtime.round import read_prompts
from heads.core.tree import ROOT_ONLY, is_chain
from heads.targets.gumbel import gumbel

NEAR = 2.0
"""Maximum gap of a near-tie between steps of one width, in units in the last place of the target's dtype at the size of
the larger logit."""
FAR = 16.0
"""The same between steps of one row and of several."""


@dataclass(frozen=True)
class Flip:
    """A token that plain decoding, given all tokens before it, would not have chosen."""

    position: int
    """Index in the output."""
    token: int
    chosen: int
    """Plain decoding's choice."""
    gap: float
    """Difference between the scores of the two tokens, in units of logits."""
    ulp: float
    """Unit in the last place of the larger of the two logits."""

    def is_within(self, ulps: float) -> bool:
        return self.gap <= ulps * self.ulp


@dataclass(frozen=True)
class Verdict:
    is_near_tie: bool
    flips: list[Flip]
    """Flips in steps of one row, then, if the text is not that of steps as wide as the rounds, flips in those."""


class Judge:
    """Comparison of an engine's texts with plain decoding's. The engine at the rounds' width is built once."""

    def __init__(self, engine: Engine, plain: Engine) -> None:
        """`plain`: an engine for plain decoding in steps of one node."""
        self.plain, self.pinned = plain, pinned_engine(engine)
        self.may_flip = not is_chain(engine.options.shape)

    def compare(self, request: Request, expected: Sequence[int], tokens: Sequence[int]) -> Verdict:
        """Compare a text with the one `expected`, which plain decoding gave and which differs."""
        position = first_difference(expected, tokens)
        if position is None or position >= min(len(expected), len(tokens)):  # a text that ends elsewhere is no near-tie
            return Verdict(False, [])
        narrow = find_flips(self.plain, request, tokens)
        if not all(flip.is_within(FAR) for flip in narrow):
            return Verdict(False, narrow)
        if self.pinned.generate([request])[0].tokens == list(tokens):
            return Verdict(True, narrow)
        wide = find_flips(self.pinned, request, tokens)
        return Verdict(self.may_flip and all(flip.is_within(NEAR) for flip in wide), narrow + wide)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two token sequences differ, or None if they are equal. If one is a prefix of
    the other, the position is its length."""
    return next((position for position, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


def pinned_engine(engine: Engine) -> Engine:
    """Return the reference for an engine: plain decoding in steps of as many nodes as the engine's rounds have."""
    options = replace(engine.options, shape=ROOT_ONLY, rule="match", pinned=engine.nodes)
    return Engine(engine.target, None, options)


@torch.inference_mode()
def find_flips(pinned: Engine, request: Request, tokens: Sequence[int]) -> list[Flip]:
    """Run the reference over a whole output, token by token, and return the tokens that it would not have chosen."""
    decoder, state, step = pinned.decoder, pinned.decoder.state, pinned.decoder.step
    state.done.fill_(True)
    state.length.zero_()
    read_prompts(decoder, {0: replace(request, max_new_tokens=len(tokens))})
    given = torch.tensor(tokens, device=state.root.device)
    first = int(state.root[0])
    flips = [Flip(0, tokens[0], first, math.inf, 0.0)] if first != tokens[0] else []
    found = []
    for t in range(len(tokens) - 1):
        state.root[:1] = given[t : t + 1]
        proposal = decoder.propose()
        hidden = step.verify(proposal, None, state.length, step.capacity).hidden
        positions = state.length[:, None] + 1 + proposal.depths
        chosen = step.choose(hidden, positions, decoder.sampling)[0, 0]
        scores, logits = scores_of(pinned, step.logits(hidden), positions)
        pair = torch.stack([chosen, given[t + 1]])
        found.append(torch.cat([pair.double(), scores[pair].double(), logits[pair].double()]))
        state.length[:1] += 1
    for t, row in enumerate(torch.stack(found).tolist() if found else [], start=1):
        wanted, token, best, score, *sizes = row
        if wanted != token:
            largest = max(abs(size) for size in sizes)
            ulp = torch.finfo(pinned.target.dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30)))
            flips.append(Flip(t, int(token), int(wanted), best - score, ulp))
    return flips


def scores_of(engine: Engine, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of all tokens after row 0's root, in units of logits, and their logits; (V,) each. A score is
    the logit, plus the scaled noise in a row that samples."""
    sampling = engine.decoder.sampling
    own = logits[0, 0].float()
    if not sampling.random:
        return own, own
    ids = torch.arange(logits.shape[-1], device=logits.device)
    logp = sampling.log_distribution(logits[:, :1])[0, 0]
    noise = gumbel(sampling.seed, positions[:, :1], ids)[0, 0]
    temperature = sampling.temperature[0]
    return torch.where(temperature > 0, (logp + noise) * temperature, own), own
