"""The frozen target: auxiliary hidden states, last hidden states, embeddings and output head of any Hugging Face causal
LM.

An auxiliary hidden state h_k is the residual stream that ENTERS decoder layer k (h_0 the embeddings, h_n the last
layer's output before the final norm). Hooks read only the auxiliary layers. The caller passes the slots that each query
may see, and sliding windows are computed from positions, so that draft trees need no special code.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from heads.core.contract import SharedLayers
from heads.core.errors import UserError, first_line
from heads.core.tree import TreeShape, is_chain
from heads.targets.cache import HFCache
from heads.targets.encoder_decoder import EncoderDecoder, find_base, find_head
from heads.targets.families import (
    ATTENTION_LAYERS,
    OutputHead,
    check_layers,
    check_window,
    eos_ids,
    find_layers,
    longest_text,
)
from heads.targets.hf_forward import decode, decode_packed
from heads.targets.identity import fingerprint, forward_settings
from heads.targets.quantization import quantize_layers
from heads.targets.recurrent_layers import Stepwise, find_mixers


@dataclass(frozen=True)
class Features:
    """Hidden states of a target's forward pass that heads read."""

    aux_hidden_states: Tensor  # (B, N, L * D), ascending; width 0 without auxiliary hidden states
    hidden: Tensor  # (B, N, D), after the final norm


Remote = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Features]
"""(tokens, positions, documents, auxiliary layers) -> features, as `FrozenTarget.packed_features`."""
Placement = Literal["whole", "sharded", "absent"]
Place = Callable[["FrozenTarget", torch.device, torch.dtype | None], Placement]


class LanguageModel:
    """The parts of a causal language model, a target or a draft model, from which decoders are built."""

    def __init__(self, base: nn.Module, head: Any, lm_head: Callable[[Tensor], Tensor], config: Any, name: str) -> None:
        """`base`: the decoder without its output head `head`. `lm_head`: as in `SharedLayers`."""
        self.base = base
        self.head = head
        self.lm_head = lm_head
        self.config = config
        self.name = name
        self.num_layers = len(base.layers) if isinstance(base, EncoderDecoder) else int(config.num_hidden_layers)
        decoder = base.decoder if isinstance(base, EncoderDecoder) else base
        self.layers = find_layers(decoder, self.num_layers, name)
        self.is_recurrent = bool(find_mixers(self.layers))
        """True if any layer is recurrent. Such a model reads one document per row and verifies only chains."""
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.num_layers
        self.attention_layers = sum(kind in ATTENTION_LAYERS for kind in kinds)
        """Number of layers with keys and values."""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.head.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.head.weight.dtype
        return dtype

    def features(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        cache: Cache | None = None,
        aux_layer_ids: Sequence[int] = (),
    ) -> Features:
        """Run a forward pass without logits.

        tokens (B, N) int64; positions (B, N); visible (B, N, S) bool, the key slots that each query may see, without
        regard to sliding windows (S = N without a cache); key_positions (B, S), the position of each slot's token.
        """
        return self.catch(
            aux_layer_ids,
            lambda: decode(
                self.base,
                self.config,
                self.dtype,
                tokens,
                positions=positions,
                visible=visible,
                key_positions=key_positions,
                cache=cache,
            ),
        )

    @torch.no_grad()
    def catch(self, aux_layer_ids: Sequence[int], run: Callable[[], Tensor]) -> Features:
        """Return the features of the forward pass that `run` executes."""
        caught: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for k in aux_layer_ids:
                hooks.callback(self._aux(k, caught).remove)
            hidden = run()
        if others := [stream.shape for stream in caught.values() if stream.shape[:-1] != hidden.shape[:-1]]:
            raise UserError(
                f"{self.name}: a {self.config.model_type} hands several residual streams from layer to layer "
                f"({tuple(others[0])}), and heads read one; use a head of the last hidden state (mtp, medusa)"
            )
        return Features(
            torch.cat([caught[k] for k in aux_layer_ids], dim=-1) if aux_layer_ids else hidden[..., :0], hidden
        )

    def _aux(self, k: int, caught: dict[int, Tensor]) -> torch.utils.hooks.RemovableHandle:
        if k == self.num_layers:

            def after(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
                caught[k] = output[0] if isinstance(output, tuple) else output

            return self.layers[-1].register_forward_hook(after)

        def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            caught[k] = args[0] if args else kwargs["hidden_states"]

        return self.layers[k].register_forward_pre_hook(before, with_kwargs=True)


@dataclass(frozen=True)
class Opening:
    """How a target was opened, and what its files say beside the model."""

    checkpoint_config: PreTrainedConfig | None = None
    """Config of the whole checkpoint; None: the model's. In a multimodal checkpoint, the language model is only a
    part."""
    trust_remote_code: bool = False
    """True if the user allows running the Python code that comes with the model."""
    adapter: str | None = None
    """Folder or Hub id of the peft adapter that was merged into the weights."""
    gguf_file: str | None = None
    """Name of the GGUF file that holds weights and tokenizer, if they are in one."""
    two_tables: bool = False
    """True if its config ties embeddings and output head, and its checkpoint holds two tables that differ."""
    fix_mistral_regex: bool | None = None
    """As of `target_files.load_tokenizer`."""
    tokenizer: str = ""
    """Hash of its tokenizer (`hub.tokenizer_key`); empty if none has been opened with it."""
    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that end a text (`target_files.load_end_ids`). None: those of the generation config, which chat models
    extend, else the config's."""
    template: Mapping[str, object] = field(default_factory=dict)
    """Arguments of its chat template, such as `enable_thinking`."""


class FrozenTarget(LanguageModel):
    """A causal LM that is never trained, with its features, embeddings and output head. It is finished when it is made:
    nothing else sets its fields."""

    def __init__(
        self, model: PreTrainedModel, name: str, *, quantize: str | None = None, opening: Opening | None = None
    ) -> None:
        opening = opening or Opening()
        model.eval()
        self.model = model.requires_grad_(False)
        self.checkpoint_config: Any = opening.checkpoint_config or model.config
        self.trust_remote_code = opening.trust_remote_code
        self.merged_adapter = opening.adapter
        self.gguf_file = opening.gguf_file
        self.two_tables = opening.two_tables
        self.fix_mistral_regex = opening.fix_mistral_regex
        self.tokenizer = opening.tokenizer
        self.template = dict(opening.template)
        config = model.config.get_text_config()
        check_layers(model, config, name)
        base = find_base(model, name)
        head = find_head(model)
        check_window(base, config, name)
        if head is None:
            raise UserError(f"{name}: expected a causal language model, {type(model).__name__} has no output head")
        super().__init__(base, head, OutputHead(head, config), config, name)
        for mixer in find_mixers(self.layers):  # they read an `HFCache`; calls without one do not change
            if not isinstance(mixer.forward, Stepwise):
                mixer.forward = Stepwise(mixer)
        self.start_token = self.base.start if isinstance(self.base, EncoderDecoder) else None
        """Token that separates the encoder's input from the decoder's tokens in every sequence; None without an
        encoder."""
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.context_length: int = longest_text(config) or 2048
        self.shared = SharedLayers(model.get_input_embeddings(), self.lm_head, self.head.weight)
        self.eos_token_ids = eos_ids(model.generation_config) or eos_ids(config)
        if outside := [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]:
            raise UserError(
                f"{name}: eos_token_id: expected ids below {self.vocab_size}, its vocabulary, got {outside[0]}; fix "
                "generation_config.json or config.json"
            )
        if opening.eos_token_ids is not None:
            self.eos_token_ids = opening.eos_token_ids
        self.quantize = quantize
        self.fingerprint = fingerprint(model) + (f"-{quantize}" if quantize else "")
        self.settings = forward_settings(model.config)
        self.placement: Placement = "whole"
        """Placement of the decoder layers (`heads.targets.layer_placement`). Only a whole target decodes."""
        self.remote: Remote | None = None
        if quantize:
            quantize_layers(self.layers, quantize, name)

    def move(self, device: torch.device, dtype: torch.dtype | None, place: Place | None) -> None:
        """Move the weights to `device`. `place`: a function of `heads.targets.layer_placement`, to which `dtype` is
        given."""
        if place is None:
            untyped: Any = self.model
            untyped.to(device)
        else:
            self.placement = place(self, device, dtype)

    def compute_by(self, remote: Remote) -> None:
        """Let `remote` compute `packed_features`, if no process of this launch holds the layers."""
        self.remote = remote

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @property
    def identity(self) -> dict[str, Any]:
        """What its texts depend on, as `identity.changes` compares it."""
        return {"fingerprint": self.fingerprint, "settings": self.settings, "tokenizer": self.tokenizer}

    @property
    def lm_head_weight(self) -> Tensor:
        """Output embeddings (V, D), tied or not."""
        weight: Tensor = self.head.weight
        return weight

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a row's recurrent states after one token, measured by a pass over one token; 0 if there are none."""
        if not self.is_recurrent:
            return 0
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        cache = HFCache(num_layers=self.num_layers, batch_size=1, capacity=1, num_states=1, device=self.device)
        cache.set_slots(zero, extent=1, prompt=True)
        self.features(zero, positions=zero, visible=zero[:, None] == 0, key_positions=zero, cache=cache)
        return cache.state_bytes

    @property
    def logit_scale(self) -> float:
        """Factor of the family's output head. Draft heads with their own output head, which has no factor, include it
        in their initial weights."""
        lm_head = self.lm_head
        return lm_head.scale if isinstance(lm_head, OutputHead) else 1.0

    def packed_features(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]
    ) -> Features:
        """Return the features of packed rows. Attention is causal and stays inside each document. All tensors are
        (B, T). UserError if a row of a recurrent target has several documents."""
        if self.remote is not None:
            return self.remote(tokens, positions, documents, aux_layer_ids)
        if self.is_recurrent and bool((documents > documents[:, :1]).any()):
            raise UserError(
                f"{self.name}: its recurrent layers cannot be masked by document; give each training row one document, "
                "with padding behind it"
            )
        given = (self.base, self.config, self.dtype, tokens)
        return self.catch(aux_layer_ids, lambda: decode_packed(*given, positions=positions, documents=documents))

    def sample(self, length: int, starts: Sequence[int]) -> Tensor:
        """Return (1, length) sample token ids. With an encoder, answers begin at the positions `starts` and nowhere
        else."""
        ids = (torch.arange(length, device=self.device) + 1) * self.vocab_size // (length + 2)
        if self.start_token is not None:
            ids[ids == self.start_token] = (self.start_token + 1) % self.vocab_size
            ids[list(starts)] = self.start_token
        return ids[None]

    def arguments(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the model itself for whole sequences (B, T). With an encoder, its logits are those of
        the last slots."""
        if not isinstance(self.base, EncoderDecoder):
            return {"input_ids": tokens}
        inputs, answers = self.base.split(tokens)
        return {"input_ids": inputs, "decoder_input_ids": answers}

    @torch.no_grad()
    def alone(self, tokens: Tensor) -> Tensor:
        """Return the states after the final norm as the model computes them for whole sequences (B, T) with its own
        masks: all states, or with an encoder those of the last slots."""
        if isinstance(self.base, EncoderDecoder):
            return self.base.alone(tokens)
        hidden: Tensor = self.base(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    def check_shape(self, shape: TreeShape | None) -> None:
        """Raise UserError for drafts that this target cannot verify. None means a tree that a head grows later."""
        if self.is_recurrent and (shape is None or not is_chain(shape)):
            raise UserError(
                f"{self.name}: its recurrent layers have one state behind each token, and every branch of the tree "
                f"{shape or 'head'} would need its own; use a chain, chain:K"
            )

    @torch.no_grad()
    def check(self) -> None:
        """Raise UserError for a model whose logits differ from those of `packed_features` and `shared`. A short
        document must get the same logits from the model alone as when packed after another one (unless the target is
        recurrent). Encoders, ignored masks and unknown scalings of the logits fail this check."""
        slot = torch.arange(12, device=self.device)[None]
        ids = self.sample(12, starts=(3, 8))
        document = (slot >= 5).long()
        packed = (ids, slot - 5 * document, document)
        if self.is_recurrent:
            packed = (ids[:, 5:], slot[:, :7], document[:, 5:])
        try:
            features = self.packed_features(*packed, ())
            expected = self.model(**self.arguments(ids[:, 5:]), use_cache=False).logits
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # as families fail on arguments that they do not know
            raise self._unfit(first_line(error)) from error
        if not bool(expected.isfinite().all()):
            raise UserError(f"{self.name}: {why_not_finite(self.model, self.layers, self.arguments(ids[:, 5:]))}")
        logits = self.shared.lm_head(features.hidden[:, -expected.shape[1] :])
        expected = expected.to(logits.dtype)
        distance = float((logits - expected).norm() / expected.norm())
        if not distance < (0.2 if self.dtype.itemsize < 4 else 0.01):
            raise self._unfit(f"its logits differ by {distance:.0%}")

    def _unfit(self, reason: str) -> UserError:
        architecture = " ".join(self.model.config.architectures or ["?"])
        return UserError(
            f"{self.name}: expected a causal language model whose attention takes a 4-D mask, "
            f"got {type(self.model).__name__} from a {architecture} ({reason}); use another target"
        )


@torch.no_grad()
def why_not_finite(model: PreTrainedModel, layers: nn.ModuleList, arguments: dict[str, Tensor]) -> str:
    """Return the end of an error message for a model whose output for `arguments` is not finite."""
    finite = [True] * len(layers)

    def look(number: int, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        finite[number] = bool(hidden.isfinite().all())

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hook = layer.register_forward_hook(lambda _, __, output, number=number: look(number, output))
            hooks.callback(hook.remove)
        model(**arguments, use_cache=False)
    place = "after the last layer" if all(finite) else f"from layer {finite.index(False)} on"
    plain = {name: weight for name, weight in model.named_parameters() if type(weight.data) is Tensor}
    wrong = [name for name, weight in plain.items() if not weight.is_meta and not bool(weight.isfinite().all())]
    if model.dtype == torch.float16:
        return f"the target's states are not finite {place}; float16 overflows above 65504: ask for bfloat16 or float32"
    if wrong:
        return f"the target's states are not finite {place}, and {wrong[0]} holds such values; fetch its weights again"
    return f"the target's states are not finite {place}; {str(model.dtype)[6:]} may not suffice: ask for float32"
