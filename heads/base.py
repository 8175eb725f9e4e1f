"""The contract between a draft head, the loop that trains it and the runtime that runs it.

Letters: B batch, T tokens, D hidden, V target vocabulary, Vd draft vocabulary, L auxiliary layers, K depth, N tree
nodes (root included), M rows of one observation, S cache slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, get_args, get_type_hints

from heads.errors import UserError
from heads.tree import Pick as Pick
from heads.tree import Proposal, TreeShape, parse_shape, static_shape

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from heads.target.frozen import FrozenTarget

Made = TypeVar("Made")


@dataclass(frozen=True)
class SharedLayers:
    """The embeddings and output head of the frozen target that heads share: token ids in, logits out."""

    embed_tokens: Callable[[Tensor], Tensor]
    """(...) int64 token ids -> (..., D) rows of the embedding table, with the factor that some families' tables have.
    Heads that norm them do not see it; block heads begin with them as they are."""
    lm_head: Callable[[Tensor], Tensor]
    """(..., D) hidden state after the final norm -> (..., V) float32 logits, soft cap and scaling applied."""
    lm_head_weight: Tensor | None = None
    """(V, D) the output head's matrix, for heads that read out with it or with some of its rows."""


@dataclass(frozen=True)
class Batch:
    """Packed documents with the target's features; what a head's loss sees."""

    tokens: Tensor  # (B, T) int64
    loss_mask: Tensor  # (B, T) bool, indexed by the label: True where token x_t is to be predicted
    positions: Tensor  # (B, T) int64, counted from the start of each document, which may lie in another row
    documents: Tensor  # (B, T) int64, the number of the document in its row; -1 = padding
    embeddings: Tensor  # (B, T, D) the target's input embeddings of `tokens`
    aux_hidden_states: Tensor  # (B, T, L * D) the auxiliary hidden states, side by side, ascending
    hidden: Tensor  # (B, T, D) the target's last hidden state after its final norm
    shared: SharedLayers


@dataclass(frozen=True)
class HeadLoss:
    """One micro-batch's loss: scaled, so that it adds up over micro-batches and ranks without a further division."""

    loss: Tensor  # () float32, sum over depths of scale_k * sums_k; carries the gradient
    sums: Tensor  # (K,) float32, the unscaled loss summed over supervised rows, detached
    metrics: dict[str, Tensor]
    """name -> (K,) float32 sums over the same rows, detached; `correct` at least (`heads.labels.chain_metrics`)."""
    weight: Tensor | None = None
    """() float32, detached: where rows are weighted by what the head predicts, the sum of their weights. `loss` is then
    a plain weighted sum, and the step divides its gradient by the weights of all micro-batches and processes."""


@dataclass(frozen=True)
class Observation:
    """M consecutive target positions that became known: after a prefill, or after a round was accepted.

    Row j of sequence b describes position start[b] + j. Only the first count[b] rows are true; the rest is padding of
    the right shape, so that every shape stays static. The root is the newest token: decided, not yet in the target's
    cache.
    """

    tokens: Tensor  # (B, M + 1) int64, x_start .. x_{start+M}; entry count[b] is the root
    aux_hidden_states: Tensor  # (B, M, L * D)
    hidden: Tensor  # (B, M, D), after the final norm
    start: Tensor  # (B,) int64
    count: Tensor  # (B,) int64, 1 <= count <= M; 0 for a row that is done: nothing of its state that is read may change
    nodes: Tensor | None  # (B, M) int64, the proposal's nodes that became these rows; None if none was drafted
    missed: bool = False
    """True for rounds that drafted nothing, read later; False for a prompt."""


@dataclass(frozen=True)
class RoundReads:
    """The least that a round reads of a drafter's weights, and what it chooses from."""

    propose: int = 0
    """Bytes, to draft."""
    extend: int = 0
    """Bytes, to take in what was accepted."""
    logits: int = 0
    """Logits that each draft token is chosen from; 0 where there are none."""


class OwnTree(Protocol):
    """A static tree that a head carries, which is what the tree named `head` means."""

    @property
    def tree(self) -> tuple[tuple[int, ...], ...] | None:
        """Each node but the root as the ranks of the children on its path; None before there is one."""

    @property
    def tree_nodes(self) -> int:
        """The most nodes it has or will have, root included."""

    def grow_tree(self, batches: Iterable[Batch]) -> None:
        """Choose the tree by the labels of held-out text."""


@dataclass(frozen=True)
class Origin:
    """A head's files, where another project wrote them."""

    form: str
    """The form in which it was saved."""
    files: Mapping[str, str]
    """The files of its tensors -> SHA-256."""
    differs: tuple[str, ...]
    """Ways in which an engine would read another head than its trainer meant, a line each."""


class Drafter(Protocol):
    """Whatever drafts, trained or not, as the runtime asks for it; a class that drafts inherits from this one."""

    origin: Origin | None = None
    """None for what draftsmith made."""
    aux_layer_ids: tuple[int, ...] = ()
    """The residual streams it reads, by the number of the layer they enter; empty if none."""

    def check_draft(self, shape: TreeShape, capacity: int) -> None:
        """UserError for a tree that it does not draft, or for sequences of more positions than it reads. None unless a
        class says otherwise."""
        return

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape, backend: Any) -> Any:
        """Caches for `batch_size` sequences of at most `capacity` positions, drafting trees of `shape` by a
        `heads.backends.base.Backend`. UserError as `check_draft` gives it.

        A dataclass, opaque to the runtime but for its `shape`, and `length` (B,), the roots' positions. Its tensors
        change in place only: `dataclasses.replace(state, shape=shorter)` drafts a shorter chain from the same tensors,
        and extending either extends both."""

    def reset_rows(self, state: Any, rows: Tensor) -> None:
        """Forget sequences: `rows` (B,) bool, True where a new sequence begins."""
        state.length.masked_fill_(rows, 0)

    def extend(self, state: Any, observation: Observation) -> None:
        """Take in true target features; static shapes, no host synchronisation."""

    def propose(self, state: Any, pick: Pick) -> Proposal:
        """Draft a tree of the state's shape below each root; static shapes, no host synchronisation."""

    def bytes_per_round(self, state: Any) -> RoundReads:
        """The reads of one round with this state; none unless a class says otherwise."""
        return RoundReads()

    @property
    def own_tree(self) -> OwnTree | None:
        """The static tree that it carries or will grow; None where it has none."""
        return None


class DraftHead(Drafter, Protocol):
    """A drafter that is trained and saved: a module with these members beside a drafter's.

    A method writes all of them but those that have a default here; `heads.registry` adds its settings and its format.
    """

    config: Any
    """Everything that the head's function and its training loss depend on, as plain values: a frozen dataclass, and
    complete. What a recipe leaves out follows the target, and stands here."""
    depth_weights: tuple[float, ...]
    """The weight of each depth in the training loss, K of them."""
    most_kept: int | None = None
    """Most bytes of activations that a loss keeps for its backward pass, where it can compute them twice. Values and
    gradients are the same. None: KEPT_SHARE of the memory of the device that it runs on."""
    weighs_rows: bool = False
    """True if `loss` gives `HeadLoss.weight`, by which a step divides its gradients."""

    @classmethod
    def for_target(cls, settings: Any, target: FrozenTarget, token_counts: Tensor) -> Self:
        """A new head by its settings in a recipe; token_counts (V,): labels in the training data."""

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any], weights: dict[str, Tensor]) -> Self:
        """The head that gave `to_checkpoint`, from `asdict(config)` as JSON gives it back. UserError if damaged."""

    def to_checkpoint(self) -> dict[str, Tensor]:
        """The tensors to save, under the names of the method's own field."""

    def counts(self, loss_mask: Tensor, documents: Tensor) -> Tensor:
        """(K,) float32: supervised rows at each depth, known before any forward pass: a function of the mask, and of
        `torch.initial_seed()` where rows are drawn, which is a function of the step."""

    def loss_scale(self, counts: Tensor) -> Tensor:
        """(K,) what each depth's sum is multiplied by, from the counts (K,) of all micro-batches and processes: the
        weighted sum of the depths' means unless a class says otherwise."""
        return counts.new_tensor(self.depth_weights).float() / counts.clamp(min=1)

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        """The loss of one micro-batch; `scale` (K,) float32 multiplies each depth's sum.

        It is given beforehand because the loss computes its gradient while the logits of a chunk exist.
        """

    def foresees(self, batch: Batch, depth: int) -> Tensor:
        """(depth, B, T) bool: at [k, b, t], whether a greedy chain whose root is x_{t+1} guesses x_{t+2+k} as the
        target does, given that all before it was right. By the training step; padding where a document ends.

        What the runtime accepts of a chain rooted there follows from it, without running it.
        """

    @property
    def reserved_ids(self) -> tuple[int, ...]:
        """Token ids that the training data may not have, because the head has a use of its own for them."""
        return ()

    @property
    def language_model(self) -> PreTrainedModel | None:
        """The causal LM that the head is, if it is one: it may write text, and its config says `lora`."""
        return None


def given(settings: Any) -> dict[str, Any]:
    """The settings that are not left to the target."""
    return {field.name: value for field in fields(settings) if (value := getattr(settings, field.name)) is not None}


def from_plain(made: type[Made], values: Mapping[str, Any]) -> Made:
    """A dataclass of values as YAML and JSON give them: lists where it has tuples, objects where it has dataclasses."""
    hints = get_type_hints(made)
    return made(**{name: _typed(value, hints.get(name)) for name, value in values.items()})


def _typed(value: Any, hint: Any) -> Any:
    if isinstance(value, list):
        return tuple(_typed(item, None) for item in value)
    part = next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)
    if isinstance(value, dict) and isinstance(part, type):
        return from_plain(part, {name: inner for name, inner in value.items() if inner is not None})
    return value


KEPT_SHARE = 1 / 8
"""Share of a device's memory that the activations of a loss may take where it can compute them twice."""
HEAD_TREE = "head"


def shape_for(text: str, head: Drafter | None) -> TreeShape:
    """The shape that a text names for this head. UserError where it has no tree of its own."""
    if text != HEAD_TREE:
        return parse_shape(text)
    own = None if head is None else head.own_tree
    if own is None or not own.tree:
        raise UserError("tree 'head': this head carries no static tree of its own; name one, such as chain:3")
    return static_shape(own.tree, text)


def most_nodes(text: str, head: Drafter) -> int:
    """The most nodes of the tree that a text names for this head, which may have yet to grow it."""
    if text != HEAD_TREE:
        return parse_shape(text).nodes
    if head.own_tree is None:
        raise UserError("tree 'head': heads of this kind and these settings grow no static tree; name one")
    return head.own_tree.tree_nodes
