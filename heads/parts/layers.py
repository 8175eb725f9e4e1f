"""Decoder block shared by the heads, with the tensor names of the published checkpoints.

Letters: B batch, T tokens, D hidden, H query heads, d head dimension.
"""

from collections.abc import Mapping
from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from heads.core.errors import UserError
from heads.core.strict_settings import Count, Positive
from heads.kernels.tree_attention import Attend
from heads.parts.part_settings import BlockSettings
from heads.parts.rotary import CosSin, rotate

FULL = "full_attention"
SLIDING = "sliding_attention"
"""Types of a layer's attention, as named in transformers."""


class BlockConfig(BlockSettings):
    """Settings of one decoder block, and the sizes of the target that it drafts for."""

    hidden_size: Count
    """Width of the residual stream, the same as the target's except in some EAGLE-3 heads."""
    vocab_size: Count
    """Size of the target's vocabulary, the width of its logits."""
    num_target_layers: Count
    """Number of decoder layers of the target."""
    max_position_embeddings: Count
    """Context length, for engines. The block itself has no limit."""
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    rms_norm_eps: Positive
    rope_theta: Positive

    @model_validator(mode="after")
    def check_attention(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: expected a multiple of num_key_value_heads ({self.num_key_value_heads}), got "
                f"{self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, for rotary positions, got {self.head_dim}")
        return self


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
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()

    def by_head(self, projection: nn.Module, x: Tensor) -> Tensor:
        """Return the projected heads: (B, T, D) -> (B, heads, T, d)."""
        return projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # type: ignore[no-any-return]

    def queries(self, x: Tensor, cos_sin: CosSin) -> Tensor:
        """Return the rotated queries: (B, T, D) -> (B, H, T, d)."""
        return rotate(self.q_norm(self.by_head(self.q_proj, x)), cos_sin)

    def keys(self, x: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values: (B, T, D) -> (B, Hkv, T, d) each."""
        return rotate(self.k_norm(self.by_head(self.k_proj, x)), cos_sin), self.by_head(self.v_proj, x)

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        out = attend(self.queries(x, cos_sin), *self.keys(x, cos_sin))  # (B, H, T, d)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class NormedAttention(Attention):
    """Attention with an RMSNorm on each head of queries and keys, as in Qwen3."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def __init__(self, config: BlockConfig, input_size: int | None = None) -> None:
        super().__init__(config, input_size or config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


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


def restore_buffers(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Put buffers, by name, back in a module that was converted, on the device where it is now. They keep their
    dtypes."""
    for name, buffer in before.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer.to(module.get_buffer(name).device)


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the tensors found in a file have the names, shapes and dtypes of a head's own.
    Floating-point tensors may have any width of at least 16 bits."""
    ours = {name: described(value) for name, value in expected.items()}
    theirs = {name: described(value) for name, value in found.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"tensor {name}: by config.json beside it expected {ours.get(name, 'no such tensor')}, "
                f"found {theirs.get(name, 'none')}"
            )


def described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {'floating-point' if is_float(tensor.dtype) else tensor.dtype}"


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2
