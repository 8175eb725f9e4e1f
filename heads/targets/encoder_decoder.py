"""Encoder-decoder models of the T5 family (arXiv 1910.10683) as causal LMs: one sequence, one cache.

    [input tokens ... </s>] [start] [answer tokens ...]
     read by the encoder     read by the decoder, which also sees the encoder's states of the input

Everything before the first start token of a document is the encoder's input. Prompts, packed documents, masks, caches
and draft trees are therefore the same as for any other target. Only the pass over the tokens differs. Relative position
biases are computed from the given positions. T5's own code counts cache slots instead, which is wrong for trees and for
rows of different lengths.

The decoder also runs over the input, where nothing reads its states, so that shapes depend on no token. There, input
tokens attend to input tokens, and answer tokens to answer tokens.

Letters: B rows, N tokens of a step, S key slots, D hidden, H heads, L decoder layers.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import EncoderDecoderCache

from heads.core.errors import UserError
from heads.targets.cache import HFCache, cache_name
from heads.targets.masks import additive

FAMILIES = ("t5", "mt5")
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ eos_token + start_token + message['content'] + eos_token }}"
    "{%- elif loop.index0 and messages[loop.index0 - 1]['role'] == 'assistant' -%}"
    "{{ raise_exception('an encoder-decoder answers one turn') }}"
    "{%- else -%}{{ message['content'] + (' ' if message['role'] == 'system' else '') }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ eos_token + start_token }}{%- endif -%}"
)
"""Chat template that writes a conversation of one turn as such a sequence. The family's tokenizers have none."""


class EncoderDecoder(nn.Module):
    """Encoder and decoder of a model as one decoder."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__()
        config = model.config
        if config.model_type not in FAMILIES:
            raise UserError(
                f"{name}: encoder-decoder targets here are {' or '.join(FAMILIES)}, got {config.model_type}; "
                "use one of these, or a causal language model"
            )
        start: int | None = getattr(config, "decoder_start_token_id", None)
        if start is None and model.generation_config is not None:
            start = model.generation_config.decoder_start_token_id
        if start is None:
            raise UserError(f"{name}: its config names no decoder_start_token_id, which begins every answer; add it")
        self.start: int = start
        """Token that begins every answer."""
        self.encoder: Any = model.get_encoder()
        self.decoder: Any = model.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.decoder.block
        return layers

    def forward(
        self, tokens: Tensor, *, positions: Tensor, visible: Tensor, key_positions: Tensor, cache: HFCache | None
    ) -> Tensor:
        """Return the decoder's states after its final norm (B, N, D). Arguments as in `FrozenTarget.features`. A prompt
        step (`HFCache.set_slots`) must contain whole prompts, from position 0."""
        embedded = self.decoder.embed_tokens(tokens)
        is_input = self.is_input(tokens, visible, cache)  # (B, N)
        keys_are_input = is_input if cache is None else mark(cache, is_input)  # (B, S)
        states = None
        if cache is None or cache.prompt:
            states = self.encode(embedded, is_input, positions, visible if cache is None else None)
        pair = None if cache is None else RowPair(cache, len(self.layers))
        dtype = embedded.dtype
        same_part = keys_are_input[:, None] == is_input[:, :, None]
        mask = additive(visible & same_part, dtype)
        cross_mask = additive(visible & keys_are_input[:, None], dtype)
        bias = self.bias(self.decoder, positions, key_positions, bidirectional=False)
        hidden = embedded
        name = cache_name(self.layers[0])
        for layer in self.layers:
            # Without the encoder's states, their keys are in the cache. The layer then only checks that it is given a
            # tensor.
            source = embedded if states is None else states
            hidden = layer(hidden, mask, bias, source, cross_mask, None, **{name: pair})[0]
        normed: Tensor = self.decoder.final_layer_norm(hidden)
        return normed

    def is_input(self, tokens: Tensor, visible: Tensor, cache: HFCache | None) -> Tensor:
        """Return (B, N) bool: True for the encoder's input, the tokens before the first start token of a document."""
        starts = tokens == self.start
        if cache is None:
            return ~(visible & starts[:, None]).any(-1)
        if cache.prompt:
            return starts.cumsum(1) == 0
        return torch.zeros_like(starts)

    def encode(self, embedded: Tensor, is_input: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        """Return the encoder's states (B, N, D); outside the input they are padding. `visible` separates packed
        documents."""
        seen = is_input[:, None] if visible is None else (visible | visible.mT) & is_input[:, None]
        mask = additive(seen.expand(-1, embedded.shape[1], -1), embedded.dtype)
        bias = self.bias(self.encoder, positions, positions, bidirectional=True)
        hidden = embedded
        for layer in self.encoder.block:
            hidden = layer(hidden, mask, bias)[0]
        normed: Tensor = self.encoder.final_layer_norm(hidden)
        return normed

    def bias(self, stack: Any, positions: Tensor, key_positions: Tensor, *, bidirectional: bool) -> Tensor:
        """Return the bias (B, H, N, S) that a stack adds to its scores, a function of the distance from query to
        key."""
        attention = stack.block[0].layer[0].SelfAttention
        bucket = attention._relative_position_bucket(
            key_positions[:, None] - positions[:, :, None],
            bidirectional=bidirectional,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        by_head: Tensor = attention.relative_attention_bias(bucket)  # (B, N, S, H)
        return by_head.permute(0, 3, 1, 2)

    def alone(self, tokens: Tensor) -> Tensor:
        """Return the states (B, n, D) of the last n tokens, beginning with the start token, as the model itself
        computes them. The first start token must have the same position in all rows."""
        inputs, answers = self.split(tokens)
        source = self.encoder(input_ids=inputs).last_hidden_state
        hidden: Tensor = self.decoder(
            input_ids=answers, encoder_hidden_states=source, use_cache=False
        ).last_hidden_state
        return hidden

    def split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        start = int((tokens[0] == self.start).nonzero()[0])
        return tokens[:, :start], tokens[:, start:]


class CrossCache:
    """Layers L .. 2L - 1 of an `HFCache`: keys and values of the encoder's states, each in the slot of its token."""

    def __init__(self, cache: HFCache, num_layers: int) -> None:
        self.cache = cache
        self.first = num_layers
        shown = cache.row_layers[num_layers:]
        self.layers = [
            SimpleNamespace(keys=layer.shown_keys, values=layer.shown_values) if layer.is_initialized else None
            for layer in shown
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> object:
        return self.cache.update(key_states, value_states, self.first + layer_idx)


class RowPair(EncoderDecoderCache):
    """One `HFCache` as the pair of caches that the family's layers expect. Every step makes a new pair."""

    def __init__(self, cache: HFCache, num_layers: int) -> None:
        untyped: Any = self  # annotated with transformers' own cache classes
        untyped.self_attention_cache = cache
        untyped.cross_attention_cache = CrossCache(cache, num_layers)
        self.is_updated = dict.fromkeys(range(num_layers), not cache.prompt)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return a number that has no effect, since every bias is given."""
        return self.self_attention_cache.get_seq_length(layer_idx)


def mark(cache: HFCache, is_input: Tensor) -> Tensor:
    """Record which of the slots that are set hold input (B, N). Return (B, S) bool for all visible slots."""
    if cache.marks is None:
        cache.marks = torch.zeros(cache.batch_size_, cache.capacity, dtype=torch.bool, device=is_input.device)
    cache.marks.view(-1).index_copy_(0, cache.slots, is_input.flatten())
    return cache.marks[cache.rows, : cache.extent]


def find_base(model: PreTrainedModel, name: str) -> nn.Module:
    """Return a model's decoder without its output head; encoder and decoder as one if it has both."""
    if model.config.is_encoder_decoder:
        return EncoderDecoder(model, name)
    base: nn.Module = _language_model(model).get_decoder()
    return base


def find_head(model: PreTrainedModel) -> Any:
    return _language_model(model).get_output_embeddings()


def _language_model(model: PreTrainedModel) -> Any:
    """Return the part of a model that has the output head: of some multimodal ones a causal language model."""
    untyped: Any = model
    return untyped if untyped.get_output_embeddings() is not None else untyped.get_decoder()


def give_template(tokenizer: PreTrainedTokenizerBase, start: int) -> None:
    """Give a tokenizer without a chat template one that writes a question and its answer as one sequence."""
    if tokenizer.chat_template is None:
        token = tokenizer.convert_ids_to_tokens(start)
        tokenizer.chat_template = TEMPLATE.replace("start_token", repr(token))
