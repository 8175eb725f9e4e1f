"""Layers of heads that draft a block.

Letters: B batch, T tokens, D hidden, H heads, G query heads per key head, d head dimension.
"""

from torch import Tensor, nn

from heads.layers import MLP, Attend, Attention, BlockConfig, RMSNorm, rotate

CosSin = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, (B, 1, T, d) each."""


class BlockAttention(Attention):
    """Attention whose queries and keys are normed head by head."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))

    def keys(self, x: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """(B, T, D) -> keys and values (B, H / G, T, d)."""
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), cos_sin), v

    def forward(self, x: Tensor, rotation: CosSin, attend: Attend) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        out = attend(rotate(q, rotation), *self.keys(x, rotation))  # (B, H, T, d)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3's form."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
