"""LiLiCorr (arXiv 2608.20530): DFlash, with a lattice over the likeliest tokens of all rows that scores their pairs.

    C_k = the `lilicorr_candidate_topk` likeliest tokens of row k by lm_head h_k
    o, i = outgoing and incoming vector of each candidate, of unit length, from layers over all candidates of a block
    S_k(b) = scale * <o_{k-1}(a), i_k(b)>   for b in C_k, a the token drafted before; -inf for all others
    q_k  = softmax S_k

In the first row, o comes from the anchor, the context of the position before the root; the vectors of candidates read
it, too. So q_k depends on the block and on the token before, as in DFlash2, but has no prior: the lattice reads what
lm_head gives its candidates, and decides alone. One pass scores all successions, and any tree takes them from there. In
a new head the scores fall with the rank of a candidate, so it drafts nearly always what DFlash would.

The loss of a row is DFlash's, plus three terms of q_k, with a the true token before:

    ce_weight * -sum p log q      over C_k; p is the label's or the target's distribution, as `loss` says
    margin_weight * max(0, margin - (S(label) - the next S))
    penalty_weight * sum q(b) max(0, log p(label) - log p(b))     p the target's distribution

Rows behind a label that is no candidate have no such terms; the last two need the row's own label among the candidates.
The weights of rows are DFlash's. In the authors' trainer (Model Optimizer) these terms have no weights of rows, and
their sum is divided by the number of rows that have them.

Engines draft the likeliest token of each row; SGLang samples it if SGLANG_ENABLE_LILICORR_SAMPLING is set. Tensor names
are theirs.

Letters: M blocks, K depth, k candidates, D hidden, h width of the lattice, H its heads, L = K * k its nodes, f width of
the vectors.
"""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heads.blocks.backbone import NextLogits
from heads.blocks.block_config import BlockForm
from heads.blocks.block_loss import BlockStates, Labels, RowLosses, among, draft_distribution, row_losses
from heads.blocks.dflash import DFlash, DFlashConfig
from heads.blocks.dflash2 import CONVOLUTION_SETTINGS, ConvolvedLayer, check_convolutions, reset_convolutions
from heads.blocks.lilicorr_lattice import Lattice
from heads.methods.method_settings import LiLiCorrSettings
from heads.parts.initial_weights import TargetProbe
from heads.parts.layers import Attention, DecoderLayer
from heads.parts.part_settings import LABELS
from heads.parts.step_cost import flops


class LiLiCorrConfig(DFlashConfig, LiLiCorrSettings):
    form: ClassVar[BlockForm] = BlockForm(
        title="LiLiCorr",
        classes=("LiLiCorrDraftModel",),
        settings=(
            *("block_size", "lilicorr_candidate_topk", "lilicorr_hidden_size", "lilicorr_num_layers"),
            *("lilicorr_num_heads", "lilicorr_factor_dim", "lilicorr_mlp_ratio", "lilicorr_vector_eps"),
            "lilicorr_logit_scale",
        ),
        optional=CONVOLUTION_SETTINGS,
        neutral={"lilicorr_enabled": True},
    )
    draft_vocab_size: None = None

    @model_validator(mode="after")
    def check_lattice(self) -> Self:
        check_convolutions(self)
        if self.lilicorr_candidate_topk > self.vocab_size:
            raise ValueError(f"lilicorr_candidate_topk: expected at most the target's {self.vocab_size} tokens")
        if self.lattice_width % self.lilicorr_num_heads:
            heads = self.lilicorr_num_heads
            width = self.lattice_width
            raise ValueError(f"lilicorr_hidden_size: expected a multiple of its {heads} heads, got {width}")
        return self

    @property
    def lattice_width(self) -> int:
        return self.hidden_size if self.lilicorr_hidden_size is None else self.lilicorr_hidden_size

    @property
    def candidates(self) -> int:
        return self.lilicorr_candidate_topk

    def engine_fields(self) -> dict[str, object]:
        convolutions = {name: getattr(self, name) for name in CONVOLUTION_SETTINGS} if self.conv_kernel_size else {}
        written = {"lilicorr_enabled": True, "projector_type": "lilicorr", "lilicorr_hidden_size": self.lattice_width}
        return super().engine_fields() | written | convolutions

    @classmethod
    def read_fields(cls, fields: Mapping[str, object], weights: dict[str, Tensor]) -> dict[str, object]:
        settings = super().read_fields(fields, weights)
        return settings | {"lilicorr_hidden_size": settings["lilicorr_hidden_size"] or None}


class LiLiCorr(DFlash):
    """LiLiCorr head. vLLM and SGLang use the same tensor names."""

    Config: ClassVar[type[LiLiCorrConfig]] = LiLiCorrConfig
    config: LiLiCorrConfig
    training_settings = DFlash.training_settings | {
        f"lattice_{name}" for name in ("ce_weight", "margin_weight", "margin", "penalty_weight")
    }

    def __init__(self, config: LiLiCorrConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        self.lilicorr = Lattice(config)

    def make_layer(self, attention: Attention) -> DecoderLayer:
        made = ConvolvedLayer if self.config.conv_kernel_size else DecoderLayer
        return made(self.config, attention)

    @torch.no_grad()
    def initialise(self, probe: TargetProbe) -> None:
        super().initialise(probe)
        reset_convolutions(self)
        for module in self.lilicorr.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        self.lilicorr.begin_by_rank()

    def scores(self, tokens: Tensor, logs: Tensor, block: BlockStates) -> tuple[Tensor, Tensor]:
        """Return the lattice's scores of candidates (M, K, k), with log q of each."""
        made: tuple[Tensor, Tensor] = self.lilicorr(block.embed_tokens(tokens), logs, block.rows, block.newest)
        return made

    @property
    def reads_target(self) -> bool:
        return True

    def row_losses(self, logits: Tensor, block: BlockStates, labels: Labels) -> RowLosses:
        config = self.config
        p = labels.target
        assert p is not None
        q = draft_distribution(logits)
        rows = row_losses(q, self.terms, labels)
        shape = (*labels.tokens.shape, -1)
        tokens = q.logits.detach().topk(config.lilicorr_candidate_topk, 1).indices  # (C * K, k)
        target = p.logs.gather(1, tokens).view(shape)  # (C, K, k), log p
        of_label = p.logs.gather(1, labels.tokens.view(-1, 1)).view(shape)  # (C, K, 1)
        log_probs = q.logs.gather(1, tokens).view(shape)
        tokens = tokens.view(shape)
        start, pairs = self.scores(tokens, log_probs, block)
        at_label = tokens == labels.tokens[..., None]
        is_candidate = at_label.any(-1)  # (C, K)
        before = at_label[:, :-1].int().argmax(-1)[..., None, None].expand(-1, -1, 1, tokens.shape[2])
        scores = torch.cat([start[:, None], pairs.gather(2, before)[:, :, 0]], 1)  # (C, K, k)
        reached = torch.cat([torch.ones_like(is_candidate[:, :1]), is_candidate[:, :-1]], 1).cumprod(1).bool()
        inside = reached & labels.valid
        logq = scores.log_softmax(-1)
        truth = at_label if config.loss == LABELS else target.exp()
        lead = (scores * at_label).sum(-1) - scores.masked_fill(at_label, -torch.inf).amax(-1)
        hinge = (config.lattice_margin - lead).relu()
        rejected = (logq.exp() * (of_label - target).relu()).sum(-1)
        by_label = config.lattice_margin_weight * hinge + config.lattice_penalty_weight * rejected
        values = (by_label * is_candidate - config.lattice_ce_weight * (truth * logq).sum(-1)) * inside
        best = tokens.gather(2, logq.argmax(-1, keepdim=True))[..., 0]
        return RowLosses(rows.values + values, rows.probs, best.masked_fill(~inside, -1))

    def condition(self, logits: Tensor, block: BlockStates) -> NextLogits:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        values, tokens = wide.topk(self.config.lilicorr_candidate_topk, -1)
        start, pairs = self.scores(tokens, values - wide.logsumexp(-1, keepdim=True), block)

        def next_logits(path: Tensor, parents: Tensor) -> Tensor:
            W = path.shape[1]
            k = path.shape[2] - 1
            scores = start[:, None].expand(-1, W, -1)
            if k:
                at = tokens[:, k - 1, None] == path[..., k, None]  # (M, W, candidates)
                scores = at.to(pairs.dtype) @ pairs[:, k - 1]
            return among(tokens[:, k, None], scores, logits.shape[-1])

        return next_logits

    def correction_flops(self) -> int:
        net = self.lilicorr
        h = self.config.lattice_width
        nodes = self.depth * self.config.lilicorr_candidate_topk
        on_nodes = flops(net) - flops(net.pass_hidden_proj, net.context_proj)
        # Of each layer's attention: queries, keys and values, then products with the scores of all pairs.
        attention = 6 * h * (3 * h + 2 * nodes)
        return (nodes - self.config.block_size) * on_nodes + nodes * len(net.layers) * attention
