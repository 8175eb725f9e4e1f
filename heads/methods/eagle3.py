"""EAGLE-3 (Li et al., arXiv 2503.01840): one decoder layer that drafts from fused features of the target's layers.

    g_t = fc [l_t ; m_t ; u_t]                                 fused auxiliary states of slot t: low, middle, upper
    a_t = layer([norm(e(x_{t+1})) ; norm(g_t)], residual g_t)  predicts x_{t+2} through norm and the draft's own lm_head
    step i: the layer reads e(x_{t+1+i}) and its own last output a_t instead of g_t, and predicts x_{t+2+i}

Training-time test: training runs all K steps, with gradients through all of them. At step i slot t attends to the
step-0 keys of the slots up to t and to its own keys of steps 1..i, as it does in drafting. Its rotary position is t +
i. Loss = sum over i of depth_decay^i * KL(p || q_i) / rows, where p is the target's distribution over the draft
vocabulary.

A head may be narrower or wider than its target. Then its embeddings are its own: the target's, along their principal
axes. It may have further decoder layers, which read no embeddings.

Letters: B batch, T tokens, D width of the head, Dt width of the target, Vd draft vocabulary, L auxiliary layers, K
depth.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heads.core.contract import SharedLayers
from heads.core.strict_settings import SAVED, Count
from heads.kernels.tree_attention import Attend
from heads.methods.method_settings import Eagle3Settings
from heads.methods.state_recycling import Recycling
from heads.parts.head_shape import block_settings, check_aux_layer_ids, check_one_width, default_aux_layer_ids
from heads.parts.initial_weights import (
    UNSURE,
    AttentionProbe,
    TargetProbe,
    begin,
    directions,
    principal_axes,
    probe_target,
    resized,
)
from heads.parts.layers import (
    MLP,
    Attention,
    BlockConfig,
    DecoderLayer,
    NormedAttention,
    RMSNorm,
    check_tensors,
)
from heads.parts.part_settings import LayerIds
from heads.parts.rotary import CosSin, rotary_of
from heads.parts.vocab import build_vocab, read_vocab, vocab_tables
from heads.targets.frozen_target import FrozenTarget


class Eagle3Config(BlockConfig, Eagle3Settings):
    """Everything that the head's function and its training loss depend on."""

    hidden_size: Count
    aux_layer_ids: LayerIds
    draft_vocab_size: Count
    target_hidden_size: Count | None = None
    """Width of the target's hidden states. None: `hidden_size`."""
    qk_norm: bool = False
    """Published heads: attention norms each head of queries and keys, as in Qwen3."""
    norm_before_residual: bool = False
    """Published heads: the residual of the layer is the normed state."""
    norm_before_fc: bool = False
    """Published heads: one RMSNorm over all auxiliary hidden states before they are fused, instead of `fc_norm`."""
    own_embeddings: bool = False
    """The head has an embedding table that differs from the target's. It is used, and not trained."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm, norm_before_fc: expected at most one of them")
        if self.sliding_window is not None and self.sliding_window <= self.depth:
            raise ValueError(f"sliding_window: expected more than depth ({self.depth}), got {self.sliding_window}")
        return self


class Eagle3Layer(nn.Module):
    """Decoder layer whose attention reads [normed embedding ; normed state]. The residual is the unnormed state."""

    def __init__(self, config: Eagle3Config, attention: Attention) -> None:
        super().__init__()
        D = config.hidden_size
        eps = config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(D, eps)
        self.hidden_norm = RMSNorm(D, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = MLP(D, config.intermediate_size)

    def forward(self, embedding: Tensor, state: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        normed = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embedding), normed], dim=-1)  # (B, T, 2D)
        residual = (normed if self.norm_before_residual else state) + self.self_attn(x, cos_sin, attend)
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]


class Eagle3(Recycling):
    """EAGLE-3 head. SGLang, vLLM and the EAGLE repository use the same tensor names."""

    kept_widths = (6, 3, 2)
    tables = ("lm_head.weight",)

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, draft_to_target: Tensor) -> None:
        """draft_to_target (Vd,) int64: the target ids of the draft vocabulary, ascending."""
        super().__init__()
        D = config.hidden_size
        L = len(config.aux_layer_ids)
        Dt = config.target_hidden_size or D
        self.config = config
        self.aux_layer_ids = config.aux_layer_ids
        self.sliding_window = config.sliding_window
        self.depth_weights = tuple(config.depth_decay**k for k in range(config.depth))
        self.fc = nn.Linear(L * Dt, D, bias=False)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(Dt, config.rms_norm_eps) for _ in config.aux_layer_ids) if config.fc_norm else None
        )
        self.input_norm = RMSNorm(L * Dt, config.rms_norm_eps) if config.norm_before_fc else None
        attention = NormedAttention if config.qk_norm else Attention
        self.midlayer = Eagle3Layer(config, attention(config, 2 * D))
        self.layers_per_module = config.num_layers
        self.layers = nn.ModuleDict(  # under the names in a file, where they follow the first one's
            {str(i): DecoderLayer(config, attention(config, D)) for i in range(1, config.num_layers)}
        )
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.lm_head = nn.Linear(D, config.draft_vocab_size, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, D).requires_grad_(False)
        self.cos_sin = rotary_of(config)
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)

    @classmethod
    def for_target(cls, settings: Eagle3Settings, target: FrozenTarget, token_counts: Tensor) -> "Eagle3":
        check_one_width(target, "eagle3")
        aux_layer_ids = (
            default_aux_layer_ids(target.num_layers)
            if settings.aux_layer_ids is None
            else check_aux_layer_ids(settings.aux_layer_ids, target.num_layers)
        )
        defaults = {
            "draft_vocab_size": min(32_000, target.vocab_size),
            **block_settings(target, settings.num_attention_heads, settings.rope_scaling, settings.head_dim),
        }
        if settings.hidden_size not in (None, target.hidden_size):
            defaults |= {"target_hidden_size": target.hidden_size, "own_embeddings": True}
        own = settings.model_dump(exclude_none=True) | {"aux_layer_ids": aux_layer_ids}
        config = Eagle3Config.from_plain(defaults | own)
        head = cls(config, build_vocab(token_counts, config.draft_vocab_size))
        if head.embed_tokens is not None and token_counts.any():
            ids = torch.arange(target.vocab_size, device=target.device)
            table = target.shared.embed_tokens(ids).detach().float()
            head.embed_tokens.weight.copy_(table @ resized(principal_axes(table, table.shape[1]), config.hidden_size))
        begin(head, target, token_counts)
        return head

    @classmethod
    def from_checkpoint(cls, config: dict[str, object], weights: dict[str, Tensor]) -> "Eagle3":
        head_config = Eagle3Config.from_plain(config, SAVED)
        head = cls(head_config, read_vocab(weights, head_config.draft_vocab_size, head_config.vocab_size))
        check_tensors(head.to_checkpoint(), weights)
        head.load_state_dict({name: weights[name] for name in head.state_dict()})
        return head

    @torch.no_grad()
    def without(self, left_out: Sequence[str], target: FrozenTarget, token_counts: Tensor) -> "Eagle3":
        """Return the head without some of `fc_norm` and `norm_output`, which not all readers know. `fc` takes over the
        weights of `fc_norm`, and the sizes of the states that it normed."""
        weights = self.to_checkpoint()
        if "fc_norm" in left_out and self.fc_norm is not None:
            norms = torch.cat([weights.pop(f"fc_norm.{i}.weight") for i in range(len(self.aux_layer_ids))])
            weights["fc.weight"] = weights["fc.weight"] * norms
            if token_counts.any():
                scales = probe_target(target, self.aux_layer_ids, token_counts, closely=False).scales
                weights["fc.weight"] /= scales.repeat_interleave(len(norms) // len(scales))
        return self.from_checkpoint(self.config.model_dump(mode="json") | dict.fromkeys(left_out, False), weights)

    def to_checkpoint(self) -> dict[str, Tensor]:
        norms = {  # vLLM reads the norm before a further layer under the one name, SGLang under the other
            f"layers.{i}.hidden_norm.weight": layer.get_submodule("input_layernorm").get_parameter("weight")
            for i, layer in self.layers.items()
        }
        return self.state_dict() | norms | vocab_tables(self.draft_to_target, self.config.vocab_size)

    @torch.no_grad()
    def initialise(self, probe: TargetProbe) -> None:
        """Start from the target, at unit size. The projection passes on the target's highest auxiliary layer divided by
        its scale; the final norm, but for `UNSURE`, and the output head are the target's own, in a head of another
        width along the axes of `TargetProbe.axes`."""
        D = self.config.hidden_size
        Dt = probe.hidden.shape[-1]
        aux_scales = probe.scales
        lm_head = probe.lm_head_weight[self.draft_to_target.to(probe.lm_head_weight.device)]
        if self.fc_norm is None:
            self.fc.weight /= aux_scales.to(self.fc.weight).repeat_interleave(Dt)
        else:
            aux_scales = torch.ones_like(aux_scales)
        if Dt == D:
            self.fc.weight[:, -Dt:] += torch.eye(D) / aux_scales[-1]
            self.norm.weight.copy_(probe.norm)
            self.lm_head.weight.copy_(lm_head)
        else:
            axes = resized(probe.axes, D)
            self.fc.weight[:, -Dt:] += axes.T / aux_scales[-1]
            normed = lm_head.cpu().float() * probe.norm
            self.lm_head.weight.copy_(normed @ axes * (Dt / D) ** 0.5)  # a norm of D channels in place of Dt
        self.norm.weight.mul_(UNSURE)
        self.lm_head.weight.mul_(probe.logit_scale)

    def copying(self, probe: TargetProbe) -> tuple[Attention, AttentionProbe]:
        """Return the attention and its probe: find slots by the token whose features they hold, and write the token
        that they read."""
        layer = self.midlayer
        D = self.config.hidden_size
        embeddings = probe.embeddings if self.embed_tokens is None else self.embed_tokens(probe.tokens)
        tokens = layer.input_layernorm(embeddings)
        token = tokens[:, :-1].flatten(0, 1)
        following = tokens[:, 1:].flatten(0, 1)
        state = layer.hidden_norm(self.fuse(probe.aux_hidden_states[:, :-1]).flatten(0, 1))
        inputs = torch.cat([following, state], dim=-1)
        written = directions(probe.lm_head_weight, probe.tokens[:, 1:].flatten())
        if written.shape[1] != D:
            written = written @ resized(probe.axes, D)
        return layer.self_attn, AttentionProbe(inputs, inputs, read=following, before=token, written=written)

    def shared_layers(self, shared: SharedLayers) -> SharedLayers:
        return shared if self.embed_tokens is None else replace(shared, embed_tokens=self.embed_tokens)

    @property
    def aux_norms(self) -> list[RMSNorm]:
        """Norms of the auxiliary hidden states before they are fused: one per state, one for all states, or none."""
        norms = [self.input_norm] if self.fc_norm is None else self.fc_norm
        return [norm for norm in norms if isinstance(norm, RMSNorm)]

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Fuse the auxiliary hidden states: (..., L * Dt) -> (..., D)."""
        aux_hidden_states = aux_hidden_states.to(self.fc.weight.dtype)
        if norms := self.aux_norms:
            parts = aux_hidden_states.chunk(len(norms), dim=-1)
            aux_hidden_states = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
        return self.fc(aux_hidden_states)  # type: ignore[no-any-return]

    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        return self.fuse(aux_hidden_states)

    def step(self, module: int, embedding: Tensor, state: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        state = self.midlayer(embedding.to(state.dtype), state, cos_sin, attend)
        for layer in self.layers.values():
            state = layer(state, cos_sin, attend)
        return self.norm(state) if self.config.norm_output else state

    def normed(self, recycled: Tensor) -> Tensor:
        return recycled if self.config.norm_output else self.norm(recycled)

    def lm_head_weight(self, shared: SharedLayers) -> Tensor:
        return self.lm_head.weight

    @property
    def outputs(self) -> list[nn.Linear]:
        return [self.lm_head]

    @property
    def starting(self) -> list[nn.Module]:
        return [self.fc, *self.aux_norms]
