"""DFlash2 (Inco AI, https://inco.ai/blog/dflash2): DFlash with convolutions in its layers and a choice among few
tokens.

    U_k  = lm_head h_k, as DFlash's;  C_k = the `selector_top_k` likeliest tokens by U_k
    S_k(b) = U_k(b) + <A[a] * (P h_k), B[b]>   for b in C_k, a the token drafted before; -inf for all others
    q_k  = softmax S_k

One pass computes the candidates of all rows; the previous token then decides among them. The convolutions
(`BlockConvolution`) pass on from row to row what attention would have to find. A new head drafts like DFlash: B
is 0 and its convolutions change nothing.

Loss of a row: DFlash's at U, plus selector_weight * sum over C of -p log q, where a is the true token before, and p the
label's or the target's distribution, as `loss` says. On average over labels it equals the references' cross-entropy,
which leaves out rows whose label is not a candidate.

Letters: D hidden, r rank, B batch, N blocks, R rows of a block, t taps, G groups of channels, c channels of a group.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.functional import pad

from heads.blocks.block_config import BlockForm
from heads.blocks.block_loss import BlockStates, Labels, RowLosses, among
from heads.blocks.dflash import DFlash, DFlashConfig
from heads.kernels.tree_attention import Attend
from heads.methods.method_settings import DFlash2Settings
from heads.parts.initial_weights import TargetProbe
from heads.parts.layers import Attention, DecoderLayer
from heads.parts.rotary import CosSin

CONVOLUTION_SETTINGS = ("conv_kernel_size", "conv_group_size")


class DFlash2Config(DFlashConfig, DFlash2Settings):
    form: ClassVar[BlockForm] = BlockForm(
        title="DFlash2",
        classes=("DFlash2DraftModel", "DFlash2Speculator"),
        settings=("block_size", *CONVOLUTION_SETTINGS, "selector_rank", "selector_top_k"),
        neutral={"output_multiplier": 1, "final_logit_softcapping": 0},
        scales_embeddings=True,
        in_llamacpp=True,
    )
    draft_vocab_size: None = None

    @model_validator(mode="after")
    def check_selector(self) -> Self:
        check_convolutions(self)
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"selector_top_k: expected at most the target's {self.vocab_size} tokens, got {self.selector_top_k}"
            )
        return self

    @property
    def candidates(self) -> int:
        return self.selector_top_k

    @property
    def llamacpp_limit(self) -> str | None:
        k = self.selector_top_k
        D = self.hidden_size
        return (
            None if k * (k + 1) <= D else f"takes a selector_top_k of {k} only from a width of {k * (k + 1)}, not {D}"
        )


def check_convolutions(config: Any) -> None:
    rows = config.conv_kernel_size
    group = config.conv_group_size
    D = config.hidden_size
    if rows > config.block_size:
        raise ValueError(f"conv_kernel_size: expected at most the block's {config.block_size} rows, got {rows}")
    if rows and D % group:
        raise ValueError(f"conv_group_size: expected a divisor of the target's width, {D}, got {group}")


class BlockConvolution(nn.Module):
    """Two convolutions, before and after one sublayer."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps = taps
        self.groups = width // group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * self.groups, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Make both convolutions change nothing."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def forward(self, u: Tensor, sublayer: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        """Apply a sublayer to blocks of `rows` normed rows, u (B, N * R, D), between the two convolutions."""
        kernels = self.kernel_projection(u).unflatten(-1, (2, self.taps, self.groups))
        enter, leave = kernels.unbind(-3)  # (B, N * R, t, G) each
        return self.convolve(sublayer(self.convolve(u, enter, 0, rows)), leave, 1, rows)

    def convolve(self, x: Tensor, kernel: Tensor, side: int, rows: int) -> Tensor:
        """Convolve blocks of `rows` rows, x (B, N * R, D), with the base plus `kernel` (B, N * R, t, G). `side`: 0
        before the sublayer, 1 after it."""
        blocks = x.unflatten(1, (-1, rows)).unflatten(-1, (self.groups, -1))  # (B, N, R, G, c)
        base = self.base_kernel[side].to(x.dtype).unflatten(-1, (self.groups, -1))  # (t, G, c)
        taps = base + kernel.unflatten(1, (-1, rows))[..., None]  # (B, N, R, t, G, c)
        out = taps[..., 0, :, :] * blocks
        for i in range(1, min(self.taps, rows)):
            out = out + taps[..., i, :, :] * pad(blocks[:, :, :-i], (0, 0, 0, 0, i, 0))
        return out.flatten(-2).flatten(1, 2)  # type: ignore[no-any-return]


class ConvolvedLayer(DecoderLayer):
    """Decoder layer with convolutions around its sublayers."""

    def __init__(self, config: Any, attention: Attention) -> None:
        super().__init__(config, attention)
        self.attention_conv, self.mlp_conv = (
            BlockConvolution(config.hidden_size, config.conv_kernel_size, config.conv_group_size) for _ in range(2)
        )

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend, rows: int | None = None) -> Tensor:
        """Apply the layer to blocks of `rows` rows, x (B, N * R, D)."""
        assert rows is not None
        attention = partial(self.self_attn, cos_sin=cos_sin, attend=attend)
        x = x + self.attention_conv(self.input_layernorm(x), attention, rows)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp, rows)  # type: ignore[no-any-return]


class CandidateSelector(nn.Module):
    """Low-rank addition to the logits of candidates, from the token before them."""

    tables = ("predecessor_codebook", "successor_codebook")

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        form = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(form))
        self.successor_codebook = nn.Parameter(torch.zeros(form))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=0.02)

    def forward(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return A[a] * (P h), (..., r), from the states (..., D) of rows and the tokens a before them (...)."""
        return self.predecessor_codebook[previous] * self.hidden_projection(states)  # type: ignore[no-any-return]


def reset_convolutions(head: nn.Module) -> None:
    for module in head.modules():
        if isinstance(module, BlockConvolution):
            module.reset()


class DFlash2(DFlash):
    """DFlash2 head. vLLM and SGLang use the same tensor names."""

    Config: ClassVar[type[DFlash2Config]] = DFlash2Config
    config: DFlash2Config
    training_settings = DFlash.training_settings | {"selector_weight"}

    def __init__(self, config: DFlash2Config, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        self.candidate_selector = CandidateSelector(config)

    def make_layer(self, attention: Attention) -> DecoderLayer:
        return ConvolvedLayer(self.config, attention)

    @torch.no_grad()
    def initialise(self, probe: TargetProbe) -> None:
        super().initialise(probe)
        reset_convolutions(self)

    def choice(self, logits: Tensor, states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates (..., k), and their logits S, of rows with these logits (..., V) of the output head,
        these states (..., D) and these tokens before (...)."""
        selector = self.candidate_selector
        values, tokens = logits.topk(self.config.selector_top_k, -1)
        by_token = selector(states, previous)  # (..., r)
        return tokens, values + (selector.successor_codebook[tokens] * by_token[..., None, :]).sum(-1)

    def row_losses(self, logits: Tensor, block: BlockStates, labels: Labels) -> RowLosses:
        rows = super().row_losses(logits, block, labels)
        tokens, scores = self.choice(logits, block.rows, labels.previous)  # (C, K, k)
        logq = scores.to(rows.values.dtype).log_softmax(-1)
        at_label = tokens == labels.tokens[..., None]
        p = at_label if labels.target is None else labels.target.probs.view_as(logits).gather(-1, tokens)
        return RowLosses(
            values=rows.values - self.config.selector_weight * (p * logq).sum(-1),
            probs=(logq.detach().exp() * at_label).sum(-1),
            best=tokens.gather(-1, logq.argmax(-1, keepdim=True))[..., 0],
        )

    def conditioned(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        tokens, scores = self.choice(logits, states, previous)
        return among(tokens, scores.to(logits.dtype), logits.shape[-1])
