"""Heads that recycle their state, as `heads.backends.torch.recurrent.TorchRecurrent`, on a GPU. A step is about twelve
kernels:

    enter; q, k, v; rotate and write; attention; out; add, norm; gate and up, SiLU; down; add, norm

and the output head's product. A draft reads its weights once per step, which takes 10 microseconds for 50 MB at
4.8 TB/s, so the time of every small kernel matters. There are no masks: attention takes the visible nodes as bits.

Letters: B batch, W tokens per row, R = B * W rows, D hidden, L auxiliary layers, Vd draft vocabulary, S cache slots, H
query heads, Hkv key heads, d head dimension, P nodes that have slots after the observed ones.
"""

from functools import partial

from torch import Tensor, nn

from heads.backends.base import RecurrentSpec, RecurrentSteps
from heads.backends.recurrent_parts import HeadParts
from heads.backends.slot_mapping import Drafted, Observed
from heads.backends.torch.attention import GroupedAttention
from heads.backends.torch.feedforward import GatedMLP
from heads.backends.torch.linear import Norm, Product
from heads.backends.triton.attention import new_counters
from heads.backends.triton.decoder import DTYPES, Tree, gated, grouped
from heads.backends.triton.gemm import MOST_ROWS
from heads.backends.triton.inputs import enter, take_newest
from heads.backends.triton.layers import add_norm
from heads.backends.triton.products import choose_products
from heads.base import Observation
from heads.tree import level_widths, scratch_slots


class TritonRecurrent(RecurrentSteps):
    """Cache of the module for one batch and a step over it, with the weights as they were at construction. Fused
    weights are copies."""

    @classmethod
    def of(cls, spec: RecurrentSpec) -> "TritonRecurrent | None":
        """Return the steps of a head with one module, one norm after its layer and a supported dtype; else None."""
        parts = spec.parts
        if parts is None or len(parts.modules) > 1 or parts.weight.dtype not in DTYPES:
            return None
        (module,) = parts.modules
        once = (module.leave_norm is None) != (module.read_norm is None)
        return cls(parts, spec) if once else None

    def __init__(self, parts: HeadParts, spec: RecurrentSpec) -> None:
        (module,), like = parts.modules, parts.weight
        embed, shape, batch_size, cos_sin_table = spec.embed, spec.shape, spec.batch_size, spec.cos_sin_table
        self.parts, self.embed, self.lm_head_weight = parts, embed, spec.lm_head_weight
        self.table = embed.weight.detach() if type(embed) is nn.Embedding else None
        self.attention = GroupedAttention(module.attention, "full_attention", draft=True)
        self.mlp = GatedMLP(module.mlp, draft=True)
        self.fuse = None if parts.fuse is None else Product.of(parts.fuse, draft=True)
        self.project = None if module.project is None else Product.of(module.project, draft=True)
        self.token_norm, self.state_norm, self.norm = map(Norm, (module.token_norm, module.state_norm, module.norm))
        self.input_norm, self.leave_norm, self.read_norm = (
            None if norm is None else Norm(norm) for norm in (module.input_norm, module.leave_norm, module.read_norm)
        )
        self.state_first, self.zero_first = module.state_first, module.zero_first
        self.normed_residual, self.window = module.normed_residual, module.window or 0
        half = cos_sin_table[0].shape[3] // 2
        self.cos, self.sin = (cos_sin[0, 0, :, :half].contiguous() for cos_sin in cos_sin_table)  # (S, d / 2)
        self.behind = max(shape.depth, scratch_slots(shape))
        Hkv, d = self.attention.num_key_heads, self.attention.d
        self.store = like.new_zeros(batch_size, len(self.cos), 2, Hkv, d)
        products = [self.attention.qkv, self.attention.out, self.mlp.gate_up, self.mlp.down, self.project]
        weights = [product.weight for product in products if product is not None] + [spec.lm_head_weight]
        rows = {batch_size * width for width in (1, *level_widths(shape))}
        self.products = choose_products(weights, [M for M in sorted(rows) if M <= MOST_ROWS])
        most = max(*rows, batch_size * (shape.depth + 1))  # tokens of a level, or tokens accepted in a round
        self.counters = new_counters(most, self.attention.num_heads, len(self.cos), like.device)

    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        """Same as `RecurrentSteps.start`: (B, W, L * D), (B, W, D) -> (B, W, D)."""
        fuse = None if self.fuse is None else partial(self.products, weight=self.fuse.weight, bias=self.fuse.bias)
        return self.parts.start(aux_hidden_states.flatten(0, 1), hidden.flatten(0, 1), fuse).view(hidden.shape)

    def normed(self, recycled: Tensor) -> Tensor:
        """Return the input (B, W, D) of the output head for a recycled state."""
        if self.read_norm is None:
            return recycled
        read = add_norm(recycled.flatten(0, 1), None, self.read_norm.weight, self.read_norm.eps)
        return read.view(recycled.shape)

    def logits(self, normed: Tensor) -> Tensor:
        """Return the logits (B, W, Vd), given the output of `normed` (B, W, D)."""
        return self.products(normed.flatten(0, 1), self.lm_head_weight).view(*normed.shape[:2], -1)

    def step(
        self, module: int, tokens: Tensor, states: Tensor, rows: Tensor | None, mapping: Observed | Drafted, extent: int
    ) -> tuple[Tensor, Tensor]:
        """Same as `RecurrentSteps.step`. The extent is not used, since only slots with tokens are read."""
        B, W = tokens.shape
        embedded = self.embed(tokens) if self.table is None else self.table
        x, stream, at = enter(
            tokens, embedded, states, rows, mapping, self.token_norm, self.state_norm,
            behind=self.behind, state_first=self.state_first, zero_first=self.zero_first,
        )  # fmt: skip
        if self.normed_residual:
            stream = x.chunk(2, 1)[0 if self.state_first else 1].contiguous()
        if self.project is not None and self.input_norm is not None:
            stream = self.products(x, self.project.weight, self.project.bias)
            x = add_norm(stream, None, self.input_norm.weight, self.input_norm.eps)
        length, behind = (mapping.length, self.behind) if isinstance(mapping, Drafted) else (mapping.start, W)
        depths = at.positions.view(B, W) - length[:, None] if self.window else None
        tree = Tree(length, behind, at.words, depths, None, at.slots, (self.cos, self.sin), self.counters, at.positions)
        added = grouped(self.attention, x, tree, self.store, slice(0, B), self.products, self.window)
        x = add_norm(stream, added, self.norm.weight, self.norm.eps)
        added = gated(self.mlp, x, self.products)
        last = self.read_norm or self.leave_norm
        assert last is not None
        read = add_norm(stream, added, last.weight, last.eps)
        recycled = read if self.read_norm is None else stream
        return recycled.view(B, W, -1), read.view(B, W, -1)

    def extend(
        self, observation: Observation, slot: Tensor, extent: int, recycled: list[Tensor], root: Tensor, length: Tensor
    ) -> None:
        tokens, start, count = observation.tokens, observation.start.contiguous(), observation.count.contiguous()
        states = self.start(observation.aux_hidden_states, observation.hidden)
        mapping = Observed(start, count, slot, states.shape[1])
        made, _ = self.step(0, tokens[:, 1:], states, None, mapping, extent)
        take_newest(tokens, start, count, root, length, recycled=recycled[0], made=made)
