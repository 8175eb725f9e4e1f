"""Choice of tokens from one processed distribution, with noise that depends only on (seed, position, token id).

    r_t      = logits_t / repetition if logits_t > 0 else logits_t * repetition       for tokens in prompt or output
    z_t      = r_t - frequency * count_t - presence * [count_t > 0]                   count_t: in the output before t
    p_t      = min_p(top_p(top_k(softmax(z_t / T))))               in float32; at T = 0 all of it on the argmax
    choice_t = argmax(log p_t + G(seed, t))                        lowest id on ties

log p_t may be replaced by anything that differs from it by a constant, so no choice needs a sum over the vocabulary. G
is Gumbel noise, so the choice is a draw from p_t. G is a pure function of the seed, the absolute position and the token
id, so the draw is the same on every device, in every batch, tree and round. That makes sampled speculative decoding
equal to plain decoding token for token, and lets a draft use the same noise as the target. A draft's q, where a rule
needs it, is made here (`log_distribution`) and kept in `acceptance_rules.Draws`.

Letters: B rows of the batch, W positions per row, V vocabulary, Vx columns of a draft's logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eval.runtime.sampling_params import Sampling
from heads.core.tree import Pick
from heads.kernels.gumbel import gumbel
from heads.kernels.noisy_argmax import noisy_argmax, scaled

SHARPNESS = 1.5
"""Factor on a greedy row's logits in the probabilities that rank a tree's nodes. A greedy target always takes its
likeliest token, so a draft's likeliest token is right more often than its probability. Chosen on the quickstart's
heads, where it raises tau by 2 to 3% (eval/results/LAB.md). Sampled rows do not gain."""


class RowSampling:
    """Sampling settings of every row of a batch, as tensors, and the resulting choices. Rows may have any settings.

    The host flags `random` (any row samples), `filtered` (any row filters) and `penalised` (any row has a penalty)
    select cheaper computations with the same result. A greedy batch costs one argmax.
    """

    def __init__(
        self,
        batch_size: int,
        device: torch.device | str = "cpu",
        vocab_size: int = 0,
        start_token: int | None = None,
    ) -> None:
        """vocab_size, start_token: as of `heads.targets.frozen_target.FrozenTarget`; needed only for penalties."""
        self.vocab_size = vocab_size
        self.start_token = start_token
        self._rows: list[tuple[Sampling, Sequence[int]]] = [(Sampling(), ())] * batch_size
        self.temperature = torch.zeros(batch_size, device=device)  # (B,) float32
        self.top_k = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.top_p = torch.ones(batch_size, device=device)
        self.min_p = torch.zeros(batch_size, device=device)
        self.seed = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.penalties = torch.tensor([[1.0], [0.0], [0.0]], device=device).repeat(1, batch_size)
        """(3, B) float32, in the order of `PENALTIES`."""
        self.in_prompt: Tensor | None = None
        """(B, V) bool, the tokens of each penalised row's prompt; allocated for the first such row."""
        self.needs_logits = torch.zeros(batch_size, dtype=torch.bool, device=device)
        """(B,) True for rows with filters or penalties, whose choices need all logits."""
        self.random = self.filtered = self.penalised = False
        self.pick: Pick = self.pick_likeliest
        """Pick children for the rule `match`: those with the highest scores, noise included."""

    def set_row(self, row: int, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self._rows[row] = sampling, prompt
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.penalties[:, row] = torch.tensor(sampling.penalties, device=self.seed.device)
        self.needs_logits[row] = sampling.filters or sampling.penalises
        settings = [s for s, _ in self._rows]
        self.random = any(s.temperature > 0 for s in settings)
        self.filtered = any(s.filters for s in settings)
        self.penalised = any(s.penalises for s in settings)
        if sampling.penalises:
            if self.in_prompt is None:  # once: CUDA graphs keep its address
                size = len(self._rows), self.vocab_size
                self.in_prompt = torch.zeros(size, dtype=torch.bool, device=self.seed.device)
            text = list(prompt)
            if self.start_token is not None and text:
                del text[: text.index(self.start_token)]  # the encoder's input
            self.in_prompt[row] = False
            self.in_prompt[row, text] = True

    def row(self, row: int) -> "RowSampling":
        """Return the sampling of one row alone."""
        alone = type(self)(1, self.seed.device, self.vocab_size, self.start_token)
        alone.set_row(0, *self._rows[row])
        return alone

    def penalise(self, logits: Tensor, counts: Tensor | None) -> Tensor:
        """Return the penalised logits (B, W, V). counts (B, W, V): how often the output before the token to choose has
        each token; None leaves the logits as they are, those of a draft or of a batch without penalties. Neither do
        rows without penalties change. Takes the memory of about five copies of the logits, the counts included."""
        if counts is None:
            return logits
        assert self.in_prompt is not None
        repetition, presence, frequency = self.penalties[..., None, None].unbind()  # (B, 1, 1) each
        in_output = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(in_output | self.in_prompt[:, None], repeated, logits)
        return logits - frequency * counts - presence * in_output

    def log_distribution(self, logits: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return log p (B, W, V) in float32 of logits (B, W, V): penalties by `counts`, as in `penalise`, temperature,
        then top-k, top-p and min-p, each renormalizing the result of the previous one; -inf where a filter excludes the
        token. Every draw of a token uses this distribution."""
        return self._scaled(self.penalise(logits, counts)).log_softmax(dim=-1)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return `log_distribution` up to a constant per position, with 0 at the likeliest token."""
        scores, top = scaled(logits, self.temperature)
        if self.filtered:
            scores = scores.masked_fill(~_passes_filters(scores, self.top_k, self.top_p, self.min_p), -torch.inf)
        greedy = torch.full_like(scores, -torch.inf).scatter_(-1, top, 0.0)
        return torch.where((self.temperature > 0)[:, None, None], scores, greedy)

    def choose(self, logits: Tensor, positions: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the chosen token ids (B, W), given logits (B, W, V), positions (B, W) of the tokens to choose, and
        counts as in `penalise`."""
        logits = self.penalise(logits, counts)
        if not self.random:
            return logits.argmax(dim=-1)
        temperature = self.temperature
        if self.filtered:
            logits, temperature = self._scaled(logits), (temperature > 0).float()  # divided already
        return noisy_argmax(logits, temperature, self.seed, positions)

    def pick_likeliest(
        self, logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pick the likeliest tokens; a `heads.core.tree.Pick`."""
        W = logits.shape[1]
        if W > 1 and logits.stride(1) == positions.stride(1) == 0:  # independent heads: one distribution for all
            ids, logp = self.pick_likeliest(logits[:, :1], positions[:, :1], count, token_ids)
            return ids.expand(-1, W, -1), logp.expand(-1, W, -1)
        if not self.random:
            return best_columns(logits, SHARPNESS, count, token_ids)
        if count == 1:
            columns = noisy_argmax(logits.float(), self.temperature, self.seed, positions, token_ids)[..., None]
            return columns if token_ids is None else token_ids[columns], torch.zeros_like(columns, dtype=torch.float32)
        sharpness = torch.where(self.temperature > 0, 1.0, SHARPNESS)[:, None, None]
        return best_columns(self.perturb(logits, positions, token_ids), sharpness, count, token_ids)

    def perturb(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the scores that rank a draft's candidates, with the noise that `choose` will use at the same position.

        logits (B, W, Vx); positions (B, W) of the draft tokens; token_ids (Vx,) the target ids of the columns, None if
        they are 0 .. Vx - 1. For greedy rows, the scores are the logits in float32.
        """
        logits = logits.float()
        if not self.random:
            return logits
        if token_ids is None:
            token_ids = torch.arange(logits.shape[-1], device=logits.device)
        is_sampled = (self.temperature > 0)[:, None, None]
        divisor = torch.where(is_sampled, self.temperature[:, None, None], 1.0)
        together = positions.shape[1] > 1 and positions.stride(1) == 0  # all nodes of a tree level have one position
        noise = gumbel(self.seed, positions[:, :1] if together else positions, token_ids)
        return torch.where(is_sampled, logits / divisor + noise, logits)


def _passes_filters(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return (B, W, V) bool, True for tokens that pass all three filters. Each filter keeps a prefix of the tokens in
    descending order, so one sort is enough."""
    V = scaled.shape[-1]
    falling, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(V, device=scaled.device)
    k = torch.where(top_k > 0, top_k, V)[:, None, None]
    passes = rank < k
    # Keep a token if the mass before it is less than top_p, so the likeliest token is always kept. With top_p = 1, a
    # sum that reaches 1 by rounding must not cut tokens off, hence the second term.
    share = falling.masked_fill(~passes, -torch.inf).softmax(dim=-1)
    before = share.cumsum(dim=-1) - share
    p = top_p[:, None, None]
    passes = passes & ((before < p) | (p >= 1)) & (falling >= falling[..., :1] + min_p[:, None, None].log())
    return torch.zeros_like(passes).scatter_(-1, order, passes)


def best_columns(
    scores: Tensor, sharpness: Tensor | float, count: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `count` (R) best columns of scores (B, W, Vx), best first: target ids (B, W, R) int64, and the float32
    log-softmax of sharpness (B, 1, 1) * scores, or 0 for a single column. The order of equal scores is unspecified."""
    scores = scores.float()
    if count == 1:
        columns = scores.argmax(-1, keepdim=True)
        logp = scores.new_zeros(()).expand(columns.shape)
    else:
        best, columns = scores.topk(count, dim=-1)
        logp = sharpness * best - (sharpness * scores).logsumexp(-1, keepdim=True)
    return columns if token_ids is None else token_ids[columns], logp
