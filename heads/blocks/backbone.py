"""Heads that draft a whole block in one pass (DFlash, arXiv 2602.06036): training at anchors, and drafting.

    c_p  = hidden_norm(fc [auxiliary states of position p])              context, computed once for each known position
    x    = [e(x_a), e(MASK), ..., e(MASK)]                                block: the root at position a, then masks
    each layer:  u = input_layernorm(x);  keys and values = W [c ; u];  x += attention(u);  x += mlp(norm(x))
    q_k  = softmax(lm_head norm(x_j))                                     the k-th draft token, j = k + first_row

All rows of a block see each other (`causal`: only rows up to their own) and the context strictly before the root,
because the root's own features do not exist yet. Row j of a block is at rotary position a + j. Embeddings and output
head are the target's, and frozen.

A correction, in a file of its own, conditions the logits of a block's rows on the tokens drafted before: `condition` in
drafting, and in training `row_losses`, on the true tokens.

Training draws the anchors of blocks in each row of a batch. The loss of a block's row has the weight exp(-k / gamma) or
D-PACE's (arXiv 2605.18810). The sum over all rows, micro-batches and processes is divided by the sum of the weights.

Letters: B batch, T tokens, D hidden, V vocabulary, L auxiliary layers, K depth, N blocks of a row, R rows of a block, M
blocks, W paths of tokens in each block, E cache slots that are read.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from heads.blocks.block_attention import (
    AttentionWindow,
    Blocks,
    BlockVisibility,
    all_blocks,
    block_attention,
    draw_blocks,
)
from heads.blocks.block_config import DraftBlockConfig
from heads.blocks.block_initial_weights import copy_by_root
from heads.blocks.block_loss import (
    BlockStates,
    BlockTask,
    Labels,
    RowLosses,
    block_loss,
    chunks_of,
    draft_distribution,
    row_losses,
)
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
from heads.core.strict_settings import SAVED
from heads.core.tree import Pick, Proposal, TreeShape, check_width
from heads.kernels.slots import PrefillSlots
from heads.kernels.tree_attention import Attend
from heads.methods.method_settings import DraftBlockSettings
from heads.parts.head_shape import block_settings, check_aux_layer_ids, check_one_width, mask_token, spread_layer_ids
from heads.parts.initial_weights import AttentionProbe, TargetProbe, begin
from heads.parts.layers import Attention, DecoderLayer, NormedAttention, RMSNorm, check_tensors
from heads.parts.losses import matmul
from heads.parts.part_settings import D_PACE, LABELS
from heads.parts.rotary import CosSin, rotary_of
from heads.parts.slot_state import SlotState, advance_root, copy_last
from heads.parts.step_cost import ATTENTION_PRODUCTS, Widths, flops
from heads.parts.tree_growth import grow
from heads.parts.vocab import read_vocab, vocab_tables
from heads.targets.frozen_target import FrozenTarget
from heads.targets.masks import additive

BACKBONE = ("fc", "hidden_norm", "layers", "norm")
"""Modules that all block heads have. The others are a correction's."""
NextLogits = Callable[[Tensor, Tensor], Tensor]
"""(tokens (M, W, k + 1) of W paths in each of M blocks, from the root on; which paths of the call before they continue
(M, W) int64) -> logits (M, W, V) of the k-th draft token, which follows them. Called for k = 0, 1, ... in turn."""


class BlockState(SlotState):
    newest: Tensor  # (B, D), see `BlockStates`


class DraftBlockHead(nn.Module, DraftHead):
    """Base class of heads that draft a block in one pass."""

    Config: ClassVar[type[DraftBlockConfig]]
    config: Any
    terms: Sequence[tuple[float, str]]
    """Factor and name of each divergence in the loss: one of `heads.parts.losses.LOSSES`, or `labels`."""
    training_settings = frozenset({"num_anchors", "gamma", "weights"})
    """Settings that affect only the training."""

    def __init__(self, config: DraftBlockConfig, draft_to_target: Tensor | None = None) -> None:
        """draft_to_target (Vd,) int64: the target ids of a draft vocabulary, ascending."""
        super().__init__()
        D = config.hidden_size
        L = len(config.aux_layer_ids)
        self.config = config
        self.aux_layer_ids = config.aux_layer_ids
        self.first_row = config.first_row
        self.weighs_rows = config.weights == D_PACE
        exponents = range(config.depth)
        self.depth_weights = tuple(1.0 if self.weighs_rows else math.exp(-k / config.gamma) for k in exponents)
        self.fc = nn.Linear(L * D, D, bias=False)
        self.hidden_norm = RMSNorm(D, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.make_layer(NormedAttention(config)) for _ in range(config.num_layers))
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.windows = config.windows
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
    def from_checkpoint(cls, config: dict[str, object], weights: dict[str, Tensor]) -> Self:
        checked = cls.Config.from_plain(config, SAVED)
        vocab = None
        if checked.draft_vocab_size is not None:
            vocab = read_vocab(weights, checked.draft_vocab_size, checked.vocab_size)
        head = cls(checked, vocab)
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

    def masked_inputs(self, roots: Tensor, rows: int, embed_tokens: Callable[[Tensor], Tensor]) -> Tensor:
        """Return blocks (..., rows, D) as the layers read them: roots (..., D), each followed by masks."""
        # Created on the device, because a CUDA graph cannot capture a copy from the host.
        mask_id = roots.new_full((1,), self.config.mask_token_id, dtype=torch.int64)
        mask = embed_tokens(mask_id).to(roots.dtype)
        return torch.cat([roots[..., None, :], mask.expand(*roots.shape[:-1], rows - 1, -1)], -2)

    # What a correction replaces

    def correction(self) -> list[Tensor]:
        """Return the correction's trained weights. Each is read from its module, where ZeRO-3 gathers it."""
        parts = (part for name, child in self.named_children() if name not in BACKBONE for part in child.modules())
        weights = (getattr(part, name) for part in parts for name in part._parameters)
        return [weight for weight in weights if weight is not None and weight.requires_grad]

    @property
    def reads_target(self) -> bool:
        """True if the loss compares with the target's distribution."""
        return any(name != LABELS for _, name in self.terms)

    def row_losses(self, logits: Tensor, block: BlockStates, labels: Labels) -> RowLosses:
        """Return the losses of the drafting rows of C blocks, from the true tokens before each label. logits (C, K, V):
        of the output head, in the dtype of the states."""
        return row_losses(draft_distribution(logits), self.terms, labels)

    def condition(self, logits: Tensor, block: BlockStates) -> NextLogits:
        """Return the function that conditions the output head's logits (M, K, V) of the drafting rows on the tokens
        drafted. By default a row depends on the token before it alone."""
        states = block.rows

        def next_logits(path: Tensor, parents: Tensor) -> Tensor:
            W = path.shape[1]
            k = path.shape[2] - 1
            row = states[:, k, None].expand(-1, W, -1)
            return self.conditioned(logits[:, k, None], row, path[..., k]).expand(-1, W, -1)

        return next_logits

    def conditioned(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        """Return the logits (..., V) of one row of a block, conditioned on the drafted token before it, `previous`
        (...). states (..., D): of the row."""
        return logits

    def correction_flops(self) -> int:
        """Return the operations of a correction for a block, beyond those of its linear layers for each row."""
        return 0

    # Training

    def counts(self, rows: Rows) -> Tensor:
        blocks = draw_blocks(rows, self.config.num_anchors)
        return blocks.labels(rows, self.depth)[1].sum((0, 1)).float()

    def loss_scale(self, counts: Tensor) -> Tensor:
        weights = counts.new_tensor(self.depth_weights)
        return torch.ones_like(weights) if self.weighs_rows else weights / (weights * counts).sum().clamp(min=1)

    def unroll(self, batch: Batch, blocks: Blocks, rows: int) -> BlockStates:
        """Return the states of B * N blocks of `rows` rows."""
        D = self.config.hidden_size
        anchors = blocks.anchors
        (B, N), T = anchors.shape, batch.tokens.shape[1]
        context = self.fuse(batch.aux_hidden_states)  # (B, T, D)
        # Residuals have autocast's dtype, if it is enabled, as in drafting.
        roots = batch.embeddings.gather(1, anchors[..., None].expand(-1, -1, D))
        inputs = self.masked_inputs(roots, rows, batch.shared.embed_tokens).to(context.dtype)
        row = torch.arange(rows, device=anchors.device)
        of_rows = (batch.positions.gather(1, anchors)[..., None] + row).flatten(1)
        cos_sin_context = self.cos_sin(batch.positions, context.dtype)
        cos_sin_rows = self.cos_sin(of_rows, context.dtype)
        starts = blocks.starts(batch.documents)
        visible = {window: BlockVisibility(starts, anchors, rows, T, window) for window in set(self.windows)}
        attends = []
        for layer, window in zip(cast(Any, self.layers), self.windows, strict=True):
            keys, values = layer.self_attn.keys(context, cos_sin_context)
            attends.append(partial(block_attention, context_k=keys, context_v=values, visible=visible[window]))
        states = self.run(inputs.flatten(1, 2), cos_sin_rows, attends, rows).view(B * N, rows, D)
        before = (anchors - 1).clamp_min(0)[..., None].expand(-1, -1, D)
        newest = context.gather(1, before).flatten(0, 1)
        roots = batch.tokens.gather(1, anchors).flatten()
        drafting = self.config.drafting(rows)
        return BlockStates(states, roots, newest, batch.shared.embed_tokens, drafting)

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        blocks = draw_blocks(batch, self.config.num_anchors)
        slots, valid = (x.flatten(0, 1) for x in blocks.labels(batch, self.depth))  # (M, K)
        block = self.unroll(batch, blocks, self.config.block_size)
        B, T = batch.tokens.shape
        row = torch.arange(B, device=slots.device).repeat_interleave(blocks.anchors.shape[1])[:, None]
        task = BlockTask(
            batch=batch,
            slots=row * T + slots,
            valid=valid,
            weights=scale,
            pace=self.weighs_rows,
            reads_target=self.reads_target,
        )
        return block_loss(self.row_losses, block, task, self.correction)

    @torch.no_grad()
    def chain_hits(self, batch: Batch, depth: int) -> Tensor:
        if depth > self.depth:
            raise UserError(f"depth {depth}: the head drafts {self.depth} tokens at most")
        assert batch.shared.lm_head_weight is not None
        block = self.unroll(batch, all_blocks(batch.documents), depth + self.config.spare_rows)
        matrix = batch.shared.lm_head_weight.to(block.states.dtype)
        ahead = [batch.tokens.roll(-1 - k, dims=1)[:, :-1] for k in range(depth + 1)]  # the root, then the labels
        paths = torch.stack(ahead, -1).flatten(0, 1)  # (M, depth + 1)
        hits = []
        for part in chunks_of(len(paths), depth, len(matrix), paths.device):
            some = block.part(part)
            path = paths[part, None]
            logits = matmul(some.rows.flatten(0, 1), matrix.T).unflatten(0, (-1, depth))
            next_logits = self.condition(logits, some)
            only = torch.zeros_like(path[..., 0])
            best = [next_logits(path[..., : k + 1], only)[:, 0].argmax(-1) for k in range(depth)]
            hits.append(torch.stack(best) == path[:, 0, 1:].T)
        return nn.functional.pad(torch.cat(hits, 1).view(depth, len(batch.tokens), -1), (0, 1))

    # Drafting. Slot p of a layer's cache holds its key of the context at position p. A block's keys go to the slots
    # from the root's onward, and are overwritten when tokens are observed there.

    def check_draft(self, shape: TreeShape) -> None:
        if shape.depth > self.depth:
            raise UserError(
                f"tree {shape}: {shape.depth} levels, the head drafts {self.depth} in a block of "
                f"{self.config.block_size}; ask for no more"
            )
        check_width(shape, self.config.candidates)

    @torch.no_grad()
    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> BlockState:
        self.check_draft(shape)
        config = self.config
        rows = self.draft_to_target
        assert shared.lm_head_weight is not None
        form = config.num_key_value_heads, config.head_dim
        state = BlockState(
            self,
            shape,
            batch_size=batch_size,
            slots=capacity + config.block_size + 1,
            layers=len(self.layers),
            forms=(form, form),
            lm_head_weight=shared.lm_head_weight if rows is None else shared.lm_head_weight[rows],
            embed=shared.embed_tokens,
        )
        state.newest = self.norm.weight.new_zeros(batch_size, config.hidden_size)
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
        rows = state.shape.depth + self.config.spare_rows
        dtype = self.norm.weight.dtype
        positions = state.length[:, None] + state.slot[:rows]  # (B, R)
        extent = state.extent(rows)
        own = positions[..., None]
        slot = state.slot[:extent]
        state.cache.set_slots(positions, extent=extent)

        def mask(window: AttentionWindow) -> Tensor:
            last = own if window.causal else own[:, -1:].expand_as(own)
            visible = slot <= last if window.size is None else (slot <= last) & (slot > own - window.size)
            return additive(visible, dtype)[:, 0]  # (B, R, E)

        masks = {window: mask(window) for window in set(self.windows)}
        attends = [partial(state.attend, i, masks[window]) for i, window in enumerate(self.windows)]
        inputs = self.masked_inputs(state.embed(state.root), rows, state.embed).to(dtype)
        states = state.head.run(inputs, state.cos_sin(positions), attends, rows)
        return BlockStates(states, state.root, state.newest, state.embed, self.config.drafting(rows))

    @torch.no_grad()
    def propose(self, state: BlockState, pick: Pick) -> Proposal:
        block = self.draft_states(state)
        root = state.root[:, None, None]
        next_logits = state.head.condition(state.lm_head(block.rows), block)
        expanded: list[Tensor] = []  # tokens of the expanded nodes, level by level

        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            expanded.append(tokens)
            path = torch.cat(expanded, 1).gather(1, paths.flatten(1)).view_as(paths)
            logits: Tensor = next_logits(torch.cat([root.expand(-1, tokens.shape[1], 1), path], 2), rows)
            return logits

        first = next_logits(root, torch.zeros_like(root[..., 0]))
        return grow(state.shape, state.root, state.length, first, pick, expand, self.draft_to_target)

    def step_cost(self, batch_size: int, length: int, *, width: int, most: int) -> StepCost:
        config = self.config
        sizes = Widths.of(self.config)
        N = batch_size * length
        R = batch_size * min(config.num_anchors, length)
        rows = R * config.block_size
        layers = config.num_layers
        context = flops(*(part for name, part in self.named_modules() if name.endswith(("k_proj", "v_proj"))))
        work = rows * (flops(self) - flops(self.fc)) + R * self.correction_flops()
        work += N * (context + flops(self.fc) * 2 / 3)  # the features need no gradient
        work += (
            layers * rows * 2 * (ATTENTION_PRODUCTS + 1) * sizes.queries * (length / 2 + config.block_size)
        )  # one more again
        kept = layers * (rows * width * sizes.kept(4, 4, 3) + N * width * 3 * sizes.keys)
        kept += N * width * (2 + len(self.aux_layer_ids)) * config.hidden_size
        # The loss forms the gradients of a head's own tables.
        kept += sum(p.numel() * p.element_size() for p in self.parameters() if len(p) == config.vocab_size)
        K = self.depth
        return StepCost(work, kept, R, config.num_logits, K * R, K * R, 2 * width * sizes.inner * rows)
