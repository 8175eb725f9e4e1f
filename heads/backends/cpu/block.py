"""Heads that draft a block, as `heads.backends.torch.block.TorchBlock`; the CPU kernels run all layers in one call.

Weights are stored in bfloat16, as for all drafts.

Letters: B batch, M observed tokens, R rows of a block, L layers of the head, D hidden, H key heads, d head dimension, S
cache slots, E visible slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.backends.base import BlockSpec, BlockSteps
from heads.backends.cpu.kernels import CompiledNorm, draft_product, in_c
from heads.backends.cpu.stack import CpuStack, signed
from heads.backends.slot_mapping import Observed
from heads.backends.torch.attention import GroupedAttention, rotate_
from heads.backends.torch.block import output_head, with_products
from heads.backends.torch.feedforward import GatedMLP
from heads.backends.torch.linear import Norm, Product, unit
from heads.layers import FULL, SLIDING
from heads.target.families import additive


class CpuBlock(BlockSteps):
    """Steps of a block-drafting head, with a batch's context in the kernels' cache."""

    @classmethod
    def of(cls, spec: BlockSpec) -> "CpuBlock | None":
        """Return the steps of a head, or None if the kernels do not support it."""
        if spec.lm_head_weight.dtype != torch.float32:
            return None
        config = spec.head.config
        blocks = [
            (
                Norm(layer.input_layernorm),
                in_c(GroupedAttention(layer.self_attn, kind, draft=True), draft=True),
                Norm(layer.post_attention_layernorm),
                in_c(GatedMLP(layer.mlp, draft=True), draft=True),
            )
            for layer, kind in zip(spec.head.layers, config.kinds, strict=True)
        ]
        convolutions = [
            tuple(
                (draft_product(conv.kernel_projection), conv.base_kernel.detach().contiguous())
                for conv in layer.convolutions
            )
            for layer in spec.head.layers
        ]
        stack = CpuStack.of(blocks, config.sliding_window, convolutions)
        return None if stack is None else cls(stack, spec)

    def __init__(self, stack: CpuStack, spec: BlockSpec) -> None:
        super().__init__(spec)
        self.stack = stack
        self.head = with_products(spec.head, spec.product, without="layers")
        self.lm_head = output_head(spec)
        self.kinds = spec.head.config.kinds
        self.norm = CompiledNorm(Norm(spec.head.norm))
        attentions = [layer.self_attn for layer in spec.head.layers]
        made = [projection.weight.detach() for a in attentions for projection in (a.k_proj, a.v_proj)]
        self.context = in_c(Product(torch.cat(made)), draft=True)  # (L * 2 * H * d, D)
        self.key_norm = torch.stack([a.k_norm.weight.detach() for a in attentions])[:, None]  # (L, 1, d)
        self.eps = attentions[0].k_norm.eps
        self.signed = signed(spec.cos_sin_table)
        self.cache = stack.new_cache(batch_size=spec.batch_size, capacity=len(self.signed[0]))

    def extend(self, aux_hidden_states: Tensor, mapping: Observed) -> None:
        (heads, d), positions, slots = self.stack.key_shape, mapping.positions, self.slots(mapping)
        made = self.context(self.head.fuse(aux_hidden_states).flatten(0, 1))  # (B * M, L * 2 * H * d)
        made = made.view(*positions.shape, self.stack.num_layers, 2, heads, d)
        keys, values = made.unbind(3)  # (B, M, L, H, d)
        keys = unit(keys, self.eps).mul_(self.key_norm)
        cos, sin = (table[positions][:, :, None, None] for table in self.signed)
        keys, block = rotate_(keys, (cos, sin)), self.cache.keys.shape[-1]
        self.cache.keys[:, self.row, :, slots // block, :, slots % block] = keys
        self.cache.values[..., :d][:, self.row, :, slots] = values

    def run(self, x: Tensor, positions: Tensor, visible: Sequence[Tensor]) -> Tensor:
        rows = x.flatten(0, 1).clone()  # the kernels work in place
        self.cache.aim(positions, extent=visible[0].shape[2])
        shown = dict(zip(self.kinds, visible, strict=True))
        masks = {kind: additive(seen, torch.float32) for kind, seen in shown.items()}
        self.stack.run(
            rows,
            self.cache,
            positions=positions,
            cos_sin_table=self.signed,
            mask=masks.get(FULL),
            near_mask=masks.get(SLIDING),
        )
        return self.norm(rows).view(x.shape)
