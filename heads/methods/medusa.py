"""Medusa (Cai et al., arXiv 2401.10774): K heads on the target's last hidden state, independent of each other.

    head k = 1..K:  q_k = softmax(W2_k z_k),  z_k = h_t, then num_layers times  z_k <- z_k + SiLU(W1 z_k + b1)

h_t is the hidden state after the final norm, and head k predicts x_{t+1+k}. W1 and b1 start at zero and W2_k as the
target's output head. Loss = sum over k of depth_decay^k * cross-entropy of x_{t+1+k} (section 2.2.1), or a divergence
from the target's distribution of that token. On text sampled from the target it is the same on average, and less noisy.

Level k of a tree holds the likeliest tokens of head k, the same below every node. If the root is x_{t+1}, the runtime's
newest hidden state is h_t, so head k drafts the k-th token after the root, as in training.

Letters: B batch, T tokens, D hidden, Vd draft vocabulary, K depth, R labels.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

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
from heads.core.tree import Pick, Proposal, TreeShape, check_width
from heads.kernels.product import with_products
from heads.methods.method_settings import MedusaSettings
from heads.parts.head_shape import check_one_width
from heads.parts.initial_weights import UNSURE
from heads.parts.labels import counts_by_depth, label_slots, supervised, teacher
from heads.parts.layers import check_tensors
from heads.parts.losses import draft_loss
from heads.parts.slot_state import advance_root, copy_last
from heads.parts.step_cost import flops
from heads.parts.tree_growth import grow
from heads.parts.vocab import build_vocab, check_table
from heads.targets.frozen_target import FrozenTarget

MAX_RANKS = 32
"""Maximum number of candidates of one head that a tree may use."""

Path = tuple[int, ...]


def likeliest_paths(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[Path, ...]:
    """Return the paths of the `nodes` likeliest nodes, counting the root, which has no path.

    accuracies (K, R). Returns fewer paths if all other nodes have accuracy 0, but at least one. Ties go to the shorter
    path, then to the better ranks.
    """
    paths: list[Path] = []
    heap: list[tuple[float, int, Path]] = [(-accuracy, 1, (rank,)) for rank, accuracy in enumerate(accuracies[0])]
    heapq.heapify(heap)
    while heap and len(paths) < nodes - 1:
        negative, depth, path = heapq.heappop(heap)
        if negative == 0 and paths:
            break
        paths.append(path)
        if depth < len(accuracies):
            for rank, accuracy in enumerate(accuracies[depth]):
                heapq.heappush(heap, (negative * accuracy, depth + 1, (*path, rank)))
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


AHEAD = 2
"""Depth 0, head 1 in the paper, predicts the token at t + AHEAD."""


class MedusaConfig(MedusaSettings):
    """Everything that the head's function and its training loss depend on, and its static tree."""

    hidden_size: Count
    vocab_size: Count
    """Size of the target's vocabulary, the width of its logits."""
    draft_vocab_size: Count
    tree: tuple[Path, ...] | None = None
    """Static tree, each node except the root as the ranks on its path; None before it is measured."""


@dataclass
class MedusaState:
    """Static tensors of one batch of sequences."""

    shape: TreeShape
    root: Tensor  # (B,) int64
    length: Tensor  # (B,) int64, the root's position
    hidden: Tensor  # (B, D), the target's state before the root
    levels: list[nn.Module]
    """For each depth, the head with products in place of linear layers: (B, D) -> logits (B, Vd)."""


class ResidualBlock(nn.Module):
    """Residual block: z + SiLU(W1 z + b1)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, z: Tensor) -> Tensor:
        update = silu(self.linear(z))
        return z.to(update.dtype) + update  # autocast's dtype, if it is enabled


class Medusa(nn.Module, DraftHead):
    """Medusa head. The paper's own repository uses the same tensor names."""

    config: MedusaConfig
    draft_to_target: Tensor

    def __init__(self, config: MedusaConfig, draft_to_target: Tensor) -> None:
        """draft_to_target (Vd,) int64: the target ids of the draft vocabulary, ascending."""
        super().__init__()
        D = config.hidden_size
        self.config = config
        self.tree_nodes = config.tree_nodes
        self.depth_weights = tuple(config.depth_decay**k for k in range(config.depth))
        # Blocks, then the output head: this numbers the tensors as the paper's repository does.
        self.heads: Any = nn.ModuleList()
        for _ in range(config.depth):
            blocks = [ResidualBlock(D) for _ in range(config.num_layers)]
            self.heads.append(nn.Sequential(*blocks, nn.Linear(D, config.draft_vocab_size, bias=False)))
        self.register_buffer("draft_to_target", draft_to_target, persistent=False)

    @classmethod
    def for_target(cls, settings: MedusaSettings, target: FrozenTarget, token_counts: Tensor) -> "Medusa":
        check_one_width(target, "medusa")
        D = target.hidden_size
        V = target.vocab_size
        defaults = {"hidden_size": D, "vocab_size": V, "draft_vocab_size": V}
        config = MedusaConfig.from_plain(defaults | settings.model_dump(exclude_none=True))
        head = cls(config, build_vocab(token_counts, config.draft_vocab_size))
        head.initialise(target.lm_head_weight)
        for medusa_head in head.heads:
            medusa_head[-1].weight.data.mul_(UNSURE * target.logit_scale)
        return head

    @classmethod
    def from_checkpoint(cls, config: dict[str, object], weights: dict[str, Tensor]) -> "Medusa":
        head_config = MedusaConfig.from_plain(config, SAVED)
        V = head_config.vocab_size
        Vd = head_config.draft_vocab_size
        draft_to_target = torch.arange(V)
        if Vd != V:
            check_table(weights, "token_map", (Vd,), torch.int64)
            draft_to_target = weights["token_map"]
            if not torch.equal(draft_to_target.clamp(0, V - 1).unique(), draft_to_target):
                raise UserError(f"token_map: expected ascending target ids below {V}")
        head = cls(head_config, draft_to_target)
        check_tensors(head.to_checkpoint(), weights)
        head.heads.load_state_dict({name: weights[name] for name in head.heads.state_dict()})
        return head

    def to_checkpoint(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = self.heads.state_dict()
        if len(self.draft_to_target) < self.config.vocab_size:  # engines want no table if it keeps all tokens
            weights["token_map"] = self.draft_to_target
        return weights

    @property
    def tree(self) -> tuple[Path, ...] | None:
        return self.config.tree if self.tree_nodes else None

    @torch.no_grad()
    def initialise(self, lm_head: Tensor) -> None:
        """Start every head as the target's own output head, lm_head (V, D), on the unchanged state."""
        for head in self.heads:
            for parameter in head[:-1].parameters():
                nn.init.zeros_(parameter)
            head[-1].weight.copy_(lm_head[self.draft_to_target.to(lm_head.device)])

    def step(self, hidden: Tensor, k: int) -> Tensor:
        """Return the input of depth k's output head, (..., D) hidden states -> (..., D); the same in training and
        drafting."""
        return self.heads[k][:-1](hidden)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor, k: int) -> Tensor:
        return self.heads[k](hidden.to(self.heads[k][-1].weight.dtype))  # type: ignore[no-any-return]

    def counts(self, rows: Rows) -> Tensor:
        return counts_by_depth(rows, AHEAD, self.depth)

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        row, label, slots, valid = label_slots(batch, AHEAD, self.depth)
        hidden, target_logits = teacher(batch, row, label, self.config.loss, self.config.vocab_size)
        return draft_loss(
            torch.stack([self.step(batch.hidden[row, slots[k]], k) for k in range(self.depth)]),
            [head[-1].weight for head in self.heads],
            valid,
            hidden,
            target_logits,
            self.draft_to_target,
            scale,
            loss=self.config.loss,
        )

    def check_draft(self, shape: TreeShape) -> None:
        if shape.depth > self.depth:
            raise UserError(f"tree {shape}: {shape.depth} levels, the head has {self.depth} heads; ask for no more")
        check_width(shape, self.config.draft_vocab_size)

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> MedusaState:
        self.check_draft(shape)
        ids = self.draft_to_target.new_zeros(2, batch_size)
        return MedusaState(
            shape,
            root=ids[0],
            length=ids[1],
            hidden=self.heads[0][-1].weight.new_zeros(batch_size, self.config.hidden_size),
            levels=[with_products(head) for head in self.heads[: shape.depth]],
        )

    @torch.no_grad()
    def extend(self, state: MedusaState, observation: Observation) -> None:
        copy_last(state.hidden, observation.hidden, observation.count)
        advance_root(state, observation)

    @torch.no_grad()
    def propose(self, state: MedusaState, pick: Pick) -> Proposal:
        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            logits: Tensor = state.levels[level](state.hidden)
            return logits[:, None].expand(-1, tokens.shape[1], -1)

        ids = self.draft_to_target if len(self.draft_to_target) < self.config.vocab_size else None
        first = state.levels[0](state.hidden)[:, None]
        return grow(state.shape, state.root, state.length, first, pick, expand, ids)

    def step_cost(self, batch_size: int, length: int, *, width: int, most: int) -> StepCost:
        N = batch_size * length
        K = self.depth
        layers = self.config.num_layers
        outputs = [head[-1] for head in self.heads]
        kept = K * N * self.config.hidden_size * (4 + 2 * width * layers)
        return StepCost(
            N * (flops(self) - flops(*outputs)), kept, N, len(self.draft_to_target), K * N, N, outputs=outputs
        )

    @torch.no_grad()
    def chain_hits(self, batch: Batch, depth: int) -> Tensor:
        if depth > self.depth:
            raise UserError(f"depth {depth}: the head has {self.depth} heads")
        guesses = [self.draft_to_target[self.logits(batch.hidden, k).argmax(-1)] for k in range(depth)]
        return torch.stack([guess == batch.tokens.roll(-AHEAD - k, dims=1) for k, guess in enumerate(guesses)])

    @torch.no_grad()
    def grow_tree(self, batches: Iterable[Batch]) -> None:
        """Choose the static tree from how often each head's i-th candidate is the label, on held-out text."""
        candidates = min(MAX_RANKS, self.config.draft_vocab_size)
        hits = torch.zeros(self.depth, candidates, dtype=torch.float64)
        labels = torch.zeros(self.depth, 1)
        for batch in batches:
            for k in range(self.depth):
                row, label = supervised(batch, AHEAD + k).nonzero(as_tuple=True)
                logits = self.logits(batch.hidden[row, label - AHEAD - k], k)  # (R, Vd)
                drafted = self.draft_to_target[logits.topk(candidates).indices]
                hits[k] += (drafted == batch.tokens[row, label][:, None]).sum(0).cpu()
                labels[k] += len(label)
        accuracies = hits / labels.clamp_min(1)
        self.config = self.config.model_copy(update={"tree": likeliest_paths(accuracies.tolist(), self.tree_nodes)})
