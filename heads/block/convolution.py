"""Decoder layers with short convolutions over a block's rows, before and after attention and MLP (DFlash2).

    u = norm(x),  [k_in ; k_out]_t = base + W u_t           coefficients of row t, one for each tap and channel
    conv(x, k)_t = sum_i k_{t,i} x_{t-i}                    i = 0 .. taps - 1; zeros before the block's first row
    x += conv(sublayer(conv(u, k_in)), k_out)

All channels of a group share what W u_t adds. A new layer equals one without convolutions: base is 1 for the row itself
and 0 for the rows before. The context is not convolved.

Letters: B batch, N blocks, R rows of a block, D hidden, t taps, G groups of channels, c channels of a group.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from heads.layers import Attend, Attention, CosSin, DecoderLayer


class BlockConvolution(nn.Module):
    """Two convolutions, before and after one sublayer."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, width // group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * self.groups, bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Set both convolutions to the identity."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def kernels(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is added to the base of each of the two convolutions (B, R, t, G), from normed rows u
        (B, R, D)."""
        first, second = self.kernel_projection(u).unflatten(-1, (2, self.taps, self.groups)).unbind(-3)
        return first, second

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

    @property
    def convolutions(self) -> tuple[BlockConvolution, BlockConvolution]:  # type: ignore[override]
        return self.attention_conv, self.mlp_conv

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend, rows: int | None = None) -> Tensor:
        """Apply the layer to blocks of `rows` rows, x (B, N * R, D). By default x is one block."""
        rows = rows or x.shape[1]
        u, conv = self.input_layernorm(x), self.attention_conv
        enter, leave = conv.kernels(u)
        x = x + conv.convolve(self.self_attn(conv.convolve(u, enter, 0, rows), cos_sin, attend), leave, 1, rows)
        u, conv = self.post_attention_layernorm(x), self.mlp_conv
        enter, leave = conv.kernels(u)
        return x + conv.convolve(self.mlp(conv.convolve(u, enter, 0, rows)), leave, 1, rows)
