"""Layers whose attention and MLP stand between short convolutions over the rows of a block (DFlash2).

    u = norm(x),  [k_in ; k_out]_t = base + W u_t           coefficients of row t, one for each tap and channel
    conv(x, k)_t = sum_i k_{t,i} x_{t-i}                    i = 0 .. taps - 1; zeros before the block's first row
    x += conv(sublayer(conv(u, k_in)), k_out)

What W u_t adds is the same for all channels of a group. A new layer is its plain self: base 1 for the row itself, and
0 beside it. The context is not convolved.

Letters: B batch, N blocks, R rows of a block, D hidden, t taps, G groups of channels, c channels of a group.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heads.layers import Attend, Attention, CosSin, DecoderLayer


class BlockConvolution(nn.Module):
    """The two convolutions around one sublayer."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, width // group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * self.groups, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Make both the identity."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def kernels(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients beside the base of either convolution (B, R, t, G), of normed rows u (B, R, D)."""
        first, second = self.kernel_projection(u).unflatten(-1, (2, self.taps, self.groups)).unbind(-3)
        return first, second

    def convolve(self, x: Tensor, kernel: Tensor, side: int, rows: int) -> Tensor:
        """One convolution of blocks of `rows` rows, x (B, N * R, D), with coefficients beside the base (B, N * R, t,
        G)."""
        blocks = x.unflatten(1, (-1, rows)).unflatten(-1, (self.groups, -1))  # (B, N, R, G, c)
        base = self.base_kernel[side].to(x.dtype).unflatten(-1, (self.groups, -1))  # (t, G, c)
        taps = base + kernel.unflatten(1, (-1, rows))[..., None]  # (B, N, R, t, G, c)
        out = taps[..., 0, :, :] * blocks
        for i in range(1, min(self.taps, rows)):
            out = out + taps[..., i, :, :] * pad(blocks[:, :, :-i], (0, 0, 0, 0, i, 0))
        return out.flatten(-2).flatten(1, 2)  # type: ignore[no-any-return]


class ConvolvedLayer(DecoderLayer):
    """A decoder layer between convolutions."""

    def __init__(self, config: Any, attention: Attention) -> None:
        super().__init__(config, attention)
        self.attention_conv, self.mlp_conv = (
            BlockConvolution(config.hidden_size, config.conv_kernel_size, config.conv_group_size) for _ in range(2)
        )

    @property
    def convolutions(self) -> tuple[BlockConvolution, BlockConvolution]:  # type: ignore[override]
        return self.attention_conv, self.mlp_conv

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend, rows: int | None = None) -> Tensor:
        """x (B, N * R, D), blocks of `rows` rows, by default one."""
        rows = rows or x.shape[1]
        u, conv = self.input_layernorm(x), self.attention_conv
        enter, leave = conv.kernels(u)
        x = x + conv.convolve(self.self_attn(conv.convolve(u, enter, 0, rows), cos_sin, attend), leave, 1, rows)
        u, conv = self.post_attention_layernorm(x), self.mlp_conv
        enter, leave = conv.kernels(u)
        return x + conv.convolve(self.mlp(conv.convolve(u, enter, 0, rows)), leave, 1, rows)
