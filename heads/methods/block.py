"""Heads that draft a whole block in one pass (DFlash, arXiv 2602.06036): training at anchors, and drafting.

    c_p  = hidden_norm(fc [auxiliary states of position p])              context, computed once for each known position
    x    = [e(x_a), e(MASK), ..., e(MASK)]                                block: the root at position a, then masks
    each layer:  u = input_layernorm(x);  keys and values = W [c ; u];  x += attention(u);  x += mlp(norm(x))
    q_k  = softmax(lm_head norm(x_j))                                     the k-th draft token, j = k + first_row

All rows of a block see each other (`causal`: only rows up to their own) and the context strictly before the root,
because the root's own features do not exist yet. Row j of a block is at rotary position a + j. Embeddings and output
head are the target's, and frozen.

Training draws the anchors of blocks in each row of a batch. The loss of a block's row has the weight exp(-k / gamma) or
D-PACE's (arXiv 2605.18810). The sum over all rows, micro-batches and processes is divided by the sum of the weights.

Letters: B batch, T tokens, D hidden, V vocabulary, L auxiliary layers, K depth, N blocks of a row, R rows of a block, E
cache slots that are read.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heads.core.contract import (
    Batch,
    DraftHead,
    HeadLoss,
    Observation,
    Pick,
    Rows,
    SharedLayers,
    StepCost,
)
from heads.core.errors import UserError
from heads.core.strict_settings import Count, Number
from heads.core.tree import Proposal, TreeShape, check_width
from heads.methods.block_attention import Blocks, Reach, Sight, all_blocks, block_attention, draw_blocks
from heads.methods.block_loss import BlockLoss, BlockTask, block_loss, chunks_of
from heads.methods.growth import grow
from heads.methods.head_shape import block_settings, check_aux_layer_ids, check_one_width, mask_token, spread_layer_ids
from heads.methods.layers import (
    FULL,
    SLIDING,
    Attention,
    BlockConfig,
    DecoderLayer,
    NormedAttention,
    RMSNorm,
    check_tensors,
)
from heads.methods.losses import matmul
from heads.methods.rotary import CosSin, rotary_of
from heads.methods.settings import D_PACE, DraftBlockSettings, LayerIds
from heads.methods.slot_state import SlotState, advance_root, copy_last
from heads.methods.start import AttentionProbe, TargetProbe, begin, copy_by_root
from heads.methods.step_cost import ATTENTION_PRODUCTS, Widths, flops
from heads.methods.vocab import read_vocab, vocab_tables
from heads.targets.masks import additive
from heads.targets.model import FrozenTarget
from heads.targets.slots import PrefillSlots
from heads.targets.tree_attention import Attend

Follow = Callable[[Tensor], Tensor]
"""(tokens (M, W, k) of W paths in each of M blocks, from the root on) -> logits (M, W, V) of the token after them, the
k-th draft token."""


@dataclass(frozen=True, eq=False)
class BlockStates:
    """M blocks after the head's layers, in training and in drafting."""

    states: Tensor  # (M, R, D), after the final norm; row 0 is the root's
    roots: Tensor  # (M,) int64, token ids
    newest: Tensor  # (M, D), the context of the position before the root
    embed_tokens: Callable[[Tensor], Tensor]
    """The target's input embeddings."""


class BlockState(SlotState):
    newest: Tensor  # (B, D), see `BlockStates`


class DraftBlockConfig(BlockConfig, DraftBlockSettings):
    """Everything that the function of such a head depends on."""

    aux_layer_ids: LayerIds
    mask_token_id: Number
    draft_vocab_size: Count | None = None
    """Published heads: number of tokens that can be drafted; their logits use their rows of the target's output head.
    Null: all."""
    sliding_causal: bool = True
    """Published heads: False if a row of a sliding layer sees all rows of its block."""

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return self.layer_types
        return (FULL if self.sliding_window is None else SLIDING,) * (self.num_layers - 1) + (FULL,)

    def reaches(self, causal: bool) -> list[Reach]:
        """Return the bounds of what the rows of each layer see. `causal`: no row sees later rows."""
        slides = Reach(causal or bool(self.sliding_causal), self.sliding_window)
        return [slides if kind == SLIDING else Reach(causal) for kind in self.kinds]

    @property
    def columns(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @model_validator(mode="after")
    def check_block(self) -> Self:
        rows, window, types = self.block_size, self.sliding_window, self.layer_types
        if rows > self.max_position_embeddings:
            longest = self.max_position_embeddings
            raise ValueError(f"block_size: expected at most the target's context of {longest}, got {rows}")
        if types is not None and len(types) != self.num_layers:
            raise ValueError(f"layer_types: expected one for each of {self.num_layers} layers, got {list(types)}")
        if window is not None and window < rows:
            raise ValueError(f"sliding_window: expected at least block_size ({rows}), got {window}")
        if (window is not None) is not (SLIDING in self.kinds):
            has = "a window, and no layer slides" if window else "layers that slide, and no window"
            raise ValueError(f"sliding_window, layer_types: expected both or none, got {has}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id: expected an id below {self.vocab_size}, got {self.mask_token_id}")
        return self


class DraftBlockHead(nn.Module, DraftHead):
    """Base class of heads that draft a block in one pass. Each method defines which rows predict tokens, and the
    loss."""

    Config: ClassVar[type[Any]] = DraftBlockConfig
    config: Any
    first_row: ClassVar[int]
    """Row that predicts the first draft token."""
    terms: Sequence[tuple[float, str]]
    """See `heads.methods.block_loss.BlockTask.terms`."""
    confidence_weight: float = 0.0

    def __init__(self, config: Any, draft_to_target: Tensor | None = None) -> None:
        """draft_to_target (Vd,) int64: the target ids of a draft vocabulary, ascending."""
        super().__init__()
        D, L = config.hidden_size, len(config.aux_layer_ids)
        self.config, self.aux_layer_ids = config, config.aux_layer_ids
        depth = config.block_size - self.first_row
        self.weighs_rows = config.weights == D_PACE
        self.depth_weights = tuple(1.0 if self.weighs_rows else math.exp(-k / config.gamma) for k in range(depth))
        self.fc = nn.Linear(L * D, D, bias=False)
        self.hidden_norm = RMSNorm(D, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.make_layer(NormedAttention(config)) for _ in range(config.num_layers))
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.causal = bool(getattr(config, "causal", False))
        """True if a row of a block does not see later rows."""
        self.reaches = config.reaches(self.causal)
        self.cos_sin = rotary_of(config)
        self.draft_to_target: Tensor | None
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)

    def make_layer(self, attention: Attention) -> DecoderLayer:
        return DecoderLayer(self.config, attention)

    @classmethod
    def for_target(cls, settings: DraftBlockSettings, target: FrozenTarget, token_counts: Tensor) -> Self:
        check_one_width(target, cls.__name__.lower())
        aux_layer_ids = (
            spread_layer_ids(target.num_layers, settings.num_layers)
            if settings.aux_layer_ids is None
            else check_aux_layer_ids(settings.aux_layer_ids, target.num_layers)
        )
        defaults = block_settings(target, settings.num_attention_heads, settings.rope_scaling, settings.head_dim)
        own = {"aux_layer_ids": aux_layer_ids, "mask_token_id": mask_token(target, settings.mask_token_id)}
        head = cls(cls.Config.from_plain(defaults | settings.model_dump(exclude_none=True) | own))
        begin(head, target, token_counts, closely=True)
        return head

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any], weights: dict[str, Tensor]) -> Self:
        made = cls.Config.from_plain(config)
        part = made.draft_vocab_size is not None
        head = cls(made, read_vocab(weights, made.columns, made.vocab_size) if part else None)
        check_tensors(head.to_checkpoint(), weights)
        head.load_state_dict({name: weights[name] for name in head.state_dict()})
        return head

    def to_checkpoint(self) -> dict[str, Tensor]:
        tables = {} if self.draft_to_target is None else vocab_tables(self.draft_to_target, self.config.vocab_size)
        return self.state_dict() | tables

    @property
    def reserved_ids(self) -> tuple[int, ...]:
        return (self.config.mask_token_id,)

    @torch.no_grad()
    def initialise(self, probe: TargetProbe) -> None:
        """Start from the target's highest auxiliary layer, with the scale of the target's final norm."""
        D = self.config.hidden_size
        self.fc.weight[:, -D:] += torch.eye(D)
        self.fc.weight *= probe.evening
        self.norm.weight.copy_(probe.norm * probe.logit_scale)

    def copying(self, probe: TargetProbe) -> tuple[Attention, AttentionProbe] | None:
        return copy_by_root(self, probe) if len(self.layers) > 1 else None

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Return the context: (..., L * D) auxiliary hidden states -> (..., D)."""
        return self.hidden_norm(self.fc(aux_hidden_states.to(self.norm.weight.dtype)))  # type: ignore[no-any-return]

    def run(self, x: Tensor, cos_sin: CosSin, attends: Sequence[Attend], rows: int) -> Tensor:
        """Run the layers, in training and in drafting, on blocks of `rows` rows: (B, N * R, D) -> (B, N * R, D), after
        the final norm."""
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos_sin, attend, rows)
        return self.norm(x)  # type: ignore[no-any-return]

    def behind(self, roots: Tensor, rows: int, embed_tokens: Callable[[Tensor], Tensor]) -> Tensor:
        """Return blocks (..., rows, D) as the layers read them: roots (..., D), each followed by masks."""
        # Created on the device, because a CUDA graph cannot capture a copy from the host.
        mask_id = roots.new_full((1,), self.config.mask_token_id, dtype=torch.int64)
        mask = embed_tokens(mask_id).to(roots.dtype)
        return torch.cat([roots[..., None, :], mask.expand(*roots.shape[:-1], rows - 1, -1)], -2)

    # Training

    def counts(self, rows: Rows) -> Tensor:
        blocks = draw_blocks(rows, self.config.num_anchors)
        return blocks.labels(rows, self.depth)[1].sum((0, 1)).float()

    def loss_scale(self, counts: Tensor) -> Tensor:
        weights = counts.new_tensor(self.depth_weights)
        return torch.ones_like(weights) if self.weighs_rows else weights / (weights * counts).sum().clamp(min=1)

    def unroll(self, batch: Batch, blocks: Blocks, rows: int) -> BlockStates:
        """Return the states of B * N blocks of `rows` rows."""
        config, anchors = self.config, blocks.anchors
        (B, N), T = anchors.shape, batch.tokens.shape[1]
        context = self.fuse(batch.aux_hidden_states)  # (B, T, D)
        # Residuals have autocast's dtype, if it is enabled, as in drafting.
        roots = batch.embeddings.gather(1, anchors[..., None].expand(-1, -1, config.hidden_size))
        x = self.behind(roots, rows, batch.shared.embed_tokens).to(context.dtype).flatten(1, 2)  # (B, N * R, D)
        row = torch.arange(rows, device=anchors.device)
        own_positions = (batch.positions.gather(1, anchors)[..., None] + row).flatten(1)
        known, own = (self.cos_sin(positions, x.dtype) for positions in (batch.positions, own_positions))
        starts = blocks.starts(batch.documents)
        sights = {reach: Sight(starts, anchors, rows, T, reach) for reach in set(self.reaches)}
        attends = []
        for layer, reach in zip(cast(Any, self.layers), self.reaches, strict=True):
            keys, values = layer.self_attn.keys(context, known)
            attends.append(partial(block_attention, context_k=keys, context_v=values, sight=sights[reach]))
        states = self.run(x, own, attends, rows).view(B * N, rows, -1)
        before = (anchors - 1).clamp_min(0)[..., None].expand(-1, -1, config.hidden_size)
        newest = context.gather(1, before).flatten(0, 1)
        return BlockStates(states, batch.tokens.gather(1, anchors).flatten(), newest, batch.shared.embed_tokens)

    def beside(self, states: Tensor, previous: Tensor) -> dict[str, Any]:
        """Return further arguments of `block_loss`, from states (M, K, D) and the true token before each label
        (M, K)."""
        return {}

    def conditioned(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        """Return the logits (..., V) of one row of a block, conditioned on the drafted token before it, `previous`
        (...). states (..., D): of the row."""
        return logits

    def follow(self, logits: Tensor, block: BlockStates) -> Follow:
        """Return the function that conditions the logits (M, K, V) of a block's drafting rows on the tokens drafted.
        By default a row depends on the token before it alone."""
        states = block.states[:, self.first_row :]

        def after(path: Tensor) -> Tensor:
            W, k = path.shape[1], path.shape[2] - 1
            made = self.conditioned(logits[:, k, None], states[:, k, None].expand(-1, W, -1), path[..., k])
            return made.expand(-1, W, -1)

        return after

    def losses(self, block: BlockStates, previous: Tensor, task: BlockTask, lm_head_weight: Tensor) -> BlockLoss:
        """Return the loss of blocks. previous (M, K): the true token before each label."""
        states = block.states[:, self.first_row :]
        return block_loss(states, lm_head_weight, task, **self.beside(states, previous))

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        blocks = draw_blocks(batch, self.config.num_anchors)
        slots, valid = (x.flatten(0, 1) for x in blocks.labels(batch, self.depth))  # (M, K)
        block = self.unroll(batch, blocks, self.config.block_size)
        B, T = batch.tokens.shape
        row = torch.arange(B, device=slots.device).repeat_interleave(blocks.anchors.shape[1])[:, None]
        before = row * T + slots - 1
        assert batch.shared.lm_head_weight is not None
        task = BlockTask(
            labels=batch.tokens[row, slots],
            valid=valid,
            teacher=before,
            hidden=batch.hidden.flatten(0, 1),
            target_logits=batch.shared.lm_head,
            weights=scale,
            terms=self.terms,
            pace=self.weighs_rows,
            confidence_weight=self.confidence_weight,
        )
        found = self.losses(block, batch.tokens.flatten()[before], task, batch.shared.lm_head_weight)
        correct = found.correct.sum(0).float()
        return HeadLoss(found.loss, found.sums, correct, found.weight if self.weighs_rows else None)

    @torch.no_grad()
    def foresees(self, batch: Batch, depth: int) -> Tensor:
        if depth > self.depth:
            raise UserError(f"depth {depth}: the head drafts {self.depth} tokens at most")
        assert batch.shared.lm_head_weight is not None
        block = self.unroll(batch, all_blocks(batch.documents), depth + self.first_row)
        matrix = batch.shared.lm_head_weight.to(block.states.dtype)
        ahead = [batch.tokens.roll(-1 - k, dims=1)[:, :-1] for k in range(depth + 1)]  # the root, then the labels
        paths = torch.stack(ahead, -1).flatten(0, 1)  # (M, depth + 1)
        hits = []
        for part in chunks_of(len(paths), depth, len(matrix), paths.device):
            some = replace(block, states=block.states[part], roots=block.roots[part], newest=block.newest[part])
            rows = some.states[:, self.first_row :].flatten(0, 1)
            follow = self.follow(matmul(rows, matrix.T).unflatten(0, (-1, depth)), some)
            path = paths[part, None]
            hits.append([follow(path[..., : k + 1])[:, 0].argmax(-1) == path[:, 0, k + 1] for k in range(depth)])
        found = torch.stack([torch.cat(of_depth) for of_depth in zip(*hits, strict=True)])  # (depth, M)
        return nn.functional.pad(found.view(depth, len(batch.tokens), -1), (0, 1))

    # Drafting. Slot p of a layer's cache holds its key of the context at position p. A block's keys go to the slots
    # from the root's onward, and are overwritten when tokens are observed there.

    def check_draft(self, shape: TreeShape, capacity: int) -> None:
        if shape.depth > self.depth:
            raise UserError(
                f"tree {shape}: {shape.depth} levels, the head drafts {self.depth} in a block of "
                f"{self.config.block_size}; ask for no more"
            )
        check_width(shape, self.config.columns)

    @torch.no_grad()
    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> BlockState:
        self.check_draft(shape, capacity)
        config, norm = self.config, self.norm.weight
        assert shared.lm_head_weight is not None
        lm_head_weight = (
            shared.lm_head_weight if self.draft_to_target is None else shared.lm_head_weight[self.draft_to_target]
        )
        form = config.num_key_value_heads, config.head_dim
        state = BlockState(
            self,
            shape,
            batch_size=batch_size,
            slots=capacity + config.block_size + 1,
            layers=len(self.layers),
            forms=(form, form),
            lm_head_weight=lm_head_weight,
            embed=shared.embed_tokens,
        )
        state.newest = norm.new_zeros(batch_size, config.hidden_size)
        return state

    @torch.no_grad()
    def extend(self, state: BlockState, observation: Observation) -> None:
        mapping = PrefillSlots(observation.start, observation.count, state.slot, observation.hidden.shape[1])
        state.cache.set_slots(mapping.slots, extent=len(state.slot))
        context, cos_sin = state.head.fuse(observation.aux_hidden_states), state.cos_sin(mapping.positions)  # (B, M, D)
        for i, layer in enumerate(state.head.layers):
            state.write(i, *layer.self_attn.keys(context, cos_sin))
        copy_last(state.newest, context, observation.count)
        advance_root(state, observation)

    @torch.no_grad()
    def draft_states(self, state: BlockState) -> BlockStates:
        """Return the states of one block per root."""
        rows = state.shape.depth + self.first_row
        positions = state.length[:, None] + state.slot[:rows]  # (B, R)
        extent = state.extent(rows)
        own, slot = positions[..., None], state.slot[:extent]

        state.cache.set_slots(positions, extent=extent)

        def mask(reach: Reach) -> Tensor:
            last = own if reach.causal else own[:, -1:].expand_as(own)
            visible = slot <= last if reach.window is None else (slot <= last) & (slot > own - reach.window)
            return additive(visible, self.norm.weight.dtype)[:, 0]

        masks = {reach: mask(reach) for reach in set(self.reaches)}  # (B, R, E) each
        x = self.behind(state.embed(state.root), rows, state.embed).to(self.norm.weight.dtype)
        attends = [partial(state.attend, i, masks[reach]) for i, reach in enumerate(self.reaches)]
        out: Tensor = state.head.run(x, state.cos_sin(positions), attends, rows)
        return BlockStates(out, state.root, state.newest, state.embed)

    @torch.no_grad()
    def propose(self, state: BlockState, pick: Pick) -> Proposal:
        block, root = self.draft_states(state), state.root[:, None, None]
        follow = state.head.follow(state.lm_head(block.states[:, self.first_row :]), block)
        known: list[Tensor] = []  # tokens of the expanded nodes, level by level

        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            known.append(tokens)
            path = torch.cat(known, 1).gather(1, paths.flatten(1)).view_as(paths)
            return follow(torch.cat([root.expand(-1, tokens.shape[1], 1), path], 2))  # type: ignore[no-any-return]

        return grow(state.shape, state.root, state.length, follow(root), pick, expand, self.draft_to_target)

    def step_cost(self, batch_size: int, length: int, *, width: int, most: int) -> StepCost:
        config, sizes, N = self.config, Widths.of(self.config), batch_size * length
        R = batch_size * min(config.num_anchors, length)
        rows, layers = R * config.block_size, config.num_layers
        context = flops(*(part for name, part in self.named_modules() if name.endswith(("k_proj", "v_proj"))))
        work = rows * (flops(self) - flops(self.fc))
        work += N * (context + flops(self.fc) * 2 / 3)  # the features need no gradient
        work += (
            layers * rows * 2 * (ATTENTION_PRODUCTS + 1) * sizes.queries * (length / 2 + config.block_size)
        )  # one more again
        kept = layers * (rows * width * sizes.kept(4, 4, 3) + N * width * 3 * sizes.keys)
        kept += N * width * (2 + len(self.aux_layer_ids)) * config.hidden_size
        # The loss forms the gradients of a head's own tables.
        kept += sum(p.numel() * p.element_size() for p in self.parameters() if len(p) == config.vocab_size)
        K = self.depth
        return StepCost(work, kept, R, config.columns, K * R, K * R, 2 * width * sizes.inner * rows)
