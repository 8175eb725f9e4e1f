"""A draft model: any causal LM with the target's tokenizer, distilled to predict the target (DistillSpec, arXiv
2310.08461).

    slot t reads x_t and predicts x_{t+1}:  q_t = softmax(W h_t), with the draft's own h and W
    loss = sum over labels of D(p_t || q_t) / rows, p the target's distribution and D one of heads.parts.losses.LOSSES

White-box: p is the target's whole distribution, on any text that the recipe names: a corpus, the target's answers or
the draft's own samples. D = `labels` is the plain cross-entropy of x_{t+1}, without p: fine-tuning, the baseline.

The draft has its own KV cache. A round's first step reads the fixed pair [x_{len-1}, root], because only the last
accepted token may be missing from the cache. Other accepted nodes of a tree were read when they were expanded; their
keys are moved to the slots of their positions.

Letters: B batch, T tokens, M observed rows, D hidden, V target vocabulary, C tokens that can be drafted, N tree nodes,
S slots of the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.core.contract import (
    Batch,
    DraftHead,
    HeadLoss,
    Observation,
    Rows,
    SharedLayers,
    StepCost,
)
from heads.core.errors import UserError
from heads.core.strict_settings import SAVED, Count
from heads.core.tree import Pick, Proposal, TreeShape, check_width, level_widths, scratch_slots
from heads.kernels.slots import DraftSlots, PrefillSlots, SlotMapping, round_up
from heads.methods.method_settings import DraftSettings
from heads.parts.labels import counts_by_depth, supervised, teacher
from heads.parts.layers import check_tensors, restore_buffers
from heads.parts.losses import draft_loss
from heads.parts.slot_state import advance_root, copy_last
from heads.parts.step_cost import ATTENTION_PRODUCTS, Widths, flops
from heads.parts.tree_growth import grow
from heads.targets.cached_decoder import CachedDecoder, CacheSpec
from heads.targets.encoder_decoder import find_base
from heads.targets.families import OutputHead, longest_text
from heads.targets.frozen_target import FrozenTarget, LanguageModel
from heads.targets.hf_decoder import HFDecoder, positions_of
from heads.targets.hf_forward import decode_packed
from heads.targets.native_decoder import NativeDecoder, why_not_native
from heads.targets.recurrent_layers import find_mixers
from heads.targets.smaller_models import (
    empty_model,
    fit_vocabulary,
    fresh_model,
    keep_layers,
    load_smaller,
    model_record,
    own_weights,
)


class DraftConfig(DraftSettings):
    """Everything that the head's function and its training loss depend on."""

    model: dict[str, Any]
    """The draft's own config, from which its model is rebuilt."""
    vocab_size: Count
    """Size of the target's vocabulary, and number of rows of the draft's embeddings."""
    common_size: Count
    """Number of tokens that can be drafted, counted from id 0. The draft's original vocabulary may have been
    smaller."""


SOURCES = ("path", "layers", "fresh")
ROWS = 1024
"""Number of rows whose logits `chain_hits` computes at a time."""


def check_takes_back(model: PreTrainedModel) -> None:
    if find_mixers(model):
        raise UserError(
            f"head: a {model.config.model_type} has recurrent layers, which cannot take back what they draft; "
            "use a draft with attention layers alone"
        )


@dataclass
class DraftState:
    """Static tensors of one batch of sequences.

    Slot p of the cache holds position p; the last slot is for padding. Expanded nodes use the slots after their root's.
    """

    shape: TreeShape
    decoder: CachedDecoder
    slot: Tensor  # (S,) int64, 0 .. S - 1
    root: Tensor  # (B,) int64
    previous: Tensor  # (B,) int64, the token before the root
    length: Tensor  # (B,) int64, the root's position
    expanded: Tensor  # (B, N) int64, `Proposal.expanded` of the tree that was drafted last
    last: int
    """Position of the last root below which the draft's own positions hold a whole tree."""

    def read(self, tokens: Tensor, mapping: SlotMapping, *, prompt: bool = False) -> Tensor:
        """Run one step: tokens (B, W) in the slots that `mapping` gives -> states after the final norm (B, W, D)."""
        return self.decoder.forward(tokens, mapping, extent=len(self.slot), prompt=prompt).hidden


class Draft(nn.Module, DraftHead):
    """Draft model head. It is saved as a Hugging Face causal LM."""

    depth_weights: tuple[float, ...] = (1.0,)

    def __init__(self, config: DraftConfig, model: PreTrainedModel) -> None:
        super().__init__()
        check_takes_back(model)
        self.config = config
        self.model = model.eval()  # without dropout, in training as in drafting

    @classmethod
    def for_target(cls, settings: DraftSettings, target: FrozenTarget, token_counts: Tensor) -> "Draft":
        chosen = settings.model_dump(exclude_none=True)
        sources = [name for name in SOURCES if name in chosen]
        if len(sources) != 1:
            raise UserError(
                f"head: a draft needs one of path (a smaller model), layers (of the target, to keep) and fresh "
                f"(a config), got {' and '.join(sources) or 'none'}"
            )
        match sources[0]:
            case "path":
                model = load_smaller(chosen["path"], target)
            case "layers":
                model = keep_layers(target, chosen["layers"])
            case _:
                model = fresh_model(target, chosen["fresh"])
        check_takes_back(model)
        common = fit_vocabulary(model, target.vocab_size)
        own = {"model": model_record(model), "vocab_size": target.vocab_size, "common_size": common}
        config = DraftConfig.from_plain(chosen | own)
        return cls(config, model)

    @classmethod
    def from_checkpoint(cls, config: dict[str, object], weights: dict[str, Tensor]) -> "Draft":
        head_config = DraftConfig.from_plain(config, SAVED)
        model: Any = empty_model(head_config.model)
        rows = len(model.get_output_embeddings().weight)
        vocab_size = head_config.vocab_size
        common_size = head_config.common_size
        if not 0 < common_size <= vocab_size == rows:
            raise UserError(
                f"draftsmith.config: vocab_size {vocab_size} and common_size {common_size} do not fit a model of "
                f"{rows} tokens"
            )
        head = cls(head_config, model)
        check_tensors(head.to_checkpoint(), weights)
        head.model.load_state_dict(weights, strict=False)  # missing tensors are tied to loaded ones
        return head

    def to_checkpoint(self) -> dict[str, Tensor]:
        return own_weights(self.model)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Draft":
        """Convert the weights, but keep the dtype of the rotary frequencies. In bfloat16, angles some hundred positions
        away would be off by whole radians."""
        buffers = self.model.named_buffers(remove_duplicate=False)
        saved = self.model.state_dict()
        frequencies = {name: x for name, x in buffers if name not in saved and x.is_floating_point()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        restore_buffers(self.model, frequencies)
        return self

    @property
    def language_model(self) -> PreTrainedModel:
        model: PreTrainedModel = self.model
        return model

    @property
    def base(self) -> nn.Module:
        return find_base(self.model, "head.path")

    @property
    def output(self) -> OutputHead:
        untyped: Any = self.model
        return OutputHead(untyped.get_output_embeddings(), self.text_config)

    @property
    def positions(self) -> int | None:
        return longest_text(self.text_config)

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens that can be drafted: (..., D) -> (..., C) float32."""
        return self.output(hidden)[..., : self.config.common_size]

    def states(self, batch: Batch) -> Tensor:
        """Return (B, T, D): the state of slot t after it has read x_0 .. x_t of its document."""
        if (length := batch.tokens.shape[1]) > positions_of(self.text_config):
            raise UserError(
                f"data.context_length: the draft model reads {self.positions} positions, a row has {length}"
            )
        return decode_packed(
            self.base,
            self.text_config,
            self.output.head.weight.dtype,
            batch.tokens,
            positions=batch.positions,
            documents=batch.documents,
        )

    def counts(self, rows: Rows) -> Tensor:
        return counts_by_depth(rows, 1, 1)

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        config = self.config
        output = self.output
        row, label = supervised(batch, 1).nonzero(as_tuple=True)  # (R,) each
        states = self.states(batch)[row, label - 1][None]  # (1, R, D)
        if output.scale != 1.0:
            states = states * output.scale
        if torch.is_autocast_enabled(states.device.type):  # the last norm of some families returns a wider dtype
            states = states.to(torch.get_autocast_dtype(states.device.type))
        hidden, target_logits = teacher(batch, row, label, config.loss, config.vocab_size)
        return draft_loss(
            states,
            output.head.weight[: config.common_size],
            torch.ones_like(label, dtype=torch.bool)[None],
            hidden,
            target_logits,
            torch.arange(config.common_size, device=label.device),
            scale,
            loss=config.loss,
            soft_cap=output.soft_cap,
        )

    def step_cost(self, batch_size: int, length: int, *, width: int, most: int) -> StepCost:
        N = batch_size * length
        layers = self.text_config.num_hidden_layers
        sizes = Widths.of(self.text_config)
        head = self.output.head
        work = N * (flops(self) - flops(head) + layers * 2 * ATTENTION_PRODUCTS * sizes.queries * length)
        kept = layers * N * width * sizes.kept(6, 4, 4)
        backward = 2 * width * sizes.inner * N
        return StepCost(work, kept, N, self.config.common_size, N, N, backward, [head])

    @torch.no_grad()
    def chain_hits(self, batch: Batch, depth: int) -> Tensor:
        states = self.states(batch)
        best = torch.cat([self.logits(part).argmax(-1) for part in states.flatten(0, 1).split(ROWS)])
        right = best.view(batch.tokens.shape) == batch.tokens.roll(-1, dims=1)  # (B, T), by the slot that predicts
        return torch.stack([right.roll(-1 - k, dims=1) for k in range(depth)])

    def check_draft(self, shape: TreeShape) -> None:
        check_width(shape, self.config.common_size)

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> DraftState:
        self.check_draft(shape)
        device = self.output.head.weight.device
        behind = max(shape.depth, scratch_slots(shape))
        spec = CacheSpec(
            batch_size=batch_size,
            capacity=round_up(capacity + behind + 1),  # the last slot is for padding
            nodes=max(2, *level_widths(shape)) if shape.depth > 1 else 2,  # a round begins with two tokens
            depth=shape.depth,
            vocab_size=self.config.common_size,
            draft=True,
        )
        output = self.output
        model = LanguageModel(self.base, output.head, output, self.text_config, "head.path")
        decoder = NativeDecoder(model, spec) if why_not_native(model) is None else HFDecoder(model, spec)
        ids = torch.zeros(3, batch_size, dtype=torch.int64, device=device)
        expanded = torch.full((batch_size, shape.nodes), -1, device=device)
        last = max(positions_of(self.text_config) - shape.depth, 0)
        return DraftState(shape, decoder, decoder.slot[:-1], ids[0], ids[1], ids[2], expanded, last)

    @torch.no_grad()
    def extend(self, state: DraftState, observation: Observation) -> None:
        tokens = observation.tokens
        start = observation.start
        count = observation.count
        nodes = observation.nodes
        M = tokens.shape[1] - 1
        if nodes is None:
            state.read(tokens[:, :-1], PrefillSlots(start, count, state.slot, M), prompt=True)
        elif observation.unread:  # nor may the token before them have been read
            known = torch.cat([state.previous[:, None], tokens[:, :-1]], dim=1)
            state.read(
                known, PrefillSlots((start - 1).clamp_min(0), torch.where(count > 0, count + 1, 0), state.slot, M + 1)
            )
        elif state.shape.top_k > 1:
            # Only the last accepted node may be unexpanded; the next round reads it with its root.
            path = state.expanded.gather(1, nodes) + 1
            offset = state.slot[:M]
            path = torch.where((path > 0) & (offset < count[:, None]), path, offset)  # other entries stay in place
            state.decoder.compact(start, path)
        copy_last(state.previous, tokens, count)
        advance_root(state, observation)

    @torch.no_grad()
    def propose(self, state: DraftState, pick: Pick) -> Proposal:
        decoder = state.decoder
        scratch = scratch_slots(state.shape)
        # After its last position the draft reads nothing new, and nobody needs what it drafts: the rounds are plain.
        length = state.length.clamp_max(state.last)
        reads = state.length <= state.last
        observed = length + 1  # with the root, which the pair below reads

        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            mapping = DraftSlots(observed, paths, state.slot, state.shape.top_k == 1, scratch)
            return decoder.logits(state.read(tokens, mapping))

        tokens = torch.stack([state.previous, state.root], dim=1) * reads[:, None]
        pair = PrefillSlots((length - 1).clamp_min(0), None, state.slot, 2)  # a row without a prompt is at 0
        hidden = state.read(tokens, pair)
        # The noise of each round is of its own position, whatever the draft reads.
        proposal = grow(state.shape, state.root, state.length, decoder.logits(hidden[:, 1:]), pick, expand, None)
        if proposal.expanded is not None:
            state.expanded.copy_(proposal.expanded)
        return proposal
