"""Decoder block shared by the heads, with the tensor names of the published checkpoints.

Letters: B batch, T tokens, D hidden, H query heads, d head dimension.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from heads.core.errors import UserError, expect
from heads.methods.rotary import CosSin, rotate
from heads.methods.settings import BlockSettings
from heads.targets.tree_attention import Attend

MOST = 2**53
"""Upper limit of a setting. Larger whole numbers are not exact as floating-point numbers."""

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
"""Types of a layer's attention, as named in transformers."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(BlockSettings):
    """Settings of one decoder block, and the sizes of the target that it drafts for."""

    hidden_size: int
    """Width of the residual stream, the same as the target's except in some EAGLE-3 heads."""
    vocab_size: int
    """Size of the target's vocabulary, the width of its logits."""
    num_target_layers: int
    """Number of decoder layers of the target."""
    max_position_embeddings: int
    """Context length, for engines. The block itself has no limit."""
    intermediate_size: int = field()
    num_attention_heads: int = field()
    num_key_value_heads: int = field()
    head_dim: int = field()
    rms_norm_eps: float = field()
    rope_theta: float = field()

    def check_block(self) -> None:
        """Raise UserError for invalid settings of the block: wrong types, or sizes that are not positive."""
        for part in fields(BlockConfig):
            value, whole = getattr(self, part.name), part.type is int
            is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            what = f"a {'whole ' * whole}number above 0 and below 2^53"
            expect(is_number and 0 < value < MOST, f"head.{part.name}", what, value)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"head.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"head.num_key_value_heads ({self.num_key_value_heads})"
            )
        expect(self.head_dim % 2 == 0, "head.head_dim", "an even number, for rotary positions", self.head_dim)


class RMSNorm(nn.Module):
    """RMS norm: x / rms(x) * weight, computed in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of grouped-query attention. The caller's `attend` computes the attention."""

    def __init__(self, config: BlockConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def by_head(self, projection: nn.Module, x: Tensor) -> Tensor:
        """Return the projected heads: (B, T, D) -> (B, heads, T, d)."""
        return projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # type: ignore[no-any-return]

    def queries(self, x: Tensor, cos_sin: CosSin) -> Tensor:
        """Return the rotated queries: (B, T, D) -> (B, H, T, d)."""
        return rotate(self.by_head(self.q_proj, x), cos_sin)

    def keys(self, x: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values: (B, T, D) -> (B, Hkv, T, d) each."""
        return rotate(self.by_head(self.k_proj, x), cos_sin), self.by_head(self.v_proj, x)

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        out = attend(self.queries(x, cos_sin), *self.keys(x, cos_sin))  # (B, H, T, d)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class NormedAttention(Attention):
    """Attention with an RMSNorm on each head of queries and keys, as in Qwen3."""

    def __init__(self, config: BlockConfig, input_size: int | None = None) -> None:
        super().__init__(config, input_size or config.hidden_size)
        self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))

    def queries(self, x: Tensor, cos_sin: CosSin) -> Tensor:
        return rotate(self.q_norm(self.by_head(self.q_proj, x)), cos_sin)

    def keys(self, x: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        return rotate(self.k_norm(self.by_head(self.k_proj, x)), cos_sin), self.by_head(self.v_proj, x)


class MLP(nn.Module):
    """Gated MLP: down(SiLU(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: BlockConfig, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend, rows: int | None = None) -> Tensor:
        """Apply the layer to x (B, T, D). `rows`: rows of a block in x, used by layers with convolutions."""
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the tensors found in a file have the names, shapes and dtypes of a head's own.
    Floating-point tensors may have any width of at least 16 bits."""
    ours, theirs = (
        {
            name: f"{tuple(value.shape)} {'floating-point' if is_float(value.dtype) else value.dtype}"
            for name, value in tensors.items()
        }
        for tensors in (expected, found)
    )
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"tensor {name}: by config.json beside it expected {ours.get(name, 'no such tensor')}, "
                f"found {theirs.get(name, 'none')}"
            )


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2
