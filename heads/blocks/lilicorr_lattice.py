"""The lattice of a LiLiCorr head (`heads.blocks.lilicorr`): layers over the candidates of all rows of a block, which
score the successions of candidates in neighbouring rows.

Letters: M blocks, K depth, k candidates, D hidden, h width of the lattice, H its heads, L = K * k its nodes, f width of
the vectors.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, scaled_dot_product_attention, silu

from heads.parts.layers import RMSNorm

if TYPE_CHECKING:
    from heads.blocks.lilicorr import LiLiCorrConfig

STEADY = 4.0
"""Size of what a new lattice is meant to compute, compared with what is random in it."""
FEATURES = 5
"""Number of a candidate's features: log q, q, log q less the likeliest's, rank, and whether it is the likeliest."""


def plain_mlp(inputs: int, inner: int, outputs: int) -> nn.Sequential:
    """Return down(SiLU(up(x))), with biases."""
    layers = {"up_proj": nn.Linear(inputs, inner), "act": nn.SiLU(), "down_proj": nn.Linear(inner, outputs)}
    return nn.Sequential(OrderedDict(layers))


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
        projected = linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class LatticeLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: "LiLiCorrConfig") -> None:
        super().__init__()
        h = config.lattice_width
        self.attn_norm, self.mlp_norm = (RMSNorm(h, config.rms_norm_eps) for _ in range(2))
        self.attn = LatticeAttention(h, config.lilicorr_num_heads)
        self.mlp = plain_mlp(h, int(h * config.lilicorr_mlp_ratio), h)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Lattice(nn.Module):
    """Scores of the successions of candidates in neighbouring rows."""

    tables = ("relative_slot_bias",)

    def __init__(self, config: "LiLiCorrConfig") -> None:
        super().__init__()
        D = config.hidden_size
        h = config.lattice_width
        k = config.lilicorr_candidate_topk
        self.eps = config.lilicorr_vector_eps
        self.scale = config.lilicorr_logit_scale
        self.block_size = config.block_size
        self.token_proj = nn.Identity() if h == D else nn.Linear(D, h)
        self.pass_hidden_proj = nn.Linear(D, h)
        self.context_proj = nn.Linear(D, h)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = plain_mlp(FEATURES, h, h)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, config.block_size - 1, 1, h))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, k, h))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.lilicorr_num_heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.lilicorr_num_heads))
        self.layers = nn.ModuleList(LatticeLayer(config) for _ in range(config.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = (RMSNorm(h, config.rms_norm_eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * h, h)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(h, config.lilicorr_factor_dim) for _ in range(3))

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
        x = x.flatten(1, 2)
        bias = self.attention_bias(K, k)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x)
        context = self.anchor_norm(self.context_proj(anchor))
        anchors = context[:, None].expand_as(x)
        inner = silu(self.factor_input_proj(torch.cat([x, anchors, x * anchors], -1)))
        vectors = self.out_head(inner), self.in_head(inner), self.anchor_out_head(context)[:, None]
        dtype = torch.promote_types(inner.dtype, torch.float32)
        leaving, entering, first = (normalize(v.to(dtype), dim=-1, eps=self.eps) for v in vectors)
        leaving = leaving.unflatten(1, (K, k))
        entering = entering.unflatten(1, (K, k))
        with torch.autocast(x.device.type, enabled=False):  # scores are not rounded
            start = self.scale * (first @ entering[:, 0].mT)[:, 0]
            return start, self.scale * (leaving[:, :-1] @ entering[:, 1:].mT)

    @torch.no_grad()
    def begin_by_rank(self) -> None:
        """Let scores fall with the rank of a candidate, whatever is before it. All else is small and random."""
        h = self.output_norm.weight.shape[0]
        k = self.rank_embedding.shape[3]
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
