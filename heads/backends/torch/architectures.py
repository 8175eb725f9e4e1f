"""Architectures with a native decoder, and construction of the decoder from the Hugging Face model."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from heads.backends.torch.attention import GroupedAttention, LatentAttention
from heads.backends.torch.decoder import Layer, NativeDecoder
from heads.backends.torch.feedforward import Experts, GatedMLP, GroupedRouter, Router, SoftmaxRouter
from heads.backends.torch.linear import Norm, Product
from heads.target.families import FIXED_ROTATIONS, OutputHead
from heads.target.frozen import LanguageModel

GROUPED = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "MixtralModel", "Qwen3MoeModel"}
LATENT = {"DeepseekV2Model", "DeepseekV3Model"}

_made: "WeakKeyDictionary[Any, tuple[object, NativeDecoder]]" = WeakKeyDictionary()


def why_not_native(target: LanguageModel) -> str | None:
    """Return the reason why a target has no native decoder, or None."""
    base: Any = target.base
    name = type(base).__name__
    if name not in GROUPED | LATENT:
        return f"{target.config.model_type} has no native decoder"
    rotation = getattr(base.rotary_emb, "rope_type", "default")
    if rotation not in FIXED_ROTATIONS:
        return f"rotary scaling {rotation!r} changes with the length of the text"
    if name in GROUPED and base.rotary_emb.inv_freq.shape[0] * 2 != base.layers[0].self_attn.head_dim:
        return "its rotary positions turn a part of each head only"
    for path, module in target.layers.named_modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"{path} is a {type(module).__name__}"
        if type(module).__module__.startswith("peft."):  # it holds the weight of the layer that it adapts
            return f"{path} has an adapter"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("transformers.")]
        if foreign or hasattr(module, "_hf_hook"):  # transformers' own hooks only observe
            return f"{path} has hooks"
        dtypes = {target.dtype}
        if name in LATENT and path.endswith(".mlp.gate"):
            dtypes.add(torch.float32)  # it routes in float32, and transformers >= 5.24 keeps its weight in float32
        for parameter in module.parameters(recurse=False):
            plain = type(parameter) is nn.Parameter and parameter.device == target.device
            if not plain or parameter.dtype not in dtypes:
                return f"{path} holds its weights in another form or place"
    return None


def native_decoder(target: LanguageModel, *, draft: bool = False) -> NativeDecoder | None:
    """Return the target's native decoder, built once; None if it has none (`why_not_native`). The weights of a `draft`
    are not fused in place (`heads.backends.torch.linear`)."""
    if why_not_native(target) is not None:
        return None
    state = tuple((p.data_ptr(), p._version) for p in target.base.parameters() if not p.is_inference())
    known = _made.get(target)
    if known is None or known[0] != state:  # the weights were trained or moved since: read them again
        with torch.inference_mode(False), torch.no_grad():
            decoder = read_decoder(target, draft=draft)
        state = tuple((p.data_ptr(), p._version) for p in target.base.parameters() if not p.is_inference())
        _made[target] = known = state, decoder
    return known[1]


def read_decoder(target: LanguageModel, *, draft: bool) -> NativeDecoder:
    """Build the native decoder from the weights of a model with a known architecture."""
    base: Any = target.base
    kinds = getattr(target.config, "layer_types", None) or ["sliding_attention"] * target.num_layers
    layers = [_read_layer(layer, kind, target, draft) for layer, kind in zip(base.layers, kinds, strict=True)]
    distribution = OutputHead(target.head, target.config)
    plain = type(target.head) is nn.Linear and (distribution.scale, distribution.soft_cap) == (1, None)
    return NativeDecoder(
        config=target.config,
        embedding=base.embed_tokens.weight.detach(),
        layers=layers,
        norm=Norm(base.norm),
        rotary=base.rotary_emb,
        output=Product.of(target.head, draft=draft) if plain else None,
    )


def _read_layer(layer: Any, kind: str, target: LanguageModel, draft: bool) -> Layer:
    name = type(target.base).__name__
    attention: GroupedAttention | LatentAttention
    if name in LATENT:
        interleaved = name == "DeepseekV2Model" or bool(target.config.rope_interleave)
        attention = LatentAttention(layer.self_attn, kind, interleaved=interleaved)
    else:
        attention = GroupedAttention(layer.self_attn, kind, draft=draft)
    return Layer(
        attention_norm=Norm(layer.input_layernorm),
        attention=attention,
        feedforward_norm=Norm(layer.post_attention_layernorm),
        feedforward=Experts(layer.mlp, _read_router(layer.mlp.gate, target))
        if hasattr(layer.mlp, "experts")
        else GatedMLP(layer.mlp, draft=draft),
    )


def _read_router(gate: Any, target: LanguageModel) -> Router:
    name = type(target.base).__name__
    if name in LATENT:
        return GroupedRouter(gate, target.config)
    return SoftmaxRouter(gate, target.config, renormalise=name == "MixtralModel" or target.config.norm_topk_prob)
