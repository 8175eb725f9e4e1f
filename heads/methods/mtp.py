"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules that continue after the target's last
layer.

    u^k_t = M_k [norm(h^{k-1}_t) ; norm(e(x_{t+k}))]    h^0_t: the target's last hidden state, after its final norm
    h^k_t = norm(block_k(u^k_t))                        predicts x_{t+k+1} through the target's own output head

vLLM's classes for DeepSeek, GLM and MiMo read the token at position 0 as zeros; so does this head in their layouts.
MiMo's own modules read h^0 before the target's final norm: its class in vLLM, by MiMo's authors, leaves the norm to the
output head.
Each step has its own module (DeepSeek, num_modules = depth), or all steps share one (FastMTP, arXiv 2509.18362,
num_modules = 1). FastMTP's training lets step k see the step-k keys of all slots; here step k sees the same keys as in
drafting (`heads.methods.state_recycling`). Embeddings and output head are the target's, frozen and not stored. Loss =
sum over k of beta^{k-1} / (sum of them) * KL(p || q_k) / rows, over the draft vocabulary if there is one. These are
FastMTP's weights, with the target's distribution p instead of its token.

Modules in a target's checkpoint, and saved ones, have their tensors under the names of a family:

    mimo      model.mtp_layers.{i}.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}, block next to them
    deepseek  model.layers.{n + i}.{enorm, hnorm, eh_proj, shared_head.norm}, block next to them; n: target layers.
              GLM-4.5 and GLM-4.7-Flash use these, too
    qwen      mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, block in mtp.layers.0; one module

A native block is a decoder layer of the target's own class (`heads.parts.family_layers`). Its experts are in one
tensor or in one each, as in the checkpoint. The model classes of transformers drop these tensors when they load, so
they are read from the target's files.

Letters: D hidden, Vd draft vocabulary.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heads.core.contract import SharedLayers
from heads.core.errors import UserError, first_line
from heads.core.strict_settings import SAVED, Count
from heads.kernels.tree_attention import Attend
from heads.methods.method_settings import MtpSettings
from heads.methods.mtp_names import LAYOUTS, Layout, read_native, to_field
from heads.methods.state_recycling import Recycling
from heads.parts.family_layers import BlockMaker
from heads.parts.head_shape import block_settings, check_one_width
from heads.parts.initial_weights import UNSURE, AttentionProbe, TargetProbe, begin, directions
from heads.parts.layers import Attention, BlockConfig, DecoderLayer, RMSNorm, check_tensors, is_float
from heads.parts.part_settings import BlockSettings, Depth
from heads.parts.rotary import CosSin, rotary_of, rotation_by
from heads.parts.vocab import build_vocab, read_vocab, vocab_tables
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hub import read_tensors, tensor_files

OF_THE_CHECKPOINT = BlockSettings.model_fields.keys() | {"num_modules", "layout"}
"""Settings that native modules determine."""
TOKEN_SHARE = 0.5
"""Weight of the token's embedding in the input of a module that begins by copying; the state has weight 1."""


class MtpConfig(BlockConfig, MtpSettings):
    """Everything that the head's function and its training loss depend on."""

    decoder: dict[str, object] | None = None
    """Native modules: the record that their blocks are made from (`heads.parts.family_layers.block_record`)."""
    draft_vocab_size: Count
    layout: Literal["mimo", "deepseek", "qwen"] = "mimo"
    num_modules: Count = 1
    depth: Depth = 3
    rope_scaling: dict[str, object] | None = None
    """Scaling of rotary positions, the target's, since engines read them from its config. Native modules have their
    decoder's."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.num_modules > self.depth:
            raise ValueError(f"num_modules: expected at most depth ({self.depth}), got {self.num_modules}")
        if self.layout == "qwen" and self.num_modules > 1:
            raise ValueError(f"num_modules: expected 1 with the layout qwen, got {self.num_modules}")
        if self.native != (self.decoder is not None):
            raise ValueError("native: expected together with the record of the modules' decoder")
        return self


class MtpModule(nn.Module):
    """Two norms, the projection of their concatenation, one decoder block and a final norm."""

    def __init__(self, size: int, norm: Callable[[], nn.Module], block: nn.Module, *, hidden_first: bool) -> None:
        super().__init__()
        self.hidden_first = hidden_first
        self.token_layernorm = norm()
        self.hidden_layernorm = norm()
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.final_layernorm = norm()

    def project(self, embedding: Tensor, state: Tensor) -> Tensor:
        halves = [self.token_layernorm(embedding), self.hidden_layernorm(state)]
        return self.input_proj(torch.cat(halves[::-1] if self.hidden_first else halves, dim=-1))  # type: ignore[no-any-return]

    def forward(self, embedding: Tensor, state: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        x = self.project(embedding, state)
        return self.final_layernorm(self.block(x, cos_sin, attend))  # type: ignore[no-any-return]


class Mtp(Recycling):
    """MTP head. It is saved with the target's config, under the tensor names of its layout's family."""

    kept_widths = (9, 3, 2)

    config: MtpConfig

    def __init__(self, config: MtpConfig, draft_to_target: Tensor) -> None:
        """draft_to_target (Vd,) int64: the target ids of the draft vocabulary, ascending."""
        super().__init__()
        self.config = config
        self.num_modules = config.num_modules
        powers = [config.depth_decay**k for k in range(config.depth)]
        self.depth_weights = tuple(power / sum(powers) for power in powers)
        D = config.hidden_size
        hidden_first = self.layout.hidden_first
        self.zero_first = self.layout.zero_first
        self.pre_norm = config.native and self.layout.pre_norm
        self.aux_layer_ids = (config.num_target_layers,) if self.pre_norm else ()
        if config.decoder is None:
            blocks: Iterable[nn.Module] = (
                DecoderLayer(config, Attention(config, D)) for _ in range(config.num_modules)
            )
            norm: Callable[[], nn.Module] = partial(RMSNorm, D, config.rms_norm_eps)
            self.cos_sin = rotary_of(config)
        else:
            maker = BlockMaker(config.decoder)
            blocks = maker.layers
            norm = maker.norm
            self.cos_sin = partial(rotation_by, maker.rotary)
        self.mtp_layers = nn.ModuleList(MtpModule(D, norm, block, hidden_first=hidden_first) for block in blocks)
        self.stored: dict[str, torch.dtype] = {}
        """Dtype of each tensor in the checkpoint that native modules come from. They are saved under the same names and
        dtypes."""
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)

    @classmethod
    def for_target(cls, settings: MtpSettings, target: FrozenTarget, token_counts: Tensor) -> "Mtp":
        check_one_width(target, "mtp")
        weights = None
        chosen = settings.model_dump(exclude_none=True)
        defaults = {
            "draft_vocab_size": target.vocab_size,
            **block_settings(
                target,
                None if settings.native else settings.num_attention_heads,
                head_dim=None if settings.native else settings.head_dim,
            ),
        }
        if settings.native:
            files = tensor_files(target.name)
            native, weights = read_native(target.name, files, partial(read_tensors, files), target)
            defaults |= native
            for name in sorted(OF_THE_CHECKPOINT & chosen.keys()):
                if chosen[name] != defaults[name]:
                    raise UserError(
                        f"head.{name}: the checkpoint's own modules have {defaults[name]}, got {chosen[name]}; "
                        "leave it out, or leave head.native out"
                    )
        config = MtpConfig.from_plain(defaults | chosen)
        try:
            head = cls(config, build_vocab(token_counts, config.draft_vocab_size))
        except (TypeError, AttributeError, LookupError) as error:  # raised by layers of unknown families
            if weights is None:
                raise
            raise UserError(
                f"{target.name}: the decoder layers of {target.config.model_type} cannot be blocks of a head "
                f"({first_line(error)}); leave head.native out"
            ) from error
        if weights is None:
            begin(head, target, token_counts)
        else:
            try:
                head.load_modules(weights)
            except UserError as error:
                raise UserError(f"{target.name}: {error}; the modules of its checkpoint cannot be used") from error
        return head

    @classmethod
    def from_checkpoint(cls, config: dict[str, object], weights: dict[str, Tensor]) -> "Mtp":
        head_config = MtpConfig.from_plain(config, SAVED)
        head = cls(head_config, read_vocab(weights, head_config.draft_vocab_size, head_config.vocab_size))
        tables = vocab_tables(head.draft_to_target, head_config.vocab_size)
        head.load_modules({name: value for name, value in weights.items() if name not in tables})
        return head

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.config.layout]

    def modules_by_field(self) -> dict[str, Tensor]:
        """Return the modules' tensors under the family's names; native modules in the dtypes of the checkpoint."""
        field = to_field(self.state_dict(), self.layout, self.config.num_target_layers, self.stored)
        return {name: value.to(self.stored.get(name, value.dtype)) for name, value in field.items()}

    def to_checkpoint(self) -> dict[str, Tensor]:
        return self.modules_by_field() | vocab_tables(self.draft_to_target, self.config.vocab_size)

    def round_to(self, dtype: torch.dtype) -> None:
        if self.stored:
            self.load_modules(self.modules_by_field())
        else:
            super().round_to(dtype)

    def load_modules(self, weights: dict[str, Tensor]) -> None:
        """Load tensors with the family's names. Raises UserError unless they are exactly the modules' tensors."""
        if self.config.native:
            self.stored = {name: value.dtype for name, value in weights.items() if is_float(value.dtype)}
        check_tensors(self.modules_by_field(), weights)
        parts = to_field(self.state_dict(), self.layout, self.config.num_target_layers, self.stored)  # views
        for name, part in parts.items():
            part.copy_(weights[name])

    @torch.no_grad()
    def initialise(self, probe: TargetProbe) -> None:
        """Start from the target: each module passes the hidden state on at its own scale times `UNSURE`. The target's
        output head reads it, and the next step norms it."""
        D = self.config.hidden_size
        scale = UNSURE * float(probe.norm.square().mean().sqrt()) * probe.logit_scale
        half = slice(0, D) if self.layout.hidden_first else slice(D, 2 * D)
        for module in self.mtp_layers:
            assert isinstance(module, MtpModule)
            module.input_proj.weight[:, half] += torch.eye(D)
            nn.init.constant_(module.final_layernorm.get_parameter("weight"), scale)

    def copying(self, probe: TargetProbe) -> tuple[Attention, AttentionProbe]:
        """Return the first module's attention and its probe: find slots by the token whose state they hold, and write
        the token that they read. The module's input then includes some of the token's embedding."""
        module = self.mtp_layers[0]
        assert isinstance(module, MtpModule) and isinstance(module.block, DecoderLayer)
        D = self.config.hidden_size
        half = slice(D, 2 * D) if module.hidden_first else slice(0, D)
        module.input_proj.weight[:, half] += TOKEN_SHARE * torch.eye(D)
        tokens = module.token_layernorm(probe.embeddings)
        token = tokens[:, :-1].flatten(0, 1)
        following = tokens[:, 1:].flatten(0, 1)
        x = module.project(probe.embeddings[:, 1:], probe.hidden[:, :-1].float())
        inputs = module.block.input_layernorm(x).flatten(0, 1)
        written = directions(probe.lm_head_weight, probe.tokens[:, 1:].flatten())
        return module.block.self_attn, AttentionProbe(inputs, inputs, read=following, before=token, written=written)

    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        """Return h^0 in the dtype that the projection computes in."""
        hidden = aux_hidden_states if self.pre_norm else hidden
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            return hidden.to(torch.get_autocast_dtype(device))
        return hidden.to(self.mtp_layers[0].input_proj.weight.dtype)  # type: ignore[union-attr, arg-type]

    def step(self, module: int, embedding: Tensor, state: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        return self.mtp_layers[module](embedding.to(state.dtype), state, cos_sin, attend)  # type: ignore[no-any-return]

    def lm_head_weight(self, shared: SharedLayers) -> Tensor:
        weight = shared.lm_head_weight
        assert weight is not None
        return weight if len(self.draft_to_target) == len(weight) else weight[self.draft_to_target]
