"""The contract between a draft head, the loop that trains it and the runtime that runs it.

Letters: B batch, T tokens, D hidden, V target vocabulary, L auxiliary layers, K depth, M rows of one observation.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

from heads.core.errors import UserError
from heads.core.tree import Pick, Proposal, TreeShape, parse_shape, static_shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SharedLayers:
    """Embeddings and output head of the frozen target, which heads share."""

    embed_tokens: Callable[[Tensor], Tensor]
    """(...) int64 token ids -> (..., D) rows of the embedding table, with the factor that some families multiply them
    by. The factor has no effect on heads that normalise embeddings; block heads use them unnormalised."""
    lm_head: Callable[[Tensor], Tensor]
    """(..., D) hidden state after the final norm -> (..., V) float32 logits, soft cap and scaling applied."""
    lm_head_weight: Tensor | None = None
    """(V, D) matrix of the output head, for heads that compute logits with it or with some of its rows."""


@dataclass(frozen=True)
class Rows:
    """Packed documents, and what is to be predicted of them."""

    tokens: Tensor  # (B, T) int64; 0 in the padding
    loss_mask: Tensor  # (B, T) bool, indexed by the label: True where token x_t is to be predicted
    positions: Tensor  # (B, T) int64, counted from the start of each document, which may be in another row
    documents: Tensor  # (B, T) int64, the number of the document in its row; -1 = padding
    seed: int = field(default=0, kw_only=True)
    """Seed of what a loss draws at random."""
    progress: float = field(default=1.0, kw_only=True)
    """Fraction of the training's steps that are made. 1: all, or there is no training."""


@dataclass(frozen=True)
class Batch(Rows):
    """Rows with the target's features: the input of a head's loss."""

    embeddings: Tensor  # (B, T, D) the target's input embeddings of `tokens`
    aux_hidden_states: Tensor  # (B, T, L * D) the auxiliary hidden states, side by side, ascending
    hidden: Tensor  # (B, T, D) the target's last hidden state after its final norm
    shared: SharedLayers


@dataclass(frozen=True)
class HeadLoss:
    """Loss of one micro-batch. It is scaled, so that it adds up over micro-batches and ranks without further
    division."""

    loss: Tensor  # () float32, sum over depths of scale_k * sums_k; carries the gradient
    sums: Tensor  # (K,) float32, the unscaled loss summed over supervised rows, detached
    correct: Tensor  # (K,) float32, the number of these rows whose likeliest tokens agree, detached
    weight: Tensor | None = None
    """() float32, detached: the sum of the rows' weights, if the weights depend on the head's predictions. `loss` is
    then a plain weighted sum, and the step divides its gradient by the weights of all micro-batches and processes."""


@dataclass(frozen=True)
class Observation:
    """M consecutive target positions for the draft to read: those of a prefill, or those accepted in a round.

    Row j of sequence b describes position start[b] + j. Only the first count[b] rows are valid. The rest is padding,
    which keeps all shapes static. The root is the newest decided token; it is not yet in the target's cache.
    """

    tokens: Tensor  # (B, M + 1) int64, x_start .. x_{start+M}; entry count[b] is the root
    aux_hidden_states: Tensor  # (B, M, L * D)
    hidden: Tensor  # (B, M, D), after the final norm
    start: Tensor  # (B,) int64
    count: Tensor  # (B,) int64, 1 <= count <= M; 0 for a finished row: nothing that is read of its state may change
    nodes: Tensor | None  # (B, M) int64, the proposal's nodes that became these rows; None if nothing was drafted
    unread: bool = False
    """True if another drafter may have drafted the nodes, so that this one may have read none of their tokens."""


@dataclass(frozen=True)
class StepCost:
    """Bytes and operations of a loss and its gradient, apart from weights, features and logits."""

    flops: float
    kept: int
    """Bytes that the layers keep for the backward pass."""
    rows: int
    """Rows with logits at each depth, if every token is a label."""
    logits: int
    """Logits of a row."""
    target_rows: int
    """Rows of the target's logits, which the loss compares with."""
    chunked: int
    """Rows of which the loss takes one chunk after the other."""
    backward: int = 0
    """Bytes of the widest gradients of a layer."""
    outputs: Sequence[nn.Linear] = ()
    """The head's own output heads, whose products belong to the logits."""


@dataclass(frozen=True)
class Origin:
    """Files of a head that another project wrote."""

    form: str
    """Form in which the head was saved."""
    files: Mapping[str, str]
    """SHA-256 of each file with tensors, by file name."""
    differs: tuple[str, ...]
    """Ways in which an engine would load a different head than its trainer meant, one line each."""


class Drafter(ABC):
    """Interface between the runtime and anything that drafts, trained or not."""

    origin: Origin | None = None
    """None for heads made by draftsmith."""
    is_borrowed: bool = False
    """True if all its weights are the target's."""
    aux_layer_ids: tuple[int, ...] = ()
    """Auxiliary layers that the drafter reads, each numbered by the layer that the stream enters; empty if none."""
    skips: bool = False
    """True if a round may leave out passes whose drafts are not needed, where the host may look at the draft: on a CPU,
    for which it does not wait. Parts of a round are timed with all passes."""
    tree_nodes: int = 0
    """Maximum number of nodes, root included, of the static tree that the drafter carries or will grow (the tree name
    `head`); 0 if it has none."""

    @property
    def tree(self) -> tuple[tuple[int, ...], ...] | None:
        """Nodes of that tree except the root, each as the ranks of the children on its path; None before it is
        grown."""
        return None

    @property
    def positions(self) -> int | None:
        """Number of positions of a text for which the drafter was made; None if it does not say."""
        return getattr(getattr(self, "config", None), "max_position_embeddings", None)

    @property
    def vocabulary(self) -> Tensor | None:
        """(Vd,) int64: the target ids that can be drafted; None: all."""
        return getattr(self, "draft_to_target", None)

    def check_draft(self, shape: TreeShape) -> None:
        """Raise UserError for a tree that the drafter cannot draft. Never by default."""
        return

    def longest(self, shape: TreeShape, batch_size: int) -> TreeShape:
        """Return the longest draft that `propose` may return if asked for drafts of `shape`: `shape`, or a longer
        chain."""
        return shape

    @abstractmethod
    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> object:
        """Return the state of `batch_size` sequences of at most `capacity` positions, to draft trees of `shape`. It is
        opaque to the runtime, except for `length` (B,), the positions of the roots. Raises UserError as `check_draft`
        does."""

    def reset_rows(self, state: Any, rows: Tensor) -> None:
        """Reset rows of the batch: `rows` (B,) bool, True where a new sequence begins."""
        state.length.masked_fill_(rows, 0)

    @abstractmethod
    def extend(self, state: Any, observation: Observation) -> None:
        """Read the target's features of known positions. Static shapes, no host synchronisation."""

    @abstractmethod
    def propose(self, state: Any, pick: Pick) -> Proposal:
        """Draft a tree of the state's shape below each root. Static shapes, no host synchronisation."""


class DraftHead(Drafter):
    """A drafter that is trained and saved. Heads inherit from it and from `torch.nn.Module`. `heads.registry` adds a
    head's settings and its format."""

    config: Any
    """Everything that the head's function and its training loss depend on, as plain values in a frozen dataclass.
    Settings that a recipe leaves to the target have the target's values here."""
    depth_weights: tuple[float, ...]
    """Weight of each depth in the training loss; K values."""
    max_activation_bytes: int | None = None
    """Maximum bytes of activations that a loss keeps for its backward pass, if it can recompute them. Values and
    gradients do not depend on it. None: ACTIVATION_SHARE of the device's memory."""
    started: str | None = None
    """What a head that started from one of another kind took, and what began anew; None for any other."""
    weighs_rows: bool = False
    """True if `loss` gives `HeadLoss.weight`, which the step divides the gradients by."""
    tables: tuple[str, ...] = ()
    """Names of matrices with a row or column for each token or position, apart from `nn.Embedding`: optimizers must not
    take them for linear maps. A part of a head may have such a list of its own."""
    stored: Mapping[str, torch.dtype] = MappingProxyType({})
    """Dtypes of the tensors, by their names in the file, of a head that is part of a checkpoint: it is saved in
    these."""

    @property
    def depth(self) -> int:
        """Number K of depths that the head is trained for."""
        return len(self.depth_weights)

    @classmethod
    @abstractmethod
    def for_target(cls, settings: Any, target: Any, token_counts: Tensor) -> Self:
        """Return a new head with a recipe's settings for a FrozenTarget. token_counts (V,): counts of labels in the
        training data."""

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, config: dict[str, object], weights: dict[str, Tensor]) -> Self:
        """Return the head that was saved: weights from `to_checkpoint`, config from `asdict(config)` after JSON. Raises
        UserError if they are damaged."""

    @abstractmethod
    def to_checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors to save, under the names that the method's other implementations use."""

    def round_to(self, dtype: torch.dtype) -> None:
        """Round the weights, in place, to those of a file in this dtype."""
        for value in cast("nn.Module", self).state_dict().values():
            if value.is_floating_point():
                value.copy_(value.to(dtype))

    @abstractmethod
    def counts(self, rows: Rows) -> Tensor:
        """Return (K,) float32: the number of supervised rows at each depth, known before any forward pass. It depends
        only on the labels and, where rows are drawn, on their seed."""

    def loss_scale(self, counts: Tensor) -> Tensor:
        """Return (K,): the factor of each depth's sum, from the counts (K,) of all micro-batches and processes. By
        default the loss is the weighted sum of the depths' means."""
        return counts.new_tensor(self.depth_weights).float() / counts.clamp(min=1)

    @abstractmethod
    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        """Return the loss of one micro-batch. `scale` (K,) float32 multiplies each depth's sum.

        The scale is given in advance because the loss computes its gradient while the logits of a chunk exist.
        """

    @abstractmethod
    def chain_hits(self, batch: Batch, depth: int) -> Tensor:
        """Return (depth, B, T) bool: True at [k, b, t] if a greedy chain with the root x_{t+1} predicts the batch's
        token x_{t+2+k}, given that all its tokens before are right. Uses the training step. Entries past a document's
        end are padding.

        It determines how many tokens of a chain from that root the runtime accepts, without running it.
        """

    def grow_tree(self, batches: Iterable[Batch]) -> None:
        """Choose the head's static tree, of `tree_nodes` nodes, with the labels of held-out text."""

    @abstractmethod
    def step_cost(self, batch_size: int, length: int, *, width: int, most: int) -> StepCost:
        """Return what the loss of a micro-batch of full rows costs, by formulas (`heads.parts.step_cost`) from the
        shapes of the head's tensors, which may have no values. `width`: bytes of a number in a layer; `most`: bytes of
        activations above which a head that can recompute them does so."""

    @property
    def reserved_ids(self) -> tuple[int, ...]:
        """Token ids that the training data may not contain, because the head uses them itself."""
        return ()

    @property
    def language_model(self) -> PreTrainedModel | None:
        """Causal LM that the head consists of, or None. Such a head can generate text, and its config has `lora`."""
        return None


ACTIVATION_SHARE = 1 / 8
"""Fraction of a device's memory that the activations of a loss may use, if it can recompute them."""
HEAD_TREE = "head"
LOOKUP = "lookup:"
LONGEST_MATCH = 100
"""Maximum length of a lookup's match. All lengths up to it are searched."""


def split_draft(text: str) -> tuple[int | None, str]:
    """Split a draft `lookup:M+HEAD` into M and its head. Return None and the text for any other. Raises UserError for
    several lookups or heads, and for a number M that is no length of a match."""
    names = text.partition("@")[0].split("+")
    if len(names) == 1 or os.path.exists(text):  # a folder may have any name
        return None, text
    first, _, head = text.partition("+")
    lookups, number = sum(name.startswith(LOOKUP) for name in names), first.removeprefix(LOOKUP)
    if lookups != 1 or number == first:
        what = {0: "several heads", 1: "a lookup behind a head"}.get(lookups, "several lookups")
        raise UserError(f"{text}: names {what}; expected one lookup, then one head, such as {LOOKUP}3+HEAD")
    if not (number.isdecimal() and 1 <= int(number) <= LONGEST_MATCH):
        raise UserError(
            f"{text}: expected the length of a match, 1 to {LONGEST_MATCH} tokens, got {number or 'nothing'}"
        )
    if not head:
        raise UserError(f"{text}: expected a head after the +, such as {first}+HEAD")
    if "+" in head.partition("@")[0] and not os.path.exists(head):
        raise UserError(f"{text}: names several heads; expected one lookup, then one head")
    return int(number), head


def shape_for(text: str, head: Drafter | None) -> TreeShape:
    """Return the tree shape that a text names for this head. Raises UserError for `head` if the head has no tree of its
    own."""
    if text != HEAD_TREE:
        return parse_shape(text)
    if head is None or not head.tree:
        raise UserError("tree 'head': this head carries no static tree of its own; name one, such as chain:3")
    return static_shape(head.tree, text)


def max_nodes(text: str, head: Drafter) -> int:
    """Return the maximum number of nodes of the tree that a text names for this head, even if it is not grown yet."""
    if text != HEAD_TREE:
        return parse_shape(text).nodes
    if not head.tree_nodes:
        raise UserError("tree 'head': heads of this kind and these settings grow no static tree; name one")
    return head.tree_nodes
