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

from dataclasses import replace
from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, scaled_dot_product_attention, silu

from heads.core.contract import StepCost
from heads.core.tree import TreeShape, check_width
from heads.methods.block import BlockStates, Follow
from heads.methods.block_loss import BlockLoss, BlockTask, block_loss
from heads.methods.dflash import DFlash, DFlashConfig
from heads.methods.dflash2 import ConvolvedLayer, check_convolutions, reset_convolutions
from heads.methods.labels import LABELS
from heads.methods.layers import Attention, DecoderLayer, RMSNorm
from heads.methods.settings import LiLiCorrSettings
from heads.methods.start import TargetProbe
from heads.methods.step_cost import flops

STEADY = 4.0
"""Size of what a new lattice is meant to compute, compared with what is random in it."""
FEATURES = 5
"""Number of a candidate's features: log q, q, log q less the likeliest's, rank, and whether it is the likeliest."""


class LiLiCorrConfig(DFlashConfig, LiLiCorrSettings):
    """Everything that the head's function and its training loss depend on."""

    draft_vocab_size: None = None

    @model_validator(mode="after")
    def check_lattice(self) -> Self:
        check_convolutions(self)
        if self.lilicorr_candidate_topk > self.vocab_size:
            raise ValueError(f"lilicorr_candidate_topk: expected at most the target's {self.vocab_size} tokens")
        if self.lattice_width % self.lilicorr_num_heads:
            raise ValueError(
                f"lilicorr_hidden_size: expected a multiple of its {self.lilicorr_num_heads} heads, got "
                f"{self.lattice_width}"
            )
        return self

    @property
    def lattice_width(self) -> int:
        return self.hidden_size if self.lilicorr_hidden_size is None else self.lilicorr_hidden_size


class PlainMLP(nn.Module):
    """down(SiLU(up(x))), with biases."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.up_proj(x)))  # type: ignore[no-any-return]


class LatticeAttention(nn.Module):
    """Attention of all nodes of a lattice to each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.normal_(self.in_proj_weight, std=0.02)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x (M, L, h); bias (H, L, L) is added to the scores."""
        made = linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = made.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class LatticeLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        h = config.lattice_width
        self.attn_norm, self.mlp_norm = (RMSNorm(h, config.rms_norm_eps) for _ in range(2))
        self.attn = LatticeAttention(h, config.lilicorr_num_heads)
        self.mlp = PlainMLP(h, int(h * config.lilicorr_mlp_ratio), h)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Lattice(nn.Module):
    """Scores of the successions of candidates in neighbouring rows."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        D, h, f, k = (
            config.hidden_size,
            config.lattice_width,
            config.lilicorr_factor_dim,
            config.lilicorr_candidate_topk,
        )
        self.eps, self.scale = config.lilicorr_vector_eps, config.lilicorr_logit_scale
        self.block_size = config.block_size
        self.token_proj = nn.Identity() if h == D else nn.Linear(D, h)
        self.pass_hidden_proj, self.context_proj = nn.Linear(D, h), nn.Linear(D, h)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(FEATURES), PlainMLP(FEATURES, h, h)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, config.block_size - 1, 1, h))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, k, h))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.lilicorr_num_heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.lilicorr_num_heads))
        self.layers = nn.ModuleList(LatticeLayer(config) for _ in range(config.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = (RMSNorm(h, config.rms_norm_eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * h, h)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(h, f) for _ in range(3))

    def forward(self, embeddings: Tensor, logs: Tensor, states: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (M, k) of the first row's candidates, and those (M, K - 1, k, k) of the candidates of a row
        after those of the row before it.

        embeddings (M, K, k, D) and logs (M, K, k), log q by lm_head, are of the candidates, best first; states
        (M, K, D) of the rows; anchor (M, D).
        """
        K, k = logs.shape[1:]
        rank = torch.arange(k, device=logs.device).to(logs.dtype).expand_as(logs)
        gaps = logs - logs[..., :1]
        features = torch.stack([logs, logs.exp(), gaps, rank / max(k - 1, 1), (rank == 0).to(logs.dtype)], -1)
        x = self.token_proj(embeddings.to(states.dtype)) + self.pass_hidden_proj(states)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features.to(x.dtype)))
        x = x + self.slot_embedding[:, 0, :K] + self.rank_embedding[:, 0]
        x, bias = x.flatten(1, 2), self.attention_bias(K, k)
        for layer in self.layers:
            x = layer(x, bias)
        x, context = self.output_norm(x), self.anchor_norm(self.context_proj(anchor))
        beside = context[:, None].expand_as(x)
        made = silu(self.factor_input_proj(torch.cat([x, beside, x * beside], -1)))
        wide = torch.promote_types(made.dtype, torch.float32)
        vectors = self.out_head(made), self.in_head(made), self.anchor_out_head(context)[:, None]
        leaving, entering, first = (normalize(v.to(wide), dim=-1, eps=self.eps) for v in vectors)
        leaving, entering = leaving.unflatten(1, (K, k)), entering.unflatten(1, (K, k))
        with torch.autocast(x.device.type, enabled=False):  # scores are not rounded
            start = self.scale * (first @ entering[:, 0].mT)[:, 0]
            return start, self.scale * (leaving[:, :-1] @ entering[:, 1:].mT)

    @torch.no_grad()
    def begin_by_rank(self) -> None:
        """Let scores fall with the rank of a candidate, whatever is before it. All else is small and random."""
        h, k = self.output_norm.weight.shape[0], self.rank_embedding.shape[3]
        falling = 1 - 2 * torch.arange(k) / max(k - 1, 1)
        self.rank_embedding.copy_(STEADY * falling[:, None].expand(-1, h))
        self.factor_input_proj.weight[0] = 0
        self.factor_input_proj.weight[0, :h] = 2 / h
        self.in_head.weight[[0, -1]] = 0
        self.in_head.weight[0, 0] = STEADY
        for bias, i in ((self.out_head.bias, 0), (self.anchor_out_head.bias, 0), (self.in_head.bias, -1)):
            bias[i] = STEADY

    def attention_bias(self, K: int, k: int) -> Tensor:
        """Return the bias (H, L, L) of nodes' scores by the distance of their rows."""
        slot = torch.arange(K, device=self.same_slot_bias.device).repeat_interleave(k)
        apart = slot[:, None] - slot
        same = (apart == 0).to(self.same_slot_bias.dtype)
        return self.relative_slot_bias[:, apart + self.block_size - 1] + same * self.same_slot_bias[:, None, None]


class LiLiCorr(DFlash):
    """LiLiCorr head. vLLM and SGLang use the same tensor names."""

    Config: ClassVar[type[LiLiCorrConfig]] = LiLiCorrConfig
    config: LiLiCorrConfig

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
        states = block.states[:, self.first_row :]
        made: tuple[Tensor, Tensor] = self.lilicorr(block.embed_tokens(tokens), logs, states, block.newest)
        return made

    def losses(self, block: BlockStates, previous: Tensor, task: BlockTask, lm_head_weight: Tensor) -> BlockLoss:
        config = self.config
        task = replace(task, likeliest=config.lilicorr_candidate_topk)
        found = block_loss(block.states[:, self.first_row :], lm_head_weight, task)
        some = found.likeliest
        assert some is not None
        start, pairs = self.scores(some.tokens, some.logs, block)
        at = some.tokens == task.labels[..., None]  # (M, K, k): the label among the candidates
        is_candidate = at.any(-1)
        before = at[:, :-1].int().argmax(-1)[..., None, None].expand(-1, -1, 1, at.shape[2])
        scores = torch.cat([start[:, None], pairs.gather(2, before)[:, :, 0]], 1)  # (M, K, k)
        reached = torch.cat([torch.ones_like(is_candidate[:, :1]), is_candidate[:, :-1]], 1).cumprod(1).bool()
        inside = reached & task.valid
        logq, target = scores.log_softmax(-1), some.target.exp()
        truth = at.to(target.dtype) if config.loss == LABELS else target
        value = -config.lattice_ce_weight * (truth * logq).sum(-1)
        of_label, rival = (scores * at).sum(-1), scores.masked_fill(at, -torch.inf).amax(-1)
        hinge = (config.lattice_margin - (of_label - rival)).relu()
        rejected = (logq.exp() * (some.of_label[..., None] - some.target).relu()).sum(-1)
        told = config.lattice_margin_weight * hinge + config.lattice_penalty_weight * rejected
        value = (value + told * is_candidate) * inside
        q = logq.detach().exp()
        best = some.tokens.gather(2, q.argmax(-1, keepdim=True))[..., 0]
        return replace(
            found,
            loss=found.loss + (value * some.weights).sum(),
            sums=found.sums + value.detach().sum(0),
            correct=(best == some.best) & inside,
            overlap=torch.minimum(target, q).sum(-1) * inside,
        )

    def follow(self, logits: Tensor, block: BlockStates) -> Follow:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        values, tokens = wide.topk(self.config.lilicorr_candidate_topk, -1)
        start, pairs = self.scores(tokens, values - wide.logsumexp(-1, keepdim=True), block)

        def after(path: Tensor) -> Tensor:
            W, k = path.shape[1], path.shape[2] - 1
            scores = start[:, None].expand(-1, W, -1)
            if k:
                at = tokens[:, k - 1, None] == path[..., k, None]  # (M, W, candidates)
                scores = at.to(pairs.dtype) @ pairs[:, k - 1]
            made = scores.new_full((len(logits), W, logits.shape[-1]), -torch.inf)
            return made.scatter_(-1, tokens[:, k, None].expand_as(scores), scores)

        return after

    def check_draft(self, shape: TreeShape, capacity: int) -> None:
        super().check_draft(shape, capacity)
        check_width(shape, self.config.lilicorr_candidate_topk)

    def step_cost(self, batch_size: int, length: int, *, width: int, most: int) -> StepCost:
        """Return the cost of the base class, and that of the lattice, which the base class takes for layers that run
        on rows."""
        cost, config, net = super().step_cost(batch_size, length, width=width, most=most), self.config, self.lilicorr
        K, k, h, layers = self.depth, config.lilicorr_candidate_topk, config.lattice_width, config.lilicorr_num_layers
        nodes = cost.rows * K * k
        on_nodes = flops(net) - flops(net.pass_hidden_proj, net.context_proj)
        work = (nodes - cost.rows * config.block_size) * on_nodes + nodes * layers * 6 * 3 * h * h
        # Products with the scores of all pairs: 2 forward, 4 backward; and the mean row of the output head.
        work += nodes * layers * 6 * 2 * K * k * h + cost.chunked * 2 * config.vocab_size * config.hidden_size
        numbers = config.hidden_size + (12 + layers * (8 + 3 * config.lilicorr_mlp_ratio)) * h
        kept = nodes * (
            width * numbers + 4 * (6 * config.lilicorr_factor_dim + 2 * layers * K * k * config.lilicorr_num_heads)
        )
        return replace(cost, flops=cost.flops + work, kept=cost.kept + int(kept))
