"""Attention of the native decoders over a static cache: grouped-query attention, and DeepSeek's latent attention.

Letters: L layers, B rows, N tokens of a step, R = B * N, H query heads, G query heads per key head, d head dimension, S
slots per row, E visible slots, C latent width, P rotary width, W width of a slot.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heads.backends.torch.linear import Norm, Product, unit


class KVCache:
    """Cache of all layers for a whole batch. A slot holds the keys and values of all heads, or one latent.

    Rows of the batch have different lengths. Each step sets the slots that its tokens go to, and masks set the slots
    that a query may see.
    """

    def __init__(
        self, *, num_layers: int, batch_size: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.batch_size, self.capacity = batch_size, capacity
        self.store = torch.zeros(num_layers, batch_size * capacity, width, dtype=dtype, device=device)
        self.flat = list(self.store)  # per layer (B * S, W)
        self.row_starts = torch.arange(batch_size, device=device)[:, None] * capacity  # (B, 1)
        self.slots = self.row_starts  # (B' * N,) after `aim`: the next step's slots in flat storage
        self.shown: list[Tensor] = []  # per layer (B', E, W)
        self.rows, self.extent = slice(0, 0), 0
        self.aim(self.row_starts, extent=capacity)

    def aim(self, slots: Tensor, *, extent: int, row: int | None = None) -> None:
        """Set the slots of the next step's tokens: `slots` (B, N) of every row, or (1, N) of one row. Attention sees
        the first `extent` slots."""
        rows = slice(0, self.batch_size) if row is None else slice(row, row + 1)
        alone = self.batch_size == 1
        self.slots = slots[0] if alone else (slots + self.row_starts[rows]).flatten()
        if (rows, extent) != (self.rows, self.extent):
            self.rows, self.extent = rows, extent
            L, _, W = self.store.shape
            self.shown = list(self.store.view(L, self.batch_size, self.capacity, W)[:, rows, :extent])

    def write(self, layer: int, states: Tensor) -> Tensor:
        """Write the step's states (B' * N, W) to the slots set by `aim`. Return all visible slots (B', E, W)."""
        self.flat[layer].index_copy_(0, self.slots, states)
        return self.shown[layer]

    def compact(self, slots_from: Tensor, slots_to: Tensor) -> None:
        """Move the slots slots_from[b] of row b to slots_to[b], (B, P) each, in every layer. All slots are read before
        any is written."""
        sources, goals = (slots_from + self.row_starts).flatten(), (slots_to + self.row_starts).flatten()
        self.store.index_copy_(1, goals, self.store.index_select(1, sources))


@dataclass
class Step:
    """Arguments that all layers of one pass share."""

    cache: KVCache
    batch_size: int
    cos_sin: tuple[Tensor, Tensor]  # (R, 1, d) each: cosines, and sines with the first half negative
    masks: dict[str, Tensor]  # layer kind -> (B, 1, N, E), added to scores
    folded: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def mask(self, kind: str, times: int = 1) -> Tensor:
        """Return the mask of a layer kind with each query's row repeated `times` times, (B, N * times, E); cached."""
        made = self.folded.get((kind, times))
        if made is None:
            made = self.masks[kind][:, 0]
            made = made.repeat_interleave(times, dim=1) if times > 1 else made
            self.folded[kind, times] = made
        return made


class GroupedAttention:
    """Grouped-query attention with rotary embeddings. A slot holds the keys of all heads, then their values."""

    def __init__(self, module: Any, kind: str, *, draft: bool = False) -> None:
        self.kind = kind
        self.d: int = module.head_dim
        self.scale = float(getattr(module, "scaling", self.d**-0.5))
        self.num_heads: int = module.q_proj.out_features // self.d
        self.num_key_heads: int = module.k_proj.out_features // self.d
        self.qkv = Product.of(module.q_proj, module.k_proj, module.v_proj, draft=draft)
        self.out = Product.of(module.o_proj, draft=draft)
        self.head_norm: Tensor | None = None  # (H + Hkv, d)
        self.head_eps = 0.0
        if hasattr(module, "q_norm"):
            norms = Norm(module.q_norm), Norm(module.k_norm)
            self.head_norm = torch.cat(
                [norms[0].weight.expand(self.num_heads, -1), norms[1].weight.expand(self.num_key_heads, -1)]
            )
            self.head_eps = norms[0].eps

    @property
    def slot_width(self) -> int:
        """Width W of a slot."""
        return 2 * self.num_key_heads * self.d

    def __call__(self, x: Tensor, residual: Tensor, step: Step, layer: int) -> Tensor:
        """Return the residual stream (R, D) after attention, from normed states x (R, D) and the residual stream."""
        H, Hkv, d = self.num_heads, self.num_key_heads, self.d
        fused = self.qkv(x)  # (R, (H + 2 Hkv) d)
        heads = fused.view(-1, H + 2 * Hkv, d)
        rotated = heads[:, : H + Hkv]
        if self.head_norm is not None:
            torch.mul(unit(rotated, self.head_eps), self.head_norm, out=rotated)
        rotate_(rotated, step.cos_sin)
        shown = step.cache.write(layer, fused[:, H * d :])  # (B, E, W)
        return self.out(self.attend(heads[:, :H], shown, step), residual)

    def attend(self, q: Tensor, shown: Tensor, step: Step) -> Tensor:
        """Return attention (R, H * d) of queries q (R, H, d) over the visible slots (B, E, W)."""
        B, H, Hkv, d = step.batch_size, self.num_heads, self.num_key_heads, self.d
        if Hkv == 1 and q.device.type == "cpu":
            # The query heads act as additional queries of one head, and three small products beat the fused kernel.
            q = q.reshape(B, -1, d)  # (B, N * H, d)
            scores = torch.baddbmm(step.mask(self.kind, H), q, shown[..., :d].mT, alpha=self.scale)
            return torch.bmm(scores.softmax(-1), shown[..., d:]).view(-1, H * d)
        keys, values = shown.unflatten(2, (2, Hkv, d)).unbind(2)  # (B, E, Hkv, d)
        out = scaled_dot_product_attention(
            q.unflatten(0, (B, -1)).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=step.masks[self.kind],
            scale=self.scale,
            enable_gqa=Hkv != H,
        )  # (B, H, N, d)
        return out.transpose(1, 2).reshape(-1, H * d)


class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv 2405.04434, section 2.1), never decompressed.

    A slot holds the normed latent c (C values) and the rotary key r (P values), shared by all heads. The key of head h
    is [U_h c; r], so its score is [U_h^T q; q_r] . [c; r]. Its value is V_h c, so V_h is applied to the weighted sum of
    the latents.
    """

    def __init__(self, module: Any, kind: str, *, interleaved: bool) -> None:
        self.kind, self.scale = kind, float(module.scaling)
        self.C: int = module.kv_lora_rank
        self.P: int = module.qk_rope_head_dim
        self.nope: int = module.qk_nope_head_dim
        self.low_rank = module.q_lora_rank is not None
        self.inputs = Product.of(module.q_a_proj if self.low_rank else module.q_proj, module.kv_a_proj_with_mqa)
        if self.low_rank:
            self.q_norm, self.queries = Norm(module.q_a_layernorm), Product.of(module.q_b_proj)
        self.latent_norm = Norm(module.kv_a_layernorm)
        self.interleaved = interleaved
        decompress = module.kv_b_proj.weight.detach().view(-1, self.nope + module.v_head_dim, self.C)
        self.to_key, self.to_value = decompress[:, : self.nope], decompress[:, self.nope :].mT
        self.num_heads = len(decompress)
        self.out = Product.of(module.o_proj)

    @property
    def slot_width(self) -> int:
        """Width W of a slot."""
        return self.C + self.P

    def __call__(self, x: Tensor, residual: Tensor, step: Step, layer: int) -> Tensor:
        """Return the residual stream (R, D) after attention, from normed states x (R, D) and the residual stream."""
        B, H, C, P = step.batch_size, self.num_heads, self.C, self.P
        fused = self.inputs(x)
        q, latent = fused[:, : -C - P], fused[:, -C - P :]
        if self.low_rank:
            q = self.queries(self.q_norm(q))
        q = q.unflatten(1, (H, -1))  # (R, H, nope + P)
        cos_sin_table = [q[..., self.nope :], latent[:, None, C:]]
        if self.interleaved:  # move the adjacent values of each rotated pair to the two halves; scores do not change
            cos_sin_table = [cos_sin.unflatten(-1, (-1, 2)).mT.flatten(-2) for cos_sin in cos_sin_table]
        q_turned, key = (rotate_(cos_sin.contiguous(), step.cos_sin) for cos_sin in cos_sin_table)
        shown = step.cache.write(layer, torch.cat([self.latent_norm(latent[:, :C]), key[:, 0]], dim=-1))  # (B, E, W)
        absorbed = torch.bmm(q[..., : self.nope].transpose(0, 1), self.to_key)  # (H, R, C)
        q = torch.cat([absorbed.transpose(0, 1), q_turned], dim=-1).view(B, -1, C + P)  # (B, N * H, W)
        scores = torch.baddbmm(step.mask(self.kind, H), q, shown.mT, alpha=self.scale)  # (B, N * H, E)
        wide = torch.promote_types(scores.dtype, torch.float32)
        mixed = torch.bmm(scores.softmax(-1, dtype=wide).to(x.dtype), shown[..., :C])  # (B, N * H, C)
        values = torch.bmm(mixed.view(-1, H, C).transpose(0, 1), self.to_value)  # (H, R, v)
        return self.out(values.transpose(0, 1).flatten(1), residual)


def rotate_(heads: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding to heads (R, H, d) in place, pairing the first half with the second."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads.mul_(cos_sin[0]).addcmul_(swapped, cos_sin[1])
