"""Rotary positions of heads: plain, or scaled as in transformers (YaRN, Llama 3, linear)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.core.errors import UserError, expect, first_line
from heads.targets.families import FIXED_ROTATIONS

CosSin = tuple[Tensor, Tensor]
"""Cosines of rotary positions, and sines with the first half negated, (B, 1, T, d) each. With a
`partial_rotary_factor`, d is only that part of a head's width."""
Rotary = Callable[[Tensor, torch.dtype], CosSin]
"""Function that returns the `CosSin` (B, 1, T, d) of rotary positions (B, T), in the given dtype."""


def rotary_of(config: Any) -> Rotary:
    """Return the rotary positions of a Llama with this head's base and, if it has one, its scaling. UserError for an
    unknown or invalid scaling."""
    scaling = getattr(config, "rope_scaling", None)
    if scaling is None:
        return partial(rotation, head_dim=config.head_dim, theta=config.rope_theta)
    is_known = isinstance(scaling, dict) and scaling.get("rope_type") in FIXED_ROTATIONS
    expect(is_known, "head.rope_scaling", f"a rope_type of {', '.join(FIXED_ROTATIONS)}", scaling)
    part = scaling.get("partial_rotary_factor", 1)
    rotated = int(part * config.head_dim) if isinstance(part, int | float) and 0 < part <= 1 else 0
    fits = rotated > 0 and rotated % 2 == 0
    expect(fits, "head.rope_scaling", "a partial_rotary_factor of at most 1, for an even number of channels", scaling)
    if scaling["rope_type"] == "default":
        return partial(rotation, head_dim=rotated, theta=config.rope_theta)
    try:
        llama = LlamaConfig(
            hidden_size=config.num_attention_heads * config.head_dim,  # which Llama's own is a multiple of
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={**scaling, "rope_theta": config.rope_theta},
        )
        made = LlamaRotaryEmbedding(llama)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # each kind has its own settings
        raise UserError(f"head.rope_scaling: {first_line(error)}") from error
    frequencies: Any = made.inv_freq
    are_positive = bool((frequencies.isfinite() & (frequencies > 0)).all())
    expect(are_positive, "head.rope_scaling", "factors above 0", scaling)

    def scaled(positions: Tensor, dtype: torch.dtype) -> CosSin:
        cos, sin = rotation_by(made, positions, dtype)
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat([-first, second], dim=-1)

    return scaled


def rotation_by(maker: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (B, 1, T, d) of rotary positions (B, T) by a module of transformers, whose layers take
    them as they are."""
    like, maker = torch.empty((), dtype=dtype, device=positions.device), maker.to(positions.device)
    if hasattr(maker, "mrope_section"):  # positions in time, height and width, which are equal for text
        positions = positions.expand(3, -1, -1)
    cos, sin = maker(like, positions)  # (B, T, d)
    return cos[:, None], sin[:, None]


def rotation(positions: Tensor, dtype: torch.dtype, *, head_dim: int, theta: float) -> CosSin:
    """Return cosines, and sines with the first half negated, (B, 1, T, d) each, of rotary positions (B, T) (arXiv
    2104.09864), with angles in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    inverse = theta ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim)
    angles = positions[:, None, :, None] * inverse  # (B, 1, T, d / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate the two halves of each head (B, H, T, d), as Llama-family checkpoints do. Narrower angles rotate only as
    many of the first channels, in halves of their own."""
    cos, sin = cos_sin
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos_sin), x[..., width:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(width // 2, -1), sin)
