"""The native decoder: a Llama-shaped target's layers as a few tensor functions, with fused weights and a static cache.

    x = x + out(attention(qkv(norm(x))))
    x = x + down(act(gate(norm(x))) * up(norm(x)))         or a mixture of such experts

It decodes as the Hugging Face model does, up to rounding. Every shape is static and nothing waits for the host, so that
a CUDA graph can capture a pass. `why_not_native` says which models it reads.

Letters: B rows of the batch, N tokens of a pass, R = B * N, D hidden, V vocabulary, H query heads, Hkv key heads, d
head width, S slots per row, E visible slots, W = 2 * Hkv * d, L auxiliary layers, I intermediate width, X experts, A
experts active per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.activations import ACT2FN

from heads.kernels.product import Norm, Product, unit
from heads.kernels.slots import SlotMapping, VisibleSlots
from heads.kernels.tree_attention import for_groups, masked_attention, tree_attention
from heads.kernels.triton_support import runs_kernels
from heads.targets.cache import Forms, KVCache
from heads.targets.cached_decoder import CachedDecoder, CacheSpec
from heads.targets.families import FIXED_ROTATIONS, OutputHead
from heads.targets.frozen_target import Features, LanguageModel
from heads.targets.masks import additive

CLASSES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "MixtralModel", "Qwen3MoeModel"}
STATIC_ROWS = 64
"""Maximum number of rows for which a GPU copies the experts' weights per token. With more rows, the host waits for the
routing."""
SLIDING = "sliding_attention"


class NativeDecoder(CachedDecoder):
    """The native layers of a model with the cache of one batch."""

    def __init__(self, model: LanguageModel, spec: CacheSpec) -> None:
        super().__init__(model, spec)
        self.stack = stack = native_stack(model, draft=spec.draft)
        self.window: int | None = getattr(model.config, "sliding_window", None)
        self.group_sizes = {layer.attention.kind: layer.attention.group_size for layer in stack.layers}
        self.cache = KVCache(
            num_layers=len(stack.layers),
            batch_size=spec.batch_size,
            capacity=spec.capacity,
            forms=stack.layers[0].attention.forms,
            dtype=model.dtype,
            device=model.device,
        )
        self.cos_sin_table = stack.cos_sin_table(spec.capacity + spec.depth)
        self.reads_masks = not runs_kernels(stack.embedding)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        (B, N), stack, ids = tokens.shape, self.stack, self.spec.aux_layer_ids
        self.cache.set_slots(mapping.slots, extent=extent, row=row)
        place = mapping.positions.flatten()
        step = Step(
            cache=self.cache,
            batch_size=B,
            cos_sin=tuple(table.index_select(0, place) for table in self.cos_sin_table),
            masks=self.masks(mapping, extent) if self.reads_masks else {},
            visible_slots=None if self.reads_masks else mapping.visible_slots(),
            window=self.window,
        )
        x, streams = stack.embedding.index_select(0, tokens.flatten()), []  # (R, D)
        for i, layer in enumerate(stack.layers):
            streams.append(x)
            x = layer.attention(x, layer.attention_norm, step, i)
            x = layer.feedforward(x, layer.feedforward_norm)
        aux = torch.cat([[*streams, x][k] for k in ids], dim=-1) if ids else x[:, :0]
        return Features(aux.view(B, N, -1), stack.norm(x).view(B, N, -1))

    def masks(self, mapping: SlotMapping, extent: int) -> dict[str, Tensor]:
        """Return the masks to add to scores, as `masked_attention` takes them, by layer kind."""
        visible = mapping.visible(0, extent)
        masks = {}
        for kind, group_size in self.group_sizes.items():
            seen = visible
            if kind == SLIDING and self.window is not None:
                distance = mapping.positions[:, :, None] - mapping.key_positions(extent)[:, None]
                seen = visible & (distance < self.window)
            masks[kind] = for_groups(additive(seen, self.stack.embedding.dtype)[:, 0], group_size)
        return masks

    def logits(self, hidden: Tensor) -> Tensor:
        if self.in_tiles or self.stack.output is None:
            return super().logits(hidden)
        logits: Tensor = self.stack.output(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))[..., : self.spec.vocab_size]


@dataclass
class Step:
    """Arguments that all layers of one pass share."""

    cache: KVCache
    batch_size: int
    cos_sin: tuple[Tensor, ...]  # (R, 1, d) each: cosines, and sines with the first half negative
    masks: dict[str, Tensor]
    """Masks by layer kind, as `masked_attention` takes them; empty with `visible_slots`."""
    visible_slots: VisibleSlots | None
    """Slots that each token sees, for the kernel; None with masks."""
    window: int | None


class Attention:
    """Grouped-query attention with rotary embeddings."""

    def __init__(self, module: Any, kind: str, *, draft: bool = False) -> None:
        self.kind = kind
        self.d: int = module.head_dim
        self.scale = float(getattr(module, "scaling", self.d**-0.5))
        self.num_heads: int = module.q_proj.out_features // self.d
        self.num_key_heads: int = module.k_proj.out_features // self.d
        self.group_size = self.num_heads // self.num_key_heads
        self.qkv = Product.of(module.q_proj, module.k_proj, module.v_proj, draft=draft)
        self.out = Product.of(module.o_proj, draft=draft)
        self.head_norm: Tensor | None = None  # (H + Hkv, d)
        self.head_eps = 0.0
        if hasattr(module, "q_norm"):
            norms = Norm.of(module.q_norm), Norm.of(module.k_norm)
            self.head_norm = torch.cat(
                [norms[0].weight.expand(self.num_heads, -1), norms[1].weight.expand(self.num_key_heads, -1)]
            )
            self.head_eps = norms[0].eps

    @property
    def forms(self) -> Forms:
        return (self.num_key_heads, self.d), (self.num_key_heads, self.d)

    def __call__(self, x: Tensor, norm: Norm, step: Step, layer: int) -> Tensor:
        """Return the residual stream (R, D) after attention, from the residual stream x (R, D)."""
        H = self.num_heads
        Hkv = self.num_key_heads
        d = self.d
        fused = self.qkv(x, norm=norm)  # (R, (H + 2 Hkv) d)
        heads = fused.view(-1, H + 2 * Hkv, d)
        rotated = heads[:, : H + Hkv]
        if self.head_norm is not None:
            torch.mul(unit(rotated, self.head_eps), self.head_norm, out=rotated)
        swapped = rotated.roll(d // 2, -1)  # each half of a head is rotated with the other
        rotated.mul_(step.cos_sin[0]).addcmul_(swapped, step.cos_sin[1])
        keys, values = step.cache.write(layer, fused[:, H * d :])
        queries = heads[:, :H].unflatten(0, (step.batch_size, -1))  # (B, N, H, d)
        if step.visible_slots is None:
            out = masked_attention(queries, keys, values, step.masks[self.kind], scale=self.scale)
        else:
            window = step.window if self.kind == SLIDING else None
            out = tree_attention(queries, keys, values, step.visible_slots, scale=self.scale, window=window)
        return self.out(out.view(len(x), -1), x)


Activation = Callable[[Tensor], Tensor]


def activation(module: object) -> Activation:
    """Return the module's activation; torch's fused one for SiLU, which is the default."""
    function = getattr(module, "act_fn", silu)
    return silu if isinstance(function, (nn.SiLU, type(ACT2FN["silu"]))) else function


class GatedMLP:
    """down(act(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, module: Any, *, draft: bool = False) -> None:
        self.gate_up = Product.of(module.gate_proj, module.up_proj, draft=draft)
        self.down = Product.of(module.down_proj, draft=draft)
        self.activation = activation(module)

    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the residual stream (R, D) after the MLP, from the residual stream x (R, D)."""
        gate, up = self.gate_up(x, norm=norm).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up), x)


class Experts:
    """A mixture of experts as in Mixtral and Qwen: the A likeliest, by a softmax in float32."""

    def __init__(self, module: Any, config: Any, *, renormalise: bool) -> None:
        self.router: Tensor = module.gate.weight.detach()  # (X, D)
        self.A = int(config.num_experts_per_tok)
        self.renormalise = renormalise
        self.gate_up: Tensor = module.experts.gate_up_proj.detach()  # (X, 2 I, D)
        self.down: Tensor = module.experts.down_proj.detach()  # (X, D, I)
        self.activation = activation(module.experts)

    def __call__(self, residual: Tensor, norm: Norm) -> Tensor:
        """Return the residual stream (R, D) after the experts, from the residual stream (R, D). Each token's experts
        are summed in the order of its own list, whatever the other tokens are."""
        x = norm(residual)
        weights, ids = linear(x, self.router).float().softmax(-1).topk(self.A, dim=-1)  # (R, A)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        each = self.gate_up[0].nbytes + self.down[0].nbytes
        Product.bytes_read += each * min(len(self.gate_up), ids.numel())
        static = x.device.type != "cpu" and len(x) <= STATIC_ROWS
        out = self.gathered(x, ids) if static else self.by_expert(x, ids)
        return torch.bmm(weights.to(x.dtype)[:, None], out)[:, 0].add_(residual)

    def gathered(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return (R, A, D) from one product per row and expert, each with a copy of the expert's weights. Shapes are
        static, and nothing waits for the host."""
        R, A = ids.shape
        visits = x.repeat_interleave(A, dim=0)[..., None]  # (R * A, D, 1)
        gate, up = torch.bmm(self.gate_up[ids.flatten()], visits)[..., 0].chunk(2, dim=-1)
        return torch.bmm(self.down[ids.flatten()], self.activation(gate).mul_(up)[..., None]).view(R, A, -1)

    def by_expert(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return (R, A, D) from one product per expert, over the rows that chose it."""
        out = x.new_empty(*ids.shape, x.shape[1])
        for expert in ids.unique().tolist():
            row, place = torch.where(ids == expert)
            gate, up = linear(x[row], self.gate_up[expert]).chunk(2, dim=-1)
            out[row, place] = linear(self.activation(gate).mul_(up), self.down[expert])
        return out


@dataclass(frozen=True)
class Layer:
    """x + attention(norm(x)), then x + feedforward(norm(x))."""

    attention_norm: Norm
    attention: Attention
    feedforward_norm: Norm
    feedforward: GatedMLP | Experts


@dataclass(frozen=True, eq=False)
class Stack:
    """A model's layers, embeddings and output head, read once for all engines."""

    embedding: Tensor  # (V, D)
    layers: list[Layer]
    norm: Norm
    rotary: nn.Module
    """The model's own rotary embedding module, with any scaling that it has."""
    output: Product | None
    """The output head if it is a plain product, else None."""

    def cos_sin_table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return (num_positions, 1, d) twice, for positions from 0: cosines, and sines with the first half negated."""
        positions = torch.arange(num_positions, device=self.embedding.device)[None]
        cos, sin = (
            table[0].chunk(2, -1)[0].to(self.embedding.dtype) for table in self.rotary(self.embedding[:1], positions)
        )
        return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


_stacks: "WeakKeyDictionary[LanguageModel, tuple[object, Stack]]" = WeakKeyDictionary()


def why_not_native(model: LanguageModel) -> str | None:
    """Return the reason why a model has no native decoder, or None."""
    base: Any = model.base
    if type(base).__name__ not in CLASSES or not _is_of_transformers(base):
        return f"{model.config.model_type} has no native decoder"
    rotation = getattr(base.rotary_emb, "rope_type", "default")
    if rotation not in FIXED_ROTATIONS:
        return f"rotary scaling {rotation!r} changes with the length of the text"
    if base.rotary_emb.inv_freq.shape[0] * 2 != base.layers[0].self_attn.head_dim:
        return "its rotary positions turn a part of each head only"
    for path, module in model.layers.named_modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"{path} is a {type(module).__name__}"
        if not _is_of_transformers(module):
            return f"{path} is a {type(module).__name__} of other code"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("transformers.")]
        if foreign or hasattr(module, "_hf_hook"):  # transformers' own hooks only observe
            return f"{path} has hooks"
        for parameter in module.parameters(recurse=False):
            plain = type(parameter) is nn.Parameter and parameter.device == model.device
            if not plain or parameter.dtype != model.dtype:
                return f"{path} holds its weights in another form or place"
    return None


def _is_of_transformers(module: nn.Module) -> bool:
    """Return False for classes of other code, which may compute something else under a name of transformers."""
    return type(module).__module__.startswith(("transformers.", "torch."))


def native_stack(model: LanguageModel, *, draft: bool = False) -> Stack:
    """Return a model's native layers, read anew if its weights were trained or moved since the last time."""

    def state() -> object:
        return tuple((p.data_ptr(), p._version) for p in model.base.parameters() if not p.is_inference())

    cached = _stacks.get(model)
    if cached is None or cached[0] != state():
        with torch.inference_mode(False), torch.no_grad():
            stack = _read_stack(model, draft=draft)
        _stacks[model] = cached = state(), stack
    return cached[1]


def _read_stack(model: LanguageModel, *, draft: bool) -> Stack:
    base = model.base
    config = model.config
    kinds = getattr(config, "layer_types", None) or [SLIDING] * model.num_layers

    def feedforward(mlp: object) -> GatedMLP | Experts:
        if not hasattr(mlp, "experts"):
            return GatedMLP(mlp, draft=draft)
        return Experts(mlp, config, renormalise=type(base).__name__ == "MixtralModel" or config.norm_topk_prob)

    parts: Any = base
    layers = [
        Layer(
            attention_norm=Norm.of(layer.input_layernorm),
            attention=Attention(layer.self_attn, kind, draft=draft),
            feedforward_norm=Norm.of(layer.post_attention_layernorm),
            feedforward=feedforward(layer.mlp),
        )
        for layer, kind in zip(parts.layers, kinds, strict=False)  # an early exit keeps the first layers alone
    ]
    distribution = OutputHead(model.head, config)
    plain = type(model.head) is nn.Linear and (distribution.scale, distribution.soft_cap) == (1, None)
    return Stack(
        embedding=parts.embed_tokens.weight.detach(),
        layers=layers,
        norm=Norm.of(parts.norm),
        rotary=parts.rotary_emb,
        output=Product.of(model.head, draft=draft) if plain else None,
    )
