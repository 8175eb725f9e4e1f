"""Comparison of an output with that of plain decoding, bit for bit, in types so narrow that the order of a sum matters.

In bfloat16 a product of one row and a product of eight rows use different kernels with different rounding, and if two
logits differ by less than a rounding error, another token is chosen. So the reference is plain decoding in steps of as
many nodes as the rounds have (`EngineOptions.pinned`): the same kernels on the same shapes. Chains must repeat it
exactly, and so must trees under `strict`. Other trees read their ancestors from other slots than plain decoding does,
so sums are computed in another order. If that changes a choice, the two tokens' scores must differ by at most two units
in the last place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eval.runtime.engine import Engine
from eval.runtime.request import Request
from eval.runtime.round import read_prompts
from heads.target.noise import gumbel
from heads.tree import ROOT_ONLY

NEAR = 2.0
"""Maximum gap of a near-tie, in units in the last place of the target's dtype at the size of the larger logit."""


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

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= NEAR * self.ulp


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
