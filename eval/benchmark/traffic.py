"""What a round must read from memory, at least: the bytes of its floor (`eval.benchmark.roofline`)."""

from typing import Any

import torch

from eval.runtime.round import Decoder
from eval.runtime.target_step import TargetStep
from heads.backends.cpu.decoder import CompiledProduct
from heads.backends.cpu.recurrent import CpuRecurrent
from heads.draft_model import Draft
from heads.eagle3 import Eagle3
from heads.recurrent import Recurrent
from heads.target.encoder_decoder import decoder_of


def attention_bytes(step: TargetStep, batch_size: int, length: int) -> int:
    """The cache, read once."""
    cache, native = step.decoder.cache, step.decoder.native
    if native is not None:
        per_slot = len(native.layers) * native.layers[0].attention.slot_width * step.target.dtype.itemsize
    else:
        stores = [*cache.stores["keys"], *cache.stores["values"]]
        per_slot = sum(store.numel() * store.element_size() for store in stores) // (step.batch_size * step.capacity)
    return batch_size * length * int(per_slot)


def draft_bytes(decoder: Decoder) -> tuple[int, int]:
    """What drafting a round must read of the head's weights, and what the head must read to take in what was accepted;
    0 where it is no module."""
    module: Any = getattr(decoder.head, "draft", decoder.head)
    if not isinstance(module, torch.nn.Module):
        return 0, 0
    K, width = decoder.shape.depth, bytes_a_weight(decoder)
    if isinstance(module, Recurrent):  # the output head is read at every level, the modules after the first of them
        lm_head_weight = module.lm_head_weight(decoder.step.target.shared)
        output = width * lm_head_weight.numel()
        own = width * sum(p.numel() for p in module.parameters() if p.data_ptr() != lm_head_weight.data_ptr())
        fuse = width * module.fc.weight.numel() if isinstance(module, Eagle3) else 0
        used = sum(module.num_modules - min(level, module.num_modules - 1) for level in range(1, K))
        return K * output + used * (own - fuse) // module.num_modules, own
    if isinstance(module, Draft):
        return K * width * numbers_read(module), 0
    return width * sum(parameter.numel() for parameter in module.parameters()), 0


def numbers_read(draft: Draft) -> int:
    """Weights that a step of a draft model reads: of its embeddings some rows, unless they are its output head too; of
    an encoder none."""
    stack: Any = decoder_of(draft.base)
    table = stack.get_input_embeddings().weight
    weights = {p.data_ptr(): p.numel() for p in stack.parameters() if p.data_ptr() != table.data_ptr()}
    output = draft.output.head.weight
    return sum((weights | {output.data_ptr(): output.numel()}).values())


def bytes_a_weight(decoder: Decoder) -> int:
    """Of what drafts: the CPU kernels hold a draft's weights in bfloat16, whatever they are loaded in."""
    state, module = decoder.head_state, getattr(decoder.head, "draft", decoder.head)
    products = [level.out for level in getattr(state, "levels", ())]
    if isinstance(module, Draft) and state.decoder.native is not None:
        products = [product for own in state.decoder.native.products().values() for product in own]
    on_kernels = isinstance(getattr(state, "steps", None), CpuRecurrent)
    on_kernels = on_kernels or any(isinstance(product, CompiledProduct) for product in products)
    untyped: Any = module
    return 2 if on_kernels else next(untyped.parameters()).element_size()
