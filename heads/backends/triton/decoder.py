"""A native decoder with GPU kernels and the cache of one batch, for prompts, verification and levels of draft trees.

A layer is eight kernels, and no mask is ever written. Attention takes ancestors as bits, so slots without tokens cost
nothing. The weights are those of the native decoder. Operations without a kernel (how a router ranks experts, rotary
embeddings of latent attention) run in torch, row by row, as in `heads.backends.torch`. Every sum over a row's values
runs in an order that does not depend on other rows.

Letters: B rows, N tokens of a step, R = B * N, S slots per row, P tokens that have slots after the length, D hidden, H
query heads, Hkv key heads, d head dimension, C latent width, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from heads.backends.base import CachedDecoder
from heads.backends.slot_mapping import CacheSpec, Drafted, SlotMapping, Verified
from heads.backends.torch.architectures import native_decoder
from heads.backends.torch.attention import GroupedAttention, KVCache, LatentAttention, rotate_
from heads.backends.torch.decoder import NativeDecoder
from heads.backends.torch.feedforward import Experts, GatedMLP
from heads.backends.torch.linear import Product
from heads.backends.triton import choose, gemm
from heads.backends.triton.attention import ancestor_words, new_counters, splits_of, tree_attention
from heads.backends.triton.compaction import compact
from heads.backends.triton.experts import MOST_ROWS, expert_mm, weigh_visits
from heads.backends.triton.gemm import add_parts
from heads.backends.triton.inputs import stand
from heads.backends.triton.layers import add_norm, rope_write, silu_mul
from heads.backends.triton.per_head import per_head_mm
from heads.backends.triton.products import Products, choose_products
from heads.target.families import OutputHead
from heads.target.frozen import Features, LanguageModel

MOST_BYTES = 1 << 29
"""Maximum number of bytes for the partial sums of one attention call."""
DTYPES = {torch.bfloat16, torch.float16, torch.float32}


@dataclass(frozen=True)
class Tree:
    """Slots of one pass's tokens, and which of the tokens after the length each of them sees."""

    length: Tensor  # (B,) number of slots that all tokens see
    behind: int
    """Number P of tokens that have slots after the length."""
    words: Tensor  # (B, N, W), from `heads.backends.triton.attention.ancestor_words`
    depths: Tensor | None  # (B, N), for windows and paths
    paths: Tensor | None  # (B, N, K + 1), for attention by paths
    slots: Tensor  # (R,) in flat storage
    cos_sin: tuple[Tensor, Tensor]  # (R, d / 2) each, cosines and sines; if `positions` is given, of all positions
    counters: Tensor  # from `heads.backends.triton.attention.new_counters`
    positions: Tensor | None = None  # (R,)

    def of(self, rows: slice) -> "Tree":
        """Return the tree of some rows, for attention."""
        depths = None if self.depths is None else self.depths[rows]
        paths = None if self.paths is None else self.paths[rows]
        return replace(self, length=self.length[rows], words=self.words[rows], depths=depths, paths=paths)


def grouped(
    attention: GroupedAttention,
    x: Tensor,
    tree: Tree,
    store: Tensor,
    rows: slice,
    products: Products,
    window: int = 0,
) -> Tensor:
    """Apply grouped-query attention over store (B', S, 2, Hkv, d) to normed states x (R, D) of its `rows`. Return
    (R, D) to add to the residual stream, or its parts (P, R, D)."""
    H, Hkv, d = attention.num_heads, attention.num_key_heads, attention.d
    B, N = tree.words.shape[:2]
    norms: dict[str, Any] = {}
    if attention.head_norm is not None:
        norms = {"q_norm": attention.head_norm[0], "k_norm": attention.head_norm[H], "eps": attention.head_eps}
    keys, values = store.view(-1, 2, Hkv, d).unbind(1)
    qkv = products.parts(x, attention.qkv.weight, attention.qkv.bias)
    q = rope_write(qkv, *tree.cos_sin, tree.slots, keys, values, num_heads=H, positions=tree.positions, **norms)
    keys, values = store[rows].unbind(2)  # (B, S, Hkv, d)
    mixed = attend(q.view(B, N, H, d), keys, values, tree, attention.scale, window)
    return products.parts(mixed.view(B * N, H * d), attention.out.weight, attention.out.bias)


def attend(q: Tensor, keys: Tensor, values: Tensor, tree: Tree, scale: float, window: int, rope: int = 0) -> Tensor:
    """Run `tree_attention` for a pass. If the parts of all rows would need too much memory, as with prompts, run it
    row by row."""
    B, N, H, _ = q.shape
    if B > 1 and 4 * B * splits_of(keys.shape[1]) * N * H * values.shape[3] > MOST_BYTES:
        rows = [slice(b, b + 1) for b in range(B)]
        return torch.cat([attend(q[b], keys[b], values[b], tree.of(b), scale, window, rope) for b in rows])
    return tree_attention(
        q, keys, values, tree.words, tree.length, tree.depths,
        behind=tree.behind, scale=scale, window=window, rope=rope, paths=tree.paths, counters=tree.counters,
    )  # fmt: skip


def gated(block: GatedMLP, x: Tensor, products: Products) -> Tensor:
    """Apply a gated MLP to normed states x (R, D). Return (R, D) to add to the residual stream, or its parts
    (P, R, D)."""
    if block.activation is silu:
        mixed = products.gated(x, block.gate_up.weight, block.gate_up.bias)
    else:
        mixed = activated(products(x, block.gate_up.weight, block.gate_up.bias), block)
    return products.parts(mixed, block.down.weight, block.down.bias)


def activated(fused: Tensor, block: GatedMLP | Experts) -> Tensor:
    """Return the gated product of concatenated gate and up projections."""
    if block.activation is silu:
        return silu_mul(fused)
    gate, up = fused.chunk(2, dim=-1)
    return block.activation(gate) * up


class TritonDecoder(CachedDecoder):
    """Passes of one batch over one cache, without masks."""

    native: NativeDecoder
    reads_masks = False

    @classmethod
    def of(cls, model: LanguageModel, spec: CacheSpec) -> "TritonDecoder | None":
        """Return the decoder of a model, or None if the kernels do not support its architecture or dtype."""
        native = native_decoder(model, draft=spec.draft)
        return None if native is None or model.dtype not in DTYPES else cls(model, spec, native)

    def __init__(self, model: LanguageModel, spec: CacheSpec, native: NativeDecoder) -> None:
        super().__init__(model, spec)
        self.native = native
        output, lm_head = native.output, model.lm_head
        plain = isinstance(lm_head, OutputHead) and lm_head.scale == 1 and lm_head.soft_cap is None
        self.is_product = plain and type(model.head) is nn.Linear and (spec.draft or model.head.bias is None)
        """True if the output head is a product, so that `choose` can choose the target's tokens from its tiles."""
        self.nodes = max(spec.widths, default=0)
        """Number of nodes of a verify step. Smaller trees are padded to it."""
        self.rows = spec.batch_size * self.nodes
        self.cache: KVCache = native.new_cache(batch_size=spec.batch_size, capacity=spec.capacity)
        cos, sin = native.cos_sin_table(spec.capacity + spec.depth)
        half = cos.shape[2] // 2
        self.cos, self.sin = cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()  # (positions, d / 2)
        self.window = int(getattr(native.config, "sliding_window", None) or 0)
        rows = sorted({spec.batch_size * width for width in spec.widths})
        rows = [M for M in rows if M <= gemm.MOST_ROWS] if spec.draft else rows
        heads = native.layers[0].attention.num_heads
        self.counters = new_counters(max(rows, default=1), heads, spec.capacity, model.device)
        others = [output.weight[: spec.vocab_size]] if spec.draft and output is not None else []
        self.products = choose_products([*self.weights(), *others], rows)

    def weights(self) -> list[Tensor]:
        """Return the weights of all products of a step except those of the output head, of experts and per attention
        head."""
        products = [product.weight for kind in self.native.products().values() for product in kind]
        mixtures = [layer.feedforward for layer in self.native.layers if isinstance(layer.feedforward, Experts)]
        return products + [mixture.router.weight for mixture in mixtures]

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (R, d / 2) of positions (R,)."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        given = tokens.shape[1]
        if isinstance(mapping, Verified) and given < self.nodes:
            tokens, mapping = self.padded(tokens, mapping)
        made = self.features(tokens, self.tree(mapping, row), row)
        if tokens.shape[1] == given:
            return made
        return Features(made.aux_hidden_states[:, :given], made.hidden[:, :given])

    def padded(self, tokens: Tensor, mapping: Verified) -> tuple[Tensor, Verified]:
        """Pad trees (B, N) to the size of the largest tree. The added nodes are at the root's position, and no other
        node sees them.

        Products and tiles with other numbers of rows round differently. Passes over smaller trees therefore have as
        many rows as those over the largest, so that the output of an adaptive draft does not depend on timing.
        """
        missing = (0, self.nodes - tokens.shape[1])
        parents, depths = pad(mapping.parents, missing), pad(mapping.depths, missing)
        return pad(tokens, missing), replace(mapping, parents=parents, depths=depths, above=None)

    def tree(self, mapping: SlotMapping, row: int | None) -> Tree:
        """Return each token's slot and the slots that it sees."""
        if isinstance(mapping, Verified):
            words, strict = ancestor_words(mapping.parents, mapping.depths, mapping.levels)
            slots = (mapping.slots() + self.cache.row_starts).flatten()
            cos_sin = self.cos_sin((mapping.length[:, None] + mapping.depths).flatten())
            N = mapping.parents.shape[1]
            return Tree(
                mapping.length, N, words, mapping.depths,
                paths=strict if self.spec.strict else None, slots=slots, cos_sin=cos_sin, counters=self.counters,
            )  # fmt: skip
        if row is not None:  # the prompt of a target
            positions, C = mapping.positions[0], mapping.positions.shape[1]
            levels = torch.arange(C, device=positions.device)[None]
            words, _ = ancestor_words((levels - 1).clamp_min(0), levels, C - 1)
            slots, cos_sin = positions + row * self.spec.capacity, self.cos_sin(positions)
            return Tree(positions[:1], C, words, levels, None, slots, cos_sin, self.counters)
        at = stand(mapping, behind=self.spec.scratch)
        depths: Tensor | None = None
        paths: Tensor | None = None
        if isinstance(mapping, Drafted):
            length, behind = mapping.length, self.spec.scratch
            if self.window:  # windows need positions, which slots give only along a node's own path
                paths, behind = mapping.paths.contiguous(), mapping.paths.shape[2]
                depths = torch.full_like(paths[..., 0], behind - 1)
        else:
            length, behind = mapping.start, mapping.number
            if self.window:
                depths = self.slot[: mapping.number].repeat(len(mapping.start), 1)
        return Tree(length, behind, at.words, depths, paths, at.slots, self.cos_sin(at.positions), self.counters)

    def features(self, tokens: Tensor, tree: Tree, row: int | None) -> Features:
        """Run one pass over tokens (B, N). `row` is the only row that they belong to, None for all rows."""
        (B, N), native, aux_layer_ids = tokens.shape, self.native, self.spec.aux_layer_ids
        rows = slice(0, B) if row is None else slice(row, row + 1)
        x = native.embedding.index_select(0, tokens.flatten())  # (R, D), the residual stream
        streams: dict[int, Tensor] = {}
        added: Tensor | None = None
        for i, layer in enumerate(native.layers):
            normed = add_norm(x, added, layer.attention_norm.weight, layer.attention_norm.eps)
            if i in aux_layer_ids:
                streams[i] = x.clone()
            added = self.attention(layer.attention, normed, tree, i, rows)
            normed = add_norm(x, added, layer.feedforward_norm.weight, layer.feedforward_norm.eps)
            added = self.feed(layer.feedforward, normed)
        hidden = add_norm(x, added, native.norm.weight, native.norm.eps)
        streams[len(native.layers)] = x
        aux = torch.cat([streams[k] for k in aux_layer_ids], dim=-1) if aux_layer_ids else x[:, :0]
        return Features(aux.view(B, N, -1), hidden.view(B, N, -1))

    def attention(
        self, attention: GroupedAttention | LatentAttention, x: Tensor, tree: Tree, layer: int, rows: slice
    ) -> Tensor:
        """Apply attention to normed states x (R, D), with a window if the layer's kind has one. Return what to add to
        the residual stream, as `grouped`."""
        window = self.window if attention.kind == "sliding_attention" else 0
        slots = self.cache.flat[layer].view(self.cache.batch_size, self.cache.capacity, -1)  # (B', S, width)
        if isinstance(attention, LatentAttention):
            return self.latent(attention, x, tree, slots, rows, window)
        store = slots.unflatten(2, (2, attention.num_key_heads, attention.d))
        return grouped(attention, x, tree, store, rows, self.products, window)

    def latent(
        self, attention: LatentAttention, x: Tensor, tree: Tree, store: Tensor, rows: slice, window: int
    ) -> Tensor:
        """Apply latent attention as `heads.backends.torch.attention.LatentAttention`, with absorbed projections, over
        store (B', S, C + rotary width)."""
        H, C, rotary_width = attention.num_heads, attention.C, attention.P
        B, N = tree.words.shape[:2]
        fused = self.multiply(x, attention.inputs)
        q, latent = fused[:, : -C - rotary_width], fused[:, -C - rotary_width :]
        if attention.low_rank:
            normed = add_norm(q.contiguous(), None, attention.q_norm.weight, attention.q_norm.eps)
            q = self.multiply(normed, attention.queries)
        q = q.unflatten(1, (H, -1))  # (R, H, nope + turned)
        cos_sin_table = [q[..., attention.nope :], latent[:, None, C:]]
        if attention.interleaved:
            cos_sin_table = [cos_sin.unflatten(-1, (-1, 2)).mT.flatten(-2) for cos_sin in cos_sin_table]
        cos, sin = (half[:, None] for half in tree.cos_sin)
        signed = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        rotated, key = (rotate_(cos_sin.contiguous(), signed) for cos_sin in cos_sin_table)
        weight, eps = attention.latent_norm.weight, attention.latent_norm.eps
        normed = add_norm(latent[:, :C].contiguous(), None, weight, eps)
        store.flatten(0, 1).index_copy_(0, tree.slots, torch.cat([normed, key[:, 0]], dim=-1))
        absorbed = q.new_empty(B * N, H, C + rotary_width)
        per_head_mm(q[..., : attention.nope], attention.to_key, absorbed[..., :C])
        absorbed[..., C:] = rotated
        keys, q = store[rows][:, :, None], absorbed.view(B, N, H, C + rotary_width)  # (B, S, 1, width)
        mixed = attend(q, keys, keys[..., :C], tree, attention.scale, window, rope=rotary_width)
        values = per_head_mm(mixed.view(-1, H, C), attention.to_value)  # (R, H, v)
        return self.multiply(values.flatten(1), attention.out)

    def feed(self, block: GatedMLP | Experts, x: Tensor) -> Tensor:
        """Apply an MLP or experts to normed states x (R, D). Return what to add to the residual stream, as `gated`."""
        if isinstance(block, GatedMLP):
            return gated(block, x, self.products)
        weights, ids = block.router(x, self.products)
        # In parts, since sorting rows by expert would require the host to know each expert's number of rows.
        parts = zip(x.split(MOST_ROWS), ids.split(MOST_ROWS), strict=True)
        tile = min(len(x), MOST_ROWS)
        visits = torch.cat([self.visit(block, *part, tile) for part in parts])
        added = None if block.shared is None else add_parts(gated(block.shared, x, self.products), x.dtype)
        return weigh_visits(visits, weights, added)

    def visit(self, block: Experts, x: Tensor, ids: Tensor, tile: int) -> Tensor:
        """Return the outputs (R, A, D) of the experts ids (R, A) for at most `MOST_ROWS` tokens."""
        fused = expert_mm(x, ids, block.gate_up, tile)  # (R, A, 2 I)
        return expert_mm(activated(fused.flatten(0, 1), block).view(*ids.shape, -1), ids, block.down, tile)

    def logits(self, hidden: Tensor) -> Tensor:
        output, rows = self.native.output, hidden.flatten(0, -2)
        if self.spec.draft and output is not None:
            bias = None if output.bias is None else output.bias[: self.spec.vocab_size]
            made = self.products(rows, output.weight[: self.spec.vocab_size], bias)
        elif not self.spec.draft and self.is_product:
            made = choose.logits(rows, self.model.head.weight, self.rows)
        else:
            return super().logits(hidden)
        return made.view(*hidden.shape[:-1], -1)

    def choose(
        self, hidden: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, *, random: bool
    ) -> Tensor | None:
        if not self.is_product:
            return None
        chosen: Tensor = choose.choose(
            hidden.flatten(0, 1), self.model.head.weight, temperature, seed, positions.flatten(), noisy=random,
            tile=self.rows,
        )  # fmt: skip
        return chosen.view(positions.shape)

    def multiply(self, x: Tensor, product: Product) -> Tensor:
        return self.products(x, product.weight, product.bias)

    def compact(self, start: Tensor, path: Tensor, accepted: Tensor) -> None:
        L, _, width = self.cache.store.shape
        compact(self.cache.store.view(L, self.cache.batch_size, self.cache.capacity, width), start, path, accepted)
