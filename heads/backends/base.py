"""Interface of a backend: a cached forward pass of a decoder, and the steps of a draft head.

There are four backends: `huggingface` (the model's own code), `torch` (our decoders; the reference, always complete),
`cpu` (C) and `triton` (GPU kernels). `heads.backends.selection` chooses one, once, and it is passed down from there, so
that no other code checks a tensor's device or what was compiled. Backends fall back to torch for anything they lack.

Letters: B rows, N tokens of a step, W tokens per row, M rows of an observation, D hidden, L auxiliary layers, V
vocabulary, Vd draft vocabulary, J modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heads.backends.recurrent_parts import HeadParts
from heads.backends.slot_mapping import CacheSpec, Drafted, Observed, SlotMapping, round_up
from heads.base import Observation
from heads.target.frozen import Features, LanguageModel
from heads.tree import Acceptance, Pick, Proposal, TreeShape

if TYPE_CHECKING:
    from heads.backends.torch.commit import Commit
    from heads.backends.torch.linear import Product
    from heads.backends.torch.sampling import RowSampling
    from heads.backends.torch.select import Select


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentSpec:
    """A `heads.recurrent.draft.Recurrent` head and the batch that it drafts for."""

    head: Any
    parts: HeadParts | None
    """The head's modules, if kernels may support them; else None."""
    embed: Callable[[Tensor], Tensor]
    lm_head_weight: Tensor  # (Vd, D)
    cos_sin_table: tuple[Tensor, Tensor]  # (1, 1, S, d) each, of all slots
    batch_size: int
    shape: TreeShape
    """The largest tree. Shorter chains may be drafted too."""


class CachedDecoder(ABC):
    """Decoder of a target or a draft model, with the cache of one batch."""

    cache: Any
    native: Any = None
    """The layers as a `heads.backends.torch.decoder.NativeDecoder`; None if the model's own code runs."""
    reads_masks: bool = True
    """True if a pass over a tree needs `heads.backends.slot_mapping.ancestors`."""

    def __init__(self, model: LanguageModel, spec: CacheSpec) -> None:
        self.model, self.spec = model, spec
        self.slot = torch.arange(spec.capacity, device=model.device)  # (S,)

    @abstractmethod
    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        """Run one pass over new tokens (B, N). Attention sees the first `extent` slots. `row` is the only row that the
        tokens belong to, None for all rows. `prompt` is True if the tokens are part of a prompt."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D) after the final norm: float32 or wider, or the dtype
        that kernels produce."""
        return self.model.lm_head(hidden)[..., : self.spec.vocab_size]

    def choose(
        self, hidden: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, *, random: bool
    ) -> Tensor | None:
        """Return the choices (B, N), made in the output head's own pass, for rows without filters: hidden (B, N, D),
        positions (B, N) of the tokens to choose, temperature and seed (B,). None if choices need the logits."""
        return None

    def multiply(self, x: Tensor, product: Any) -> Tensor:
        """Compute one of the products of `native` as a pass does: (R, K) -> (R, O)."""
        made: Tensor = product(x)
        return made

    def compact(self, start: Tensor, path: Tensor, accepted: Tensor) -> None:
        """Move the slots at start (B,) + path (B, M) to the slots start, start + 1, ..., in order; at least the first
        accepted (B,) of them."""
        self.cache.compact(start[:, None] + path, start[:, None] + self.slot[: path.shape[1]])

    def draft_chain(self, pick: Pick, previous: Tensor, root: Tensor, length: Tensor, depth: int) -> Proposal | None:
        """Draft a chain after each root (B,) in one call. The root is at position `length` (B,), after the token
        `previous` (B,). Return None if the backend drafts step by step."""
        return None


@dataclass
class StepsState:
    """Static tensors of one batch of sequences, for a head that drafts with its own steps over a cache.

    Slot p of the cache holds the key of one token. Draft tokens use the slots after the observed ones; accepted tokens
    overwrite these slots later.
    """

    shape: TreeShape
    backend: "Backend"
    steps: Any
    slot: Tensor  # (S,) int64, 0 .. S - 1
    root: Tensor  # (B,) int64
    length: Tensor  # (B,) int64, the root's position: slots before it are observed

    def extent(self, tokens: int) -> int:
        """Return the number of slots that attention must read when `tokens` more follow the observed ones: all slots
        on a GPU, where the host would have to wait for the lengths."""
        if not self.backend.on_host:
            return len(self.slot)
        return min(round_up(int(self.length.max()) + tokens), len(self.slot))


class RecurrentSteps(ABC):
    """Batch state and steps of a head that recycles its state."""

    weight_bytes: int | None = None
    """Bytes read per weight; None for the size in the head's own dtype."""

    @abstractmethod
    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        """Return the state that the first step recycles (B, W, D), from features (B, W, L * D) and (B, W, D)."""

    @abstractmethod
    def normed(self, recycled: Tensor) -> Tensor:
        """Return the input of the output head for a recycled state."""

    @abstractmethod
    def logits(self, normed: Tensor) -> Tensor:
        """Return the logits (B, W, Vd), given the output of `normed` (B, W, D)."""

    @abstractmethod
    def step(
        self, module: int, tokens: Tensor, states: Tensor, rows: Tensor | None, mapping: Observed | Drafted, extent: int
    ) -> tuple[Tensor, Tensor]:
        """Run one step on tokens (B, W) and states (B, W', D). Each token takes its own state, or the one in row `rows`
        (B, W) if given.

        Attention sees the first `extent` slots. Return the states to recycle and those for the output head, (B, W, D)
        each."""

    def extend(
        self, observation: Observation, slot: Tensor, extent: int, recycled: list[Tensor], root: Tensor, length: Tensor
    ) -> None:
        """Extend with the target's features, and update the start of the next draft in place: recycled (B, D) of each
        module, root (B,) and length (B,)."""
        tokens, start, count = observation.tokens, observation.start, observation.count
        mapping = Observed(start, count, slot, observation.hidden.shape[1])
        above = self.start(observation.aux_hidden_states, observation.hidden)
        for module, newest in enumerate(recycled):
            made, _ = self.step(module, tokens[:, 1:], above, None, mapping, extent)
            if module + 1 < len(recycled):
                above = torch.cat([newest[:, None], made[:, :-1]], dim=1)  # this module's state of the previous token
            take_newest(tokens, start, count, root, length, recycled=newest, made=made)

    def draft_chain(
        self, pick: Pick, kept: Tensor, recycled: Tensor, root: Tensor, length: Tensor, depth: int, extent: int
    ) -> Proposal | None:
        """Draft a chain after each root (B,) at position `length` (B,) in one call. The first step recycles the states
        (B, D); kept (Vd,) maps draft ids to target ids. Return None if the backend drafts step by step."""
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSpec:
    """A `heads.block.draft.DraftBlockHead` head and the batch that it drafts for."""

    head: Any
    lm_head_weight: Tensor  # (V, D)
    cos_sin_table: tuple[Tensor, Tensor]  # (S, d) each, of all slots
    batch_size: int
    product: "Callable[[nn.Linear], Product]"


class BlockSteps(ABC):
    """Context of a batch for a head that drafts blocks, and the pass over a block.

    Slot p holds the context's key of position p. A block's keys go to the slots from the root's onward, and are
    overwritten when tokens are observed there.
    """

    head: Any
    """The head, with its linear layers replaced by the backend's products."""
    lm_head: Any
    """The output head: (..., D) -> (..., V)."""

    def __init__(self, spec: BlockSpec) -> None:
        self.cos_sin_table = spec.cos_sin_table
        self.row = torch.arange(spec.batch_size, device=self.cos_sin_table[0].device)[:, None]  # (B, 1)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, 1, T, d) of positions (B, T)."""
        return self.cos_sin_table[0][positions][:, None], self.cos_sin_table[1][positions][:, None]

    def slots(self, mapping: Observed) -> Tensor:
        """Return the slots (B, M). Padding goes to the last slot, which no block reaches."""
        return mapping.slots(len(self.cos_sin_table[0]) - 1)

    @abstractmethod
    def extend(self, aux_hidden_states: Tensor, mapping: Observed) -> None:
        """Extend the context with the target's features (B, M, L * D)."""

    @abstractmethod
    def run(self, x: Tensor, positions: Tensor, visible: Sequence[Tensor]) -> Tensor:
        """Run a block's rows x (B, R, D) at positions (B, R); `visible` (B, R, E) are the slots that they see in each
        layer. Return (B, R, D) after the final norm."""


def take_newest(
    tokens: Tensor,
    start: Tensor,
    count: Tensor,
    root: Tensor,
    length: Tensor,
    *,
    previous: Tensor | None = None,
    recycled: Tensor | None = None,
    made: Tensor | None = None,
) -> None:
    """Update root and length (B,) in rows with new tokens; also previous (B,), the token before the root, and recycled
    (B, D), from made (B, M, D), the states of all tokens except the first. tokens (B, M + 1) begin at position start
    (B,); the first count (B,) + 1 of them are valid."""
    live, last = count > 0, (count - 1).clamp_min(0)
    if previous is not None:
        previous.copy_(torch.where(live, tokens.gather(1, last[:, None])[:, 0], previous))
    if recycled is not None and made is not None:
        final = made.gather(1, last[:, None, None].expand(-1, 1, made.shape[2]))[:, 0]
        recycled.copy_(torch.where(live[:, None], final, recycled))
    root.copy_(torch.where(live, tokens.gather(1, count[:, None])[:, 0], root))
    length.copy_(torch.where(live, start + count, length))


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Functions and classes of one backend."""

    name: str
    is_required: bool = False
    """True if the user named it, so that no other backend may replace it."""
    has_kernels: bool = False
    """True if it launches Triton kernels, which may not fit a device."""
    on_host: bool = True
    """True if tensors are in host memory. Then reading them needs no synchronization, and padding only adds cost."""
    native: Callable[[LanguageModel], Any]
    """Builder of our own layers, a `heads.backends.torch.decoder.NativeDecoder`; None if the model's own code runs."""
    decoder: Callable[[LanguageModel, CacheSpec], CachedDecoder]
    recurrent: Callable[[RecurrentSpec], RecurrentSteps]
    block: Callable[[BlockSpec], BlockSteps]
    product: "Callable[[nn.Linear], Product]"
    """Builder of a draft head's product from the current weights."""
    select: "Select"
    """Choice of a tree's nodes."""
    take_newest: Callable[..., None]
    """Same contract as `take_newest` in this module."""
    sampling: "type[RowSampling]"
    """Noise, the target's choices and the draft's picks."""
    match: Callable[[Proposal, Tensor, Tensor | None, int], Acceptance]
    """Same contract as `heads.backends.torch.accept.match`."""
    take_path: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Same contract as `heads.backends.torch.accept.take_path`."""
    commit: "type[Commit]"
    """Commit of a round's result to the state of all rows."""
