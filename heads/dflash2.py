"""DFlash2 (Inco AI, https://inco.ai/blog/dflash2): DFlash with convolutions in its layers, and a choice of few tokens.

    U_k  = lm_head h_k, as DFlash's;  C_k = the `selector_top_k` likeliest tokens by U_k
    S_k(b) = U_k(b) + <A[a] * (P h_k), B[b]>   for b in C_k, a the token drafted before; -inf for all others
    q_k  = softmax S_k

So a row's candidates are made in one pass, and chosen from by the token before them. The convolutions
(`heads.block.convolution`) hand on from row to row what attention would have to find. A new head, with B = 0 and
convolutions that change nothing, drafts as DFlash.

Loss of a row: DFlash's at U, and selector_weight * sum over C of -p log q, a the true token before; p is the label's
or the target's, as `loss` says. It is the mean, over labels, of the references' cross-entropy, which leaves out rows
whose label is no candidate.

Letters: V vocabulary, D hidden, M blocks, K depth, r rank.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.base import RoundReads
from heads.block.convolution import BlockConvolution, ConvolvedLayer
from heads.block.draft import DraftBlockState
from heads.block.loss import Candidates
from heads.dflash import DFlash, DFlashConfig, DFlashSettings
from heads.errors import UserError, expect
from heads.initial.weights import TargetProbe
from heads.layers import MOST, Attention, DecoderLayer
from heads.tree import TreeShape, check_width


@dataclass(frozen=True, kw_only=True)
class DFlash2Settings(DFlashSettings):
    """Settings of the head in a recipe."""

    conv_kernel_size: int = 2
    """Rows that a convolution looks at: a row's own and those before it in its block."""
    conv_group_size: int = 16
    """Channels that share a coefficient, which depends on the state; a divisor of the target's width."""
    selector_rank: int = 256
    """Rank of the matrix from the token before to what it adds to the candidates' logits."""
    selector_top_k: int = 16
    """Candidates of each row; no node of a tree has more children."""
    selector_weight: float = 1.0
    """Factor of the candidates' cross-entropy in the loss."""


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig, DFlash2Settings):
    """Everything that the head's function and its training loss depend on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            value = getattr(self, name)
            counts = type(value) is int and 1 <= value < MOST
            expect(counts, f"head.{name}", "a whole number from 1 to below 2^53", value)
        rows, group, D = self.conv_kernel_size, self.conv_group_size, self.hidden_size
        expect(rows <= self.block_size, "head.conv_kernel_size", f"at most a block's {self.block_size} rows", rows)
        expect(D % group == 0, "head.conv_group_size", f"a divisor of the target's width, {D}", group)
        most, known = self.vocab_size, self.selector_top_k
        expect(known <= most, "head.selector_top_k", f"at most the target's {most} tokens", known)
        expect(self.selector_weight >= 0, "head.selector_weight", "0 or more", self.selector_weight)
        if self.draft_vocab_size is not None:
            raise UserError("head.draft_vocab_size: a DFlash2 head drafts all tokens of its target")


class CandidateSelector(nn.Module):
    """Logits of candidates by the token before them, of low rank."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        form = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(form))
        self.successor_codebook = nn.Parameter(torch.zeros(form))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=0.02)

    def forward(self, states: Tensor, previous: Tensor) -> Tensor:
        """States (..., D) of rows and the tokens before them (...) -> A[a] * (P h), (..., r)."""
        return self.predecessor_codebook[previous] * self.hidden_projection(states)  # type: ignore[no-any-return]


class DFlash2(DFlash):
    """The head. Its tensors bear the names that vLLM and SGLang read."""

    Config: ClassVar[type[DFlash2Config]] = DFlash2Config
    config: DFlash2Config

    def __init__(self, config: DFlash2Config, kept: Tensor | None = None) -> None:
        super().__init__(config, kept)
        self.candidate_selector = CandidateSelector(config)

    def make_layer(self, attention: Attention) -> DecoderLayer:
        return ConvolvedLayer(self.config, attention)

    @torch.no_grad()
    def initialise(self, probe: TargetProbe) -> None:
        """Start as DFlash does, convolutions included."""
        super().initialise(probe)
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                module.reset()

    def beside(self, states: Tensor, previous: Tensor) -> dict[str, Any]:
        selector = self.candidate_selector
        return {
            "bias_states": selector(states, previous),
            "bias_weight": selector.successor_codebook,
            "candidates": Candidates(self.config.selector_top_k, self.config.selector_weight),
        }

    def conditioned(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        selector = self.candidate_selector
        values, tokens = logits.topk(self.config.selector_top_k, -1)
        by_token = selector(states[..., -1, :], previous[..., -1])  # (..., r)
        added = (selector.successor_codebook[tokens] * by_token[..., None, :]).sum(-1)
        shape = (*added.shape[:-1], logits.shape[-1])
        chosen = logits.new_full(shape, -torch.inf)
        return chosen.scatter_(-1, tokens.expand_as(added), (values + added).to(logits.dtype))

    def check_draft(self, shape: TreeShape, capacity: int) -> None:
        super().check_draft(shape, capacity)
        check_width(shape, self.config.selector_top_k)

    def bytes_per_round(self, state: DraftBlockState) -> RoundReads:
        """The same, but of the codebooks a few rows alone."""
        reads, selector = super().bytes_per_round(state), self.candidate_selector
        tables = selector.predecessor_codebook.numel() + selector.successor_codebook.numel()
        return replace(reads, propose=reads.propose - state.steps.lm_head.product.weight_bytes * tables)
