"""A native decoder's pass by kernels, on a GPU: about eight of them a layer, and no mask is ever written.

Attention takes ancestors as bits, so that the slots shown cost nothing where no token stands. The weights are the
decoder's own. What no kernel does (how a router ranks experts, how latent attention turns) are torch's operations, row
by row, as in `heads.native`. Whatever sums over a row's own numbers does so in an order that no other row changes.

Letters: B rows, N tokens of a step, R = B * N, S slots a row, D hidden, V vocabulary, H query heads, Hkv key heads, d
head dimension, C latent width, P rotary width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.activations import ACT2FN

from eval.runtime.accept import Acceptance
from eval.runtime.kernels import accept, choose
from eval.runtime.notices import say_once
from eval.runtime.sampling import RowSampling
from heads.families import OutputHead
from heads.kernels.attention import ancestor_words, tree_attention
from heads.kernels.backend import runs_kernels, why_not
from heads.kernels.experts import MOST_ROWS, expert_mm, weigh_visits
from heads.kernels.layers import add_norm, rope_write, silu_mul
from heads.kernels.per_head import per_head_mm
from heads.kernels.products import Products, choose_products
from heads.native.attention import GroupedAttention, LatentAttention, rotate_
from heads.native.decoder import NativeDecoder
from heads.native.feedforward import Experts, GatedMLP
from heads.native.linear import Product
from heads.native.slots import SlotCache
from heads.target import Features, FrozenTarget

SILU = (torch.nn.SiLU, type(ACT2FN["silu"]))
DTYPES = {torch.bfloat16, torch.float16, torch.float32}


def kernels_fit(target: FrozenTarget) -> bool:
    """Whether kernels can run where the target lives, on numbers of its kind; a GPU without them is told of."""
    reason = why_no_kernels(target.dtype, target.device) if target.device.type == "cuda" else None
    if reason is not None:
        say_once(f"{target.name}: decoded without kernels of its own, slower: {reason}")
    return reason is None and runs_kernels(target.head.weight) and target.dtype in DTYPES


def why_no_kernels(dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps a target on a GPU from the kernels, or None."""
    reason = f"kernels take no {str(dtype).removeprefix('torch.')}"
    return why_not(device) or (None if dtype in DTYPES else reason)


@dataclass(frozen=True)
class Tree:
    """What attention must know of the tokens of one pass."""

    length: Tensor  # (B,) slots before them
    depths: Tensor  # (B, N)
    words: Tensor  # (B, N, W)
    paths: Tensor | None  # (B, N, K + 1), for strict attention
    slots: Tensor  # (R,) in flat storage
    turn: tuple[Tensor, Tensor]  # (R, d / 2) each, cosines and sines
    rows: slice


class KernelStep:
    """The passes of one batch over one cache."""

    def __init__(
        self,
        target: FrozenTarget,
        decoder: NativeDecoder,
        *,
        batch_size: int,
        capacity: int,
        taps: Sequence[int],
        nodes: int,
        strict: bool,
        products: Products | None = None,
    ) -> None:
        """`nodes`: tokens a row of a verify step; `strict`: trees bit-identical to plain decoding; `products`: measured
        here if None."""
        self.target, self.decoder, self.taps, self.strict = target, decoder, taps, strict
        table = decoder.embedding
        self.cache = SlotCache(
            num_layers=len(decoder.layers),
            batch_size=batch_size,
            capacity=capacity,
            width=decoder.layers[0].attention.slot_width,
            dtype=table.dtype,
            device=table.device,
        )
        cos, sin = decoder.turns(capacity)
        half = cos.shape[2] // 2
        self.cos, self.sin = cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()  # (S, d / 2)
        self.slot = torch.arange(capacity, device=table.device)
        self.products = products or choose_products(self.weights(), batch_size * nodes)
        self.window = int(getattr(decoder.config, "sliding_window", None) or 0)
        ends = target.ends.logits
        plain = isinstance(ends, OutputHead) and ends.scale == 1 and ends.soft_cap is None
        self.reads_out = plain and getattr(target.head, "bias", None) is None and type(target.head) is torch.nn.Linear
        """Whether the output head is a product, so that the choice comes from its tiles."""

    def weights(self) -> list[Tensor]:
        """The weights of all products of a step but the output head's, those of experts and those of each head."""
        found = []
        for layer in self.decoder.layers:
            parts: list[Any] = [layer.attention, layer.feedforward]
            if isinstance(layer.feedforward, Experts):
                parts.append(layer.feedforward.shared)
                found.append(layer.feedforward.router.weight)
            for part in parts:
                found += [p.weight for p in vars(part).values() if isinstance(p, Product)] if part is not None else []
        return found

    def prefill(self, row: int, tokens: Tensor, positions: Tensor) -> Features:
        """One row's prompt tokens (1, C) at positions (C,), ascending by one; junk past the capacity stays in the last
        slot."""
        C = tokens.shape[1]
        depths = torch.arange(C, device=tokens.device)[None]
        slots = positions + row * self.cache.capacity
        return self.features(tokens, (depths - 1).clamp_min_(0), depths, positions[:1], positions, slots, C - 1, row)

    def verify(self, tokens: Tensor, parents: Tensor, depths: Tensor, length: Tensor, depth: int) -> Features:
        """Trees of at most `depth` levels, (B, N) each, behind `length` (B,) tokens."""
        N = tokens.shape[1]
        slots = (length[:, None] + self.slot[:N] + self.cache.row_starts).flatten()
        positions = (length[:, None] + depths).flatten()
        return self.features(tokens, parents, depths, length, positions, slots, depth, None)

    def features(
        self,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        length: Tensor,
        positions: Tensor,
        slots: Tensor,
        depth: int,
        row: int | None,
    ) -> Features:
        """One pass; positions and slots (R,); `row`: the one that the tokens are of, None for all."""
        B, N = tokens.shape
        words, paths = ancestor_words(parents, depths, depth)
        tree = Tree(
            length=length,
            depths=depths,
            words=words,
            paths=paths if self.strict and row is None else None,
            slots=slots,
            turn=(self.cos.index_select(0, positions), self.sin.index_select(0, positions)),
            rows=slice(0, B) if row is None else slice(row, row + 1),
        )
        x = self.decoder.embedding.index_select(0, tokens.flatten())  # (R, D), the residual stream
        streams: dict[int, Tensor] = {}
        added: Tensor | None = None
        for i, layer in enumerate(self.decoder.layers):
            normed = add_norm(x, added, layer.attention_norm.weight, layer.attention_norm.eps)
            if i in self.taps:
                streams[i] = x.clone()
            attend = self.grouped if isinstance(layer.attention, GroupedAttention) else self.latent
            added = attend(layer.attention, normed, tree, i)  # type: ignore[arg-type]
            normed = add_norm(x, added, layer.feedforward_norm.weight, layer.feedforward_norm.eps)
            feed = self.gated if isinstance(layer.feedforward, GatedMLP) else self.mixed
            added = feed(layer.feedforward, normed)  # type: ignore[arg-type]
        hidden = add_norm(x, added, self.decoder.norm.weight, self.decoder.norm.eps)
        streams[len(self.decoder.layers)] = x
        tapped = torch.cat([streams[k] for k in self.taps], dim=-1) if self.taps else x[:, :0]
        return Features(tapped.view(B, N, -1), hidden.view(B, N, -1))

    def multiply(self, x: Tensor, product: Product) -> Tensor:
        return self.products(x, product.weight, product.bias)

    def shown(self, layer: int, tree: Tree) -> Tensor:
        """(B, S, W): a layer's slots."""
        rows: Tensor = self.cache.flat[layer].view(self.cache.batch_size, self.cache.capacity, -1)
        return rows[tree.rows]

    def grouped(self, attention: GroupedAttention, x: Tensor, tree: Tree, layer: int) -> Tensor:
        """(R, D) normed states -> (R, D) to be added to the stream."""
        H, Hkv, d = attention.num_heads, attention.num_key_heads, attention.d
        B, N = tree.depths.shape
        norms = {}
        if attention.head_norm is not None:
            norms = {"q_norm": attention.head_norm[0], "k_norm": attention.head_norm[H], "eps": attention.head_eps}
        keys, values = self.cache.flat[layer].view(-1, 2, Hkv, d).unbind(1)
        qkv = self.multiply(x, attention.qkv)
        q = rope_write(qkv, *tree.turn, tree.slots, keys, values, num_heads=H, **norms)  # type: ignore[arg-type]
        keys, values = self.shown(layer, tree).unflatten(2, (2, Hkv, d)).unbind(2)  # (B, S, Hkv, d)
        mixed = self.attend(q.view(B, N, H, d), keys, values, tree, attention.scale, attention.kind, rope=0)
        return self.multiply(mixed.view(B * N, H * d), attention.out)

    def latent(self, attention: LatentAttention, x: Tensor, tree: Tree, layer: int) -> Tensor:
        """The same by `heads.native.attention.LatentAttention`, absorbed."""
        H, C, P = attention.num_heads, attention.C, attention.P
        B, N = tree.depths.shape
        fused = self.multiply(x, attention.inputs)
        q, latent = fused[:, : -C - P], fused[:, -C - P :]
        if attention.low_rank:
            normed = add_norm(q.contiguous(), None, attention.q_norm.weight, attention.q_norm.eps)
            q = self.multiply(normed, attention.queries)
        q = q.unflatten(1, (H, -1))  # (R, H, nope + P)
        turns = [q[..., attention.nope :], latent[:, None, C:]]
        if attention.interleaved:
            turns = [turn.unflatten(-1, (-1, 2)).mT.flatten(-2) for turn in turns]
        cos, sin = (half[:, None] for half in tree.turn)
        signed = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        turned, key = (rotate_(turn.contiguous(), signed) for turn in turns)
        weight, eps = attention.latent_norm.weight, attention.latent_norm.eps
        normed = add_norm(latent[:, :C].contiguous(), None, weight, eps)
        self.cache.flat[layer].index_copy_(0, tree.slots, torch.cat([normed, key[:, 0]], dim=-1))
        absorbed = q.new_empty(B * N, H, C + P)
        per_head_mm(q[..., : attention.nope], attention.to_key, absorbed[..., :C])
        absorbed[..., C:] = turned
        keys = self.shown(layer, tree)[:, :, None]  # (B, S, 1, C + P)
        q = absorbed.view(B, N, H, C + P)
        mixed = self.attend(q, keys, keys[..., :C], tree, attention.scale, attention.kind, rope=P)
        values = per_head_mm(mixed.view(-1, H, C), attention.to_value)  # (R, H, v)
        return self.multiply(values.flatten(1), attention.out)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, tree: Tree, scale: float, kind: str, *, rope: int
    ) -> Tensor:
        """Tree attention of one layer, windowed where its kind is."""
        window = self.window if kind == "sliding_attention" else 0
        return tree_attention(
            q, keys, values, tree.words, tree.length, tree.depths, scale=scale, window=window, rope=rope,
            paths=tree.paths,
        )  # fmt: skip

    def gated(self, block: GatedMLP, x: Tensor) -> Tensor:
        """(R, D) normed states -> (R, D) to be added to the stream."""
        return self.multiply(self.activate(self.multiply(x, block.gate_up), block), block.down)

    def activate(self, fused: Tensor, block: GatedMLP | Experts) -> Tensor:
        """Gate and up side by side -> the gated product."""
        act: Any = block.activation
        if act is silu or isinstance(act, SILU):
            return silu_mul(fused)
        gate, up = fused.chunk(2, dim=-1)
        gated: Tensor = act(gate) * up
        return gated

    def mixed(self, block: Experts, x: Tensor) -> Tensor:
        """The same by experts."""
        weights, ids = block.router(x, self.products)
        # In parts, since to sort rows by expert the host would have to know how many each has.
        parts = zip(x.split(MOST_ROWS), ids.split(MOST_ROWS), strict=True)
        tile = min(len(x), MOST_ROWS)
        visits = torch.cat([self.visit(block, *part, tile) for part in parts])
        return weigh_visits(visits, weights, None if block.shared is None else self.gated(block.shared, x))

    def visit(self, block: Experts, x: Tensor, ids: Tensor, tile: int) -> Tensor:
        """(R, A, D): what each of at most `MOST_ROWS` tokens gets of its experts (R, A)."""
        fused = expert_mm(x, ids, block.gate_up, tile)  # (R, A, 2 I)
        return expert_mm(self.activate(fused.flatten(0, 1), block).view(*ids.shape, -1), ids, block.down, tile)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """(..., D) -> (..., V) float32: what `choose` compares; None where the output head is more than a product."""
        if not self.reads_out:
            return None
        made: Tensor = choose.logits(hidden.flatten(0, -2), self.target.lm_head_weight)
        return made.view(*hidden.shape[:-1], -1)

    def choose(self, hidden: Tensor, positions: Tensor, sampling: RowSampling) -> Tensor | None:
        """The chosen tokens (B, N) after hidden states (B, N, D); None where the output head is more than a product.

        Rows with filters need the whole law; what the others choose must not depend on there being such rows.
        """
        if not self.reads_out:
            return None
        B, N, _ = hidden.shape
        by_tiles = None
        if not sampling.filtered or B > 1:
            by_tiles = choose.choose(
                hidden.flatten(0, 1), self.target.lm_head_weight, sampling.temperature, sampling.seed,
                positions.flatten(), noisy=sampling.random,
            ).view(B, N)  # fmt: skip
            if not sampling.filtered:
                return by_tiles
        logits = self.logits(hidden)
        assert logits is not None
        by_law = sampling.choose(logits, positions)
        return by_law if by_tiles is None else torch.where(sampling.filters()[:, None], by_law, by_tiles)

    def compact(self, length: Tensor, acceptance: Acceptance) -> None:
        """Move the accepted nodes to the slots they keep."""
        L, _, W = self.cache.store.shape
        store = self.cache.store.view(L, self.cache.batch_size, self.cache.capacity, W)
        accept.compact(store, length, acceptance.path, acceptance.accepted)
