"""Calibration of a confidence head by sequential temperature scaling, as SGLang 0.5.23 fits it and reads it.

    s_k = prod over j <= k of sigmoid(z_j / t_j)      estimates P(the first k draft tokens of a round are accepted)

z_j is the confidence's logit of the j-th draft token. In the order of the positions, t_k is the temperature of TRIED at
which s_k has the least expected calibration error, with the temperatures before it fixed. The tokens are drafted and
judged greedily, as `sglang.benchmark.dspark_sts_fit` expects.

Letters: n rounds, K depth, G temperatures.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from eval.measure.progress import Progress
from eval.runtime.engine import Engine, Request
from eval.runtime.round import read_prompts
from heads.core.errors import UserError
from heads.targets.slots import round_up

TRIED = torch.logspace(-1, 1, 41, dtype=torch.float64)
BINS = 15


@torch.inference_mode()
def record_confidence(engine: Engine, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """Decode requests, one at a time. Return the confidence's logits (n, K) of all rounds and their numbers of accepted
    draft tokens (n,), which the end of an output does not cut.

    The engine's batch size is 1, its draft a chain, and its head a DSpark with a confidence head. Raises UserError if
    no output has a round.
    """
    decoder, state, head = engine.decoder, engine.decoder.state, cast(Any, engine.decoder.head)
    logits, accepted = [], []
    with Progress("confidence: output", len(requests)) as progress:
        for request in requests:
            state.done.fill_(True)
            read_prompts(decoder, {0: request})
            while not state.done[0]:
                proposal = decoder.propose()
                logits.append(head.confidence(decoder.head_state, proposal.tokens))
                extent = min(round_up(int(state.length[0]) + engine.nodes), decoder.target.spec.capacity)
                features, verified = decoder.verify(proposal, extent)
                acceptance = decoder.rule.accept(*verified)
                accepted.append(acceptance.accepted)
                decoder.commit(proposal, acceptance, features)
            progress.advance()
    if not accepted:
        raise UserError(
            "every output ended with its first token, and nothing was drafted; use other prompts, or allow more new "
            "tokens"
        )
    return torch.cat(logits).cpu(), torch.cat(accepted).cpu()


def calibration_error(estimates: Tensor, kept: Tensor) -> Tensor:
    """Return the expected calibration errors (...) of probabilities (..., n): the mean over the rounds of |mean
    estimate - mean outcome| of their bin, of BINS equal ones. kept (n,): the outcomes, 0 or 1."""
    bins = (estimates * BINS).long().clamp_max(BINS - 1)
    gaps = estimates.new_zeros(*estimates.shape[:-1], BINS).scatter_add(-1, bins, estimates - kept)
    return gaps.abs().sum(-1) / len(kept)


def fit_temperatures(logits: Tensor, accepted: Tensor) -> dict[str, list[float]]:
    """Return the temperatures, and the errors before and after by position, under SGLang's names. logits (n, K);
    accepted (n,)."""
    logits = logits.double()
    kept = (torch.arange(logits.shape[1]) < accepted[:, None]).double().T  # (K, n)
    plain = survival = logits.new_ones(len(logits))
    fitted: dict[str, list[float]] = {"temperatures": [], "ece_before": [], "ece_after": []}
    for position, outcome in zip(logits.T, kept, strict=True):
        plain = plain * position.sigmoid()
        estimates = survival * (position / TRIED[:, None]).sigmoid()  # (G, n)
        errors = calibration_error(estimates, outcome)
        best = int(errors.argmin())  # the first of equal ones
        survival = estimates[best]
        fitted["temperatures"].append(float(TRIED[best]))
        fitted["ece_before"].append(float(calibration_error(plain, outcome)))
        fitted["ece_after"].append(float(errors[best]))
    return fitted
