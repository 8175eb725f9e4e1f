"""Growth of a small model into the shape of a big one: the same function at the big model's cost.

Width and depth are filled with zeros. So the real acceptance of a head on a small real target can be measured at the
real cost of any model. A Llama-family target (grouped-query attention, RMS norms, rotary positions, gated MLP) grows as
follows:

    width     new channels are zero, and so are the weights that read or write them; RMS norms divide by the mean of
              more channels, which a factor sqrt(D / D') in their weights compensates
    layers    new layers add zero: their output and down projections are zero
    heads     the output of new query heads is not read; a key head keeps its query heads
    head_dim  rotary pairs keep their frequencies with theta' = theta^(d' / d); a factor sqrt(d' / d) in the query
              projection compensates the different scale of the scores
    vocab     new ids get logits far below all others, from one new channel with a constant value; its square replaces
              half of what the norms' eps adds to the mean, so the function is exactly the same

Letters: D width, L layers, H query heads, Hkv key heads, d head dimension, I intermediate width, V vocabulary; with a
prime: those of the grown model.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from heads.errors import UserError
from heads.target.families import rope_theta
from scripts.grown.shapes import ModelShape

NEVER = -1e7
"""Weight of the constant channel in the logit of an id that must never be chosen."""


def shape_of(config: Any) -> ModelShape:
    """Return the shape of a Llama-family config."""
    found: dict[str, Any] = {field.name: getattr(config, field.name, None) for field in fields(ModelShape)}
    found["head_dim"] = found["head_dim"] or config.hidden_size // config.num_attention_heads
    found["num_key_value_heads"] = found["num_key_value_heads"] or config.num_attention_heads
    return ModelShape(**found)


@dataclass(frozen=True)
class Growth:
    """Placement of a small shape in a large one, with the norms' eps of the small model."""

    old: ModelShape
    new: ModelShape
    eps: float

    def __post_init__(self) -> None:
        old, new = self.old, self.new
        for field in fields(ModelShape):
            small, large = getattr(old, field.name), getattr(new, field.name)
            if large < small:
                raise UserError(f"{field.name}: a model of {small} cannot be grown to {large}; ask for as much or more")
        if new.num_attention_heads % new.num_key_value_heads or new.head_dim % 2:
            raise UserError(
                f"{new.num_attention_heads} heads of {new.head_dim} must be whole groups of {new.num_key_value_heads} "
                "key heads, and of an even width"
            )
        if self.group(new) < self.group(old):
            raise UserError(
                f"num_key_value_heads: {self.group(old)} query heads share a key head; "
                f"{new.num_attention_heads} / {new.num_key_value_heads} leaves room for {self.group(new)}"
            )
        if new.hidden_size == old.hidden_size and new.vocab_size > old.vocab_size:
            raise UserError("vocab_size: more ids need a wider model, by one channel at least; raise hidden_size")

    @staticmethod
    def group(shape: ModelShape) -> int:
        """Return the number of query heads that share a key head."""
        return shape.num_attention_heads // shape.num_key_value_heads

    @property
    def norm_scale(self) -> float:
        return math.sqrt(self.old.hidden_size / self.new.hidden_size)

    @property
    def wider(self) -> bool:
        return self.new.hidden_size > self.old.hidden_size

    @property
    def new_eps(self) -> float:
        """The eps of the grown norms. In a wider model it is half of the old contribution to a sum of squares, and the
        constant channel is the other half."""
        return self.eps * self.old.hidden_size / self.new.hidden_size / (2 if self.wider else 1)

    @property
    def constant(self) -> float:
        """Value of channel D in every residual stream."""
        return math.sqrt(self.eps * self.old.hidden_size / 2)

    # The indices of the old model's channels in the new one; each (old size,) int64.

    def width(self, *, parts: int = 1) -> Tensor:
        """Return the new indices of `parts` concatenated residual streams."""
        D, wide = self.old.hidden_size, self.new.hidden_size
        return torch.cat([torch.arange(D) + part * wide for part in range(parts)])

    def head(self) -> Tensor:
        """Return the new indices of one head: rotary pairs (i, i + d / 2) stay pairs."""
        half = torch.arange(self.old.head_dim // 2)
        return torch.cat([half, half + self.new.head_dim // 2])

    def queries(self) -> Tensor:
        """Return the new indices of all query heads. Query heads of a key head stay together."""
        old, new = self.group(self.old), self.group(self.new)
        # The new index of each old query head.
        places = [kv * new + query for kv in range(self.old.num_key_value_heads) for query in range(old)]
        return torch.cat([self.head() + place * self.new.head_dim for place in places])

    def keys(self) -> Tensor:
        """Return the new indices of all key heads."""
        return torch.cat([self.head() + kv * self.new.head_dim for kv in range(self.old.num_key_value_heads)])


def place(small: Tensor, shape: tuple[int, ...], *where: Tensor | None) -> Tensor:
    """Return a tensor of `shape` that contains `small` and is zero elsewhere. Index i of an axis moves to
    where[axis][i]; where[axis] None keeps the indices."""
    large = small.new_zeros(shape)
    spots = [torch.arange(size) if spot is None else spot for size, spot in zip(small.shape, where, strict=True)]
    large[torch.meshgrid(*spots, indexing="ij")] = small
    return large


def grow_parameters(grown: nn.Module, small: nn.Module, growth: Growth) -> None:
    """Copy the embeddings, the projections and norms of decoder blocks, and the projections of concatenated streams
    into `grown`. They are found by their names. Other parameters do not change."""
    width, queries, keys, head = growth.width(), growth.queries(), growth.keys(), growth.head()
    stretch = math.sqrt(growth.new.head_dim / growth.old.head_dim)

    def streams(weight: Tensor) -> Tensor:
        return growth.width(parts=weight.shape[1] // growth.old.hidden_size)

    for name, weight in small.named_parameters():
        module, scale = name.removesuffix(".weight"), 1.0
        where: tuple[Tensor | None, ...]
        if module.endswith("self_attn.q_proj"):
            scale, where = stretch, (queries, streams(weight))
        elif module.endswith(("self_attn.k_proj", "self_attn.v_proj")):
            where = keys, streams(weight)
        elif module.endswith("self_attn.o_proj"):
            where = width, queries
        elif module.endswith(("mlp.gate_proj", "mlp.up_proj", "embed_tokens")):
            where = None, width
        elif module.endswith("mlp.down_proj"):
            where = width, None
        elif module.endswith(("fc", "input_proj")):
            where = width, streams(weight)
        elif module.endswith("q_norm"):
            where = (head,)
        elif module.endswith("k_norm"):  # compensates the wider mean; in q_norm the scale of the scores cancels it
            scale, where = 1 / stretch, (head,)
        elif "norm" in module:
            scale, where = growth.norm_scale, (width,)
        else:
            continue
        ours = grown.get_parameter(name)
        ours.copy_(place(weight * scale, tuple(ours.shape), *where))


def grow_output(growth: Growth, weight: Tensor, size: int) -> Tensor:
    """Return the output head (size, D') grown from `weight` (V, D). New ids can never be chosen."""
    grown = place(weight, (size, growth.new.hidden_size), None, growth.width())
    grown[len(weight) :, growth.old.hidden_size :][:, :1] = NEVER
    return grown


@torch.no_grad()
def grow_llama(model: Any, shape: ModelShape) -> LlamaForCausalLM:
    """Return a model with the same function in another shape, in the model's dtype and on its device. Raise UserError
    if the model is not a plain Llama."""
    config = model.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise UserError(f"expected a Llama without biases, got a {config.model_type}")
    if (config.rope_parameters or {}).get("rope_type", "default") != "default":
        raise UserError("expected plain rotary positions; scaled ones do not keep their frequencies in wider heads")
    growth = Growth(shape_of(config), shape, config.rms_norm_eps)
    grown_config = LlamaConfig(
        **{field.name: getattr(shape, field.name) for field in fields(ModelShape)},
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=growth.new_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rope_theta(config) ** (shape.head_dim / growth.old.head_dim),
        },
        tie_word_embeddings=False,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        dtype=model.dtype,
    )
    with torch.device("meta"):
        empty: Any = LlamaForCausalLM(grown_config)
    grown: LlamaForCausalLM = empty.to(model.dtype).to_empty(device=model.device)
    for parameter in grown.parameters():
        parameter.zero_()
    grow_parameters(grown.model, model.model, growth)
    grown.lm_head.weight.copy_(grow_output(growth, model.lm_head.weight, shape.vocab_size))
    if growth.wider:
        D = growth.old.hidden_size
        grown.model.embed_tokens.weight[:, D] = growth.constant
        grown.model.norm.weight[D] = 1.0
    # The rotary frequencies are not parameters, so they are computed again.
    grown.model.rotary_emb = type(grown.model.rotary_emb)(config=grown_config).to(model.device)
    return grown.eval()  # type: ignore[no-any-return]
