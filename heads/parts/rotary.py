"""Rotary positions of heads: plain, or scaled as in transformers, vLLM 0.33.0 and SGLang 0.5.23."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.core.errors import UserError, expect, first_line

CosSin = tuple[Tensor, Tensor]
"""Cosines of rotary positions, and sines with the first half negated, (B, 1, T, d) each. With a
`partial_rotary_factor`, d is only that part of a head's width."""
Rotary = Callable[[Tensor, torch.dtype], CosSin]
"""Function that returns the `CosSin` (B, 1, T, d) of rotary positions (B, T), in the given dtype."""

LENGTH = "original_max_position_embeddings"
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "longrope": (LENGTH,),
}
"""Kinds of rotary positions that a head may have, with the numbers that each needs. `longrope` also has two lists."""


def check_scaling(scaling: dict[str, object]) -> None:
    """Raise UserError for a scaling of a recipe that is of no kind in `SCALINGS` or lacks a number."""
    kind = scaling.get("rope_type")
    where = "head.rope_scaling"
    if kind == "dynamic":
        raise UserError(
            f"{where}.rope_type: dynamic angles change with the length of the text, and cached keys would keep the old "
            "ones; use yarn"
        )
    expect(kind in SCALINGS, f"{where}.rope_type", f"one of {', '.join(SCALINGS)}", kind)
    for name in SCALINGS[str(kind)]:
        value: Any = scaling.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        expect(is_number and 0 < value < float("inf"), f"{where}.{name}", "a number above 0", value)


def rotary_of(config: Any) -> Rotary:
    """Return the rotary positions (arXiv 2104.09864) of a head with this base and, if the config has one, this scaling,
    with angles in float32 or wider. UserError for an unknown or invalid scaling.

    Frequencies, and the factor of cosines and sines, are those of transformers, which engines equal. Of LongRoPE's two
    lists the short one is used: texts end where engines would begin with the long one.
    """
    scaling = getattr(config, "rope_scaling", None)
    scaling = {"rope_type": "default"} if scaling is None else scaling
    is_known = isinstance(scaling, dict) and scaling.get("rope_type") in SCALINGS
    expect(is_known, "head.rope_scaling", f"a rope_type of {', '.join(SCALINGS)}", scaling)
    part = scaling.get("partial_rotary_factor", 1)
    d = int(part * config.head_dim) if isinstance(part, int | float) and 0 < part <= 1 else 0
    fits = d > 0 and d % 2 == 0
    expect(fits, "head.rope_scaling", "a partial_rotary_factor of at most 1, for an even number of channels", scaling)
    if scaling["rope_type"] == "default":
        factor = 1.0

        def frequencies(device: torch.device, dtype: torch.dtype) -> Tensor:
            return 1 / config.rope_theta ** (torch.arange(0, d, 2, device=device, dtype=dtype) / d)  # type: ignore[no-any-return]

    else:
        rotary = _scaled(config, scaling, d)
        factor = rotary.attention_scaling

        @cache  # a CUDA graph cannot capture a copy from the host
        def frequencies(device: torch.device, dtype: torch.dtype) -> Tensor:
            return rotary.inv_freq.to(device, dtype)

    def rotation(positions: Tensor, dtype: torch.dtype) -> CosSin:
        acc_dtype = torch.promote_types(dtype, torch.float32)
        angles = positions[:, None, :, None] * frequencies(positions.device, acc_dtype)  # (B, 1, T, d / 2)
        cos = angles.cos() * factor
        sin = angles.sin() * factor
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)

    return rotation


def _scaled(config: Any, scaling: dict[str, object], rotated: int) -> LlamaRotaryEmbedding:
    """Return the rotary positions of a Llama whose heads are as wide as those of `config`. rotated: number of channels
    of each head that they turn."""
    for name in ("short_factor", "long_factor") if scaling["rope_type"] == "longrope" else ():
        factors = scaling.get(name)
        is_whole = isinstance(factors, list | tuple) and len(factors) == rotated // 2
        got = len(factors) if isinstance(factors, list | tuple) else factors
        expect(is_whole, f"head.rope_scaling.{name}", f"{rotated // 2} factors, one for each frequency of a head", got)
    try:
        llama = LlamaConfig(
            hidden_size=config.head_dim,
            num_attention_heads=1,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={**scaling, "rope_theta": config.rope_theta},
        )
        rotary = LlamaRotaryEmbedding(llama)
        positive = (rotary.inv_freq.isfinite() & (rotary.inv_freq > 0)).all() and rotary.attention_scaling > 0
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # each kind has its own settings
        raise UserError(f"head.rope_scaling: {first_line(error)}") from error
    expect(bool(positive), "head.rope_scaling", "factors above 0", scaling)
    return rotary


def rotation_by(maker: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (B, 1, T, d) of rotary positions (B, T) by a module of transformers, whose layers take
    them as they are."""
    like = torch.empty((), dtype=dtype, device=positions.device)
    maker = maker.to(positions.device)
    if hasattr(maker, "mrope_section"):  # positions in time, height and width, which are equal for text
        positions = positions.expand(3, -1, -1)
    cos, sin = maker(like, positions)  # (B, T, d)
    return cos[:, None], sin[:, None]


def rotate(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate the two halves of each head (B, H, T, d), as Llama-family checkpoints do. Narrower angles rotate only as
    many of the first channels, in halves of their own."""
    cos, sin = cos_sin
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos_sin), x[..., width:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(width // 2, -1), sin)
