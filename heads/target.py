"""The frozen target: tapped residual streams, last hidden state, embedding and output head of any Hugging Face causal LM.

A tap h_k is the residual stream that ENTERS decoder layer k (h_0 the embeddings, h_n the last layer's output before the final
norm). Hooks read the tapped layers only. Attention masks are built here from what each query may see, because every family wants
its own form: additive and in the model's dtype, a sliding window worked out from positions.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from heads.base import TargetEnds
from heads.errors import UserError

FINGERPRINT_SAMPLES = 512
"""Weights read of each parameter: enough to tell two fine-tunes apart, little enough for a 70B model."""


@dataclass(frozen=True)
class Features:
    """What heads see of the target's forward pass."""

    taps: Tensor  # (B, N, L * D), ascending; width 0 without taps
    hidden: Tensor  # (B, N, D), after the final norm


class FrozenTarget:
    """A causal LM that is never trained, seen as features in the middle and two ends."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name = name
        config = model.config.get_text_config()
        self.config = config
        self.base = model.get_decoder()
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.layers = find_layers(self.base, self.num_layers)
        head = model.get_output_embeddings()
        if head is None:
            raise UserError(f"{name}: {type(model).__name__} has no output embeddings; expected a causal language model")
        self.vocab_size: int = head.weight.shape[0]
        self.context_length: int = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", 2048)
        self.ends = TargetEnds(embed=model.get_input_embeddings(), logits=OutputHead(head, config))
        self.eos_token_ids = eos_ids(model)
        self.fingerprint = fingerprint(model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def lm_head_weight(self) -> Tensor:
        """(V, D) the output embeddings, tied or not."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def features(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        cache: Cache | None = None,
        taps: Sequence[int] = (),
    ) -> Features:
        """One forward pass without logits.

        tokens (B, N) int64; positions (B, N); visible (B, N, S) bool, the key slots each query may see before any sliding window
        (S = N without a cache); key_positions (B, S), the position each slot holds.
        """
        caught: dict[int, Tensor] = {}
        hooks = [self._tap(k, caught) for k in taps]
        try:
            out = self.base(
                input_ids=tokens,
                attention_mask=self._masks(visible, positions, key_positions),
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        finally:
            for hook in hooks:
                hook.remove()
        hidden = out.last_hidden_state
        return Features(torch.cat([caught[k] for k in taps], dim=-1) if taps else hidden[..., :0], hidden)

    def packed_features(self, tokens: Tensor, positions: Tensor, documents: Tensor, taps: Sequence[int]) -> Features:
        """Features of packed rows: attention is causal and stays inside each document. All arguments (B, T)."""
        T = tokens.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        visible = causal & (documents[:, :, None] == documents[:, None, :])
        return self.features(tokens, positions=positions, visible=visible, key_positions=positions, taps=taps)

    def _tap(self, k: int, caught: dict[int, Tensor]) -> torch.utils.hooks.RemovableHandle:
        if k == self.num_layers:

            def after(_: nn.Module, __: Any, output: Any) -> None:
                caught[k] = output[0] if isinstance(output, tuple) else output

            return self.layers[-1].register_forward_hook(after)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[k] = args[0] if args else kwargs["hidden_states"]

        return self.layers[k].register_forward_pre_hook(before, with_kwargs=True)

    def _masks(self, visible: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor | dict[str, Tensor]:
        window = getattr(self.config, "sliding_window", None)
        if window is not None and getattr(self.config, "use_sliding_window", True) is False:
            window = None
        kinds = set(getattr(self.config, "layer_types", None) or ())
        full = additive(visible, self.dtype)
        if window is None or kinds == {"full_attention"}:
            return {"full_attention": full} if len(kinds) == 1 and self._wants_dict else full
        near = positions[:, :, None] - key_positions[:, None, :] < window
        windowed = additive(visible & near, self.dtype)
        return {"full_attention": full, "sliding_attention": windowed} if kinds else windowed

    _wants_dict = False


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, S) bool -> (B, 1, N, S) additive mask. A boolean mask is silently wrong under eager attention, -inf gives NaN rows."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


class OutputHead:
    """Post-norm hidden states -> float32 logits, with the family's scaling and soft cap."""

    def __init__(self, head: nn.Module, config: Any) -> None:
        self.head = head
        self.scale: float = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden.to(self.head.weight.dtype))
        logits = logits.float() if logits.dtype != torch.float64 else logits
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def find_layers(base: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder layers: the first module list of the right length."""
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(f"{type(base).__name__}: found no list of {num_layers} decoder layers; this family cannot be tapped")


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high taps: h_2, h_{n//2}, h_{n-3} (arXiv 2503.01840, section 3.1)."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2]:
        raise UserError(
            f"a target of {num_layers} layers is too shallow for the default taps {list(taps)}: name them, "
            f"as in head.taps: [{', '.join(map(str, shallow_taps(num_layers)))}] (0 = embeddings, {num_layers} = last layer's output)"
        )
    return taps


def shallow_taps(num_layers: int) -> list[int]:
    """Three (or as many as there are) distinct taps for a shallow target, spread over its depth."""
    return sorted({min(1, num_layers), (num_layers + 1) // 2, num_layers})


def check_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The taps in ascending order, or a UserError that names the bad one."""
    for k in taps:
        if not 0 <= k <= num_layers:
            raise UserError(f"head.taps: {k} is not a residual stream of a target with {num_layers} layers; use 0 to {num_layers}")
    if len(set(taps)) != len(taps) or not taps:
        raise UserError(f"head.taps: {list(taps)} must name at least one tap, each once")
    return tuple(sorted(taps))


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a generation: the generation config's, which chat models extend, else the model config's."""
    generation = model.generation_config
    ids = generation.eos_token_id if generation is not None and generation.eos_token_id is not None else model.config.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """A short hash of the architecture and of a sample of every parameter, the same in every dtype wider than bfloat16."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // FINGERPRINT_SAMPLES)][:FINGERPRINT_SAMPLES]
        digest.update(sample.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def load_target(
    path: str, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> FrozenTarget:
    """Load a target from a folder or the hub, in its stored dtype unless another is named.

    Raises UserError where there is nothing at `path`, where it is not a causal LM, or where the family cannot be tapped.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    implementation = "sdpa"
    try:
        model = _load_model(path, config, dtype, trust_remote_code, implementation)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise UserError(f"{path}: not a causal language model that can be loaded ({first_line(error)})") from error
        model = _load_model(path, config, dtype, trust_remote_code, "eager")
    except OSError as error:
        raise UserError(f"{path}: cannot read the weights ({first_line(error)})") from error
    return FrozenTarget(model.to(device), path)


def _load_model(path: str, config: Any, dtype: torch.dtype | None, trust_remote_code: bool, implementation: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype or "auto", trust_remote_code=trust_remote_code, attn_implementation=implementation, use_safetensors=True
    )
    return model


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of the model at `path`, or a UserError that says what is missing."""
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(f"{path}: expected a model folder, found no config.json in it")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise UserError(f"target.path {path}: no model there ({first_line(error)}); give a folder with config.json or a hub id") from error


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside the target, or a UserError."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizer backends raise bare Exception, TypeError and OSError alike
        raise UserError(f"{path}: no tokenizer that can be loaded ({first_line(error)}); put tokenizer.json beside config.json") from error
    return tokenizer


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its trailing stop."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
