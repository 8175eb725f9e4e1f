"""Heads of a grown target: the same drafts from the grown target's features, at a big head's cost.

A head keeps its own ids and drafts none of the new ids of a larger vocabulary. EAGLE-3 has its own output head, which
may get more rows, like a real head of that size; they are never chosen. Auxiliary layers keep their ids, because new
layers come after the old ones and add nothing. Norms of a stream without the constant channel have half of their eps,
which is negligible compared with real states.

Letters: B batch, D width, V vocabulary, Vd draft vocabulary, L auxiliary layers; with a prime: the grown one's.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from heads.block.convolution import ConvolvedLayer
from heads.block.draft import DraftBlockHead
from heads.dflash import DFlash
from heads.dflash2 import DFlash2
from heads.draft_model import Draft
from heads.dspark import DSpark
from heads.eagle3 import Eagle3
from heads.errors import UserError
from heads.layers import BlockConfig
from heads.medusa import Medusa
from heads.mtp import Mtp
from heads.target.smaller_model import model_record
from scripts.grown.shapes import ModelShape
from scripts.grown.target import Growth, grow_llama, grow_output, grow_parameters, place

Head = TypeVar("Head", bound=nn.Module)


@dataclass(frozen=True)
class HeadSize:
    """Sizes of a grown head that can be chosen."""

    intermediate_size: int | None = None
    """Default: that of the grown target."""
    draft_vocab_size: int | None = None
    """Default: that of the head."""


@torch.no_grad()
def grow_head(head: Any, growth: Growth, size: HeadSize) -> nn.Module:
    """Return the head for the grown target. Raise UserError for a kind of head or a size that cannot be grown."""
    grow = GROW.get(type(head))
    if grow is None:
        known = ", ".join(kind.__name__ for kind in GROW)
        raise UserError(f"a head of kind {type(head).__name__} cannot be grown, only {known}")
    if size.draft_vocab_size is not None and grow is not grow_eagle3:
        raise UserError("draft_vocab_size: only an EAGLE-3 head has rows of its own to add; leave it out")
    if size.intermediate_size is not None and grow not in (grow_eagle3, grow_mtp, grow_block):
        raise UserError("intermediate_size: the head has no block of its own whose width could be chosen; leave it out")
    grown: nn.Module = grow(head, growth, size)
    return grown.eval()


def grow_eagle3(head: Eagle3, growth: Growth, size: HeadSize) -> Eagle3:
    """Grow an EAGLE-3 head (`heads.eagle3`)."""
    config, old, new, D = head.config, growth.old, growth.new, growth.old.hidden_size
    sizes = grown_sizes(config, growth, size)
    count = size.draft_vocab_size or config.draft_vocab_size
    surplus, spare = count - config.draft_vocab_size, new.vocab_size - old.vocab_size
    if not 0 <= surplus <= spare:
        raise UserError(
            f"draft_vocab_size: a head of {config.draft_vocab_size} draft ids can be grown to as many and up to "
            f"{config.draft_vocab_size + spare}, got {count}"
        )
    kept = torch.cat([head.kept, old.vocab_size + torch.arange(surplus)])
    grown_config = replace(config, **sizes, draft_vocab_size=count)
    grown = blank(Eagle3(grown_config, kept), head.fc.weight.dtype)
    grow_parameters(grown, head, block_growth(config, grown_config, growth.eps))
    if growth.wider:
        # Pass on the constant channel of the highest auxiliary layer, with which new ids are never chosen. It need not
        # be constant.
        grown.fc.weight[D, (len(config.aux_layer_ids) - 1) * new.hidden_size + D] = 1.0
        if grown.fc_norm is not None:
            [*grown.fc_norm.parameters()][-1][D] = 1.0
        # A state that is normalised and recycled must not increase the channel in every step.
        grown.norm.weight[D] = growth.norm_scale if config.norm_output else 1.0
    grown.lm_head.weight.copy_(grow_output(growth, head.lm_head.weight, count))
    return grown


def grow_mtp(head: Mtp, growth: Growth, size: HeadSize) -> Mtp:
    """Grow MTP modules of our own block (`heads.mtp`)."""
    config = head.config
    if config.decoder is not None:
        raise UserError("modules of a checkpoint's own decoder cannot be grown, only those trained from scratch")
    grown_config = replace(config, **grown_sizes(config, growth, size))
    grown = blank(Mtp(grown_config, head.kept), next(head.parameters()).dtype)
    grow_parameters(grown, head, block_growth(config, grown_config, growth.eps))
    return grown


def grow_medusa(head: Medusa, growth: Growth, size: HeadSize) -> Medusa:
    """Grow Medusa heads (`heads.medusa`), with their tree."""
    new, width = growth.new, growth.width()
    config = replace(head.config, hidden_size=new.hidden_size, vocab_size=new.vocab_size)
    grown = blank(Medusa(config, head.kept), next(head.parameters()).dtype)
    for (name, ours), theirs in zip(grown.named_parameters(), head.parameters(), strict=True):
        where = (width,) * theirs.dim() if ".linear." in name else (None, width)
        ours.copy_(place(theirs, tuple(ours.shape), *where))
    return grown


def grow_draft(head: Draft, growth: Growth, size: HeadSize) -> Draft:
    """Grow a draft model (`heads.draft_model`): it gets the grown target's widths and keeps its number of layers."""
    model: Any = head.model
    shape = replace(growth.new, num_hidden_layers=model.config.num_hidden_layers)
    grown = grow_llama(model, shape)
    config = replace(head.config, model=model_record(grown), vocab_size=growth.new.vocab_size)
    return Draft(config, grown)


def grow_block(head: DraftBlockHead, growth: Growth, size: HeadSize) -> DraftBlockHead:
    """Grow a DFlash, DFlash2 or DSpark head (`heads.block.draft`)."""
    config, new, width = head.config, growth.new, growth.width()
    grown_config = replace(config, **grown_sizes(config, growth, size))
    grown = blank(type(head)(grown_config), head.fc.weight.dtype)
    grow_parameters(grown, head, block_growth(config, grown_config, growth.eps))
    if growth.wider:  # the constant channel of the embeddings, with which new ids are never chosen
        grown.norm.weight[growth.old.hidden_size] = 1.0
    if isinstance(head, DFlash2) and isinstance(grown, DFlash2):
        grow_selection(grown, head, growth)
    if isinstance(head, DSpark) and isinstance(grown, DSpark):
        for wide, narrow in zip(grown.markov_head.parameters(), head.markov_head.parameters(), strict=True):
            wide[: len(narrow)] = narrow
        if head.confidence_head is not None and grown.confidence_head is not None:
            proj, given = grown.confidence_head.proj, head.confidence_head.proj
            reads = torch.cat([width, new.hidden_size + torch.arange(config.markov_rank)])
            proj.weight.copy_(place(given.weight, tuple(proj.weight.shape), None, reads))
            proj.bias.copy_(given.bias)
    return grown


def grow_selection(grown: DFlash2, head: DFlash2, growth: Growth) -> None:
    """Grow the convolutions and the candidate selector of DFlash2. The weights of new channels, groups and ids are
    zero."""
    width, sides = growth.width(), 2 * head.config.conv_kernel_size
    for large, small in zip(grown.layers, head.layers, strict=True):
        assert isinstance(large, ConvolvedLayer) and isinstance(small, ConvolvedLayer)
        for ours, theirs in zip(large.convolutions, small.convolutions, strict=True):
            ours.base_kernel[..., width] = theirs.base_kernel
            groups = torch.arange(sides)[:, None] * ours.groups + torch.arange(theirs.groups)
            weight = ours.kernel_projection.weight
            weight.copy_(place(theirs.kernel_projection.weight, tuple(weight.shape), groups.flatten(), width))
    wide, narrow = grown.candidate_selector, head.candidate_selector
    for name in ("predecessor_codebook", "successor_codebook"):
        getattr(wide, name)[: head.config.vocab_size] = getattr(narrow, name)
    weight = wide.hidden_projection.weight
    weight.copy_(place(narrow.hidden_projection.weight, tuple(weight.shape), None, width))


GROW: dict[type, Callable[[Any, Growth, HeadSize], nn.Module]] = {
    Eagle3: grow_eagle3,
    Mtp: grow_mtp,
    Medusa: grow_medusa,
    Draft: grow_draft,
    DFlash: grow_block,
    DFlash2: grow_block,
    DSpark: grow_block,
}


def blank(head: Head, dtype: torch.dtype) -> Head:
    """Set all weights of a head to zero, in `dtype`. Return the head."""
    head = head.to(dtype)
    for parameter in head.parameters():
        parameter.zero_()
    return head


def grown_sizes(config: BlockConfig, growth: Growth, size: HeadSize) -> dict[str, Any]:
    """Return the fields of a grown head's config that change: the sizes of its block and of the target. Raise UserError
    if the block would shrink or has another norm eps than the target."""
    if config.rms_norm_eps != growth.eps:
        raise UserError(
            f"head.rms_norm_eps: {config.rms_norm_eps} differs from the target's {growth.eps}; train it with that"
        )
    intermediate = size.intermediate_size or growth.new.intermediate_size
    if intermediate < config.intermediate_size:
        raise UserError(
            f"intermediate_size: a head of {config.intermediate_size} cannot be grown to {intermediate}; ask for more"
        )
    sizes = asdict(growth.new) | {"intermediate_size": intermediate}
    return {
        "num_target_layers": sizes.pop("num_hidden_layers"),
        **sizes,
        "rms_norm_eps": growth.new_eps,
        "rope_theta": config.rope_theta ** (growth.new.head_dim / config.head_dim),  # keeps the rotary frequencies
    }


def block_growth(config: BlockConfig, grown: BlockConfig, eps: float) -> Growth:
    """Return the growth of a head's block, whose sizes may differ from the target's."""
    old, new = (
        ModelShape(x.hidden_size, 1, x.num_attention_heads, x.num_key_value_heads, x.head_dim, x.intermediate_size, 0)
        for x in (config, grown)
    )
    return Growth(old, new, eps)
