"""Interface of a backend: a cached forward pass of a decoder, and the steps of a draft.

There are four: `huggingface` (the model's own code), `torch` (our decoders; the reference, always complete), `cpu` (C)
and `triton` (kernels for a GPU). `heads.backends.selection` chooses one, once; it is passed down from there, so that
nothing else asks where a tensor lies or what was compiled. Whatever a backend has no form of its own for, torch does.

Letters: B rows, N tokens of a step, W tokens of each row, M rows of an observation, D hidden, L auxiliary layers, V
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
    """A `heads.recurrent.draft.Recurrent` and the batch that it drafts for."""

    head: Any
    parts: HeadParts | None
    """Its modules, where kernels may know them."""
    embed: Callable[[Tensor], Tensor]
    lm_head_weight: Tensor  # (Vd, D)
    cos_sin_table: tuple[Tensor, Tensor]  # (1, 1, S, d) each, of all slots
    batch_size: int
    shape: TreeShape
    """The largest trees; shorter chains are drafted, too."""


class CachedDecoder(ABC):
    """A decoder with the cache of one batch, of a target or of a draft model."""

    cache: Any
    native: Any = None
    """Its layers as `heads.backends.torch.decoder.NativeDecoder`; None where the model's own code runs."""
    reads_masks: bool = True
    """True if a tree's pass needs `heads.backends.slot_mapping.ancestors`."""

    def __init__(self, model: LanguageModel, spec: CacheSpec) -> None:
        self.model, self.spec = model, spec
        self.slot = torch.arange(spec.capacity, device=model.device)  # (S,)

    @abstractmethod
    def forward(
        self, tokens: Tensor, mapping: SlotMapping, *, extent: int, row: int | None = None, prompt: bool = False
    ) -> Features:
        """One pass over new tokens (B, N); attention sees the first `extent` slots. `row`: the one that the tokens are
        of, None for all. `prompt`: the tokens are a prompt's."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) hidden states after the final norm -> (..., V) logits, float32 or wider, or as kernels leave
        them."""
        return self.model.lm_head(hidden)[..., : self.spec.vocab_size]

    def choose(
        self, hidden: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, *, random: bool
    ) -> Tensor | None:
        """The choices (B, N) of rows that filter nothing, in the output head's own pass: hidden (B, N, D), positions
        (B, N) of the tokens to be chosen, temperature and seed (B,). None where they are made from logits."""
        return None

    def multiply(self, x: Tensor, product: Any) -> Tensor:
        """(R, K) -> (R, O): one of the products of `native`, as a pass forms it."""
        made: Tensor = product(x)
        return made

    def compact(self, start: Tensor, path: Tensor, accepted: Tensor) -> None:
        """Move what stands `path` (B, M) slots behind `start` (B,) to the first slots behind it, in order, at least as
        far as accepted (B,)."""
        self.cache.compact(start[:, None] + path, start[:, None] + self.slot[: path.shape[1]])

    def draft_chain(self, pick: Pick, previous: Tensor, root: Tensor, length: Tensor, depth: int) -> Proposal | None:
        """A chain behind each root (B,), which stands at `length` (B,) behind the token `previous` (B,), in one call;
        None where it takes steps."""
        return None


@dataclass
class StepsState:
    """Static tensors of one batch of sequences that a head drafts for by steps of its own over a cache.

    Slot p of the cache holds the key of one token. Drafted tokens go to the slots behind the observed ones, which true
    tokens take over later.
    """

    shape: TreeShape
    backend: "Backend"
    steps: Any
    slot: Tensor  # (S,) int64, 0 .. S - 1
    root: Tensor  # (B,) int64
    length: Tensor  # (B,) int64, the root's position: slots before it are observed

    def extent(self, tokens: int) -> int:
        """Slots that attention need look at when `tokens` more stand behind the observed ones; a device that the host
        would have to wait for looks at all."""
        if not self.backend.on_host:
            return len(self.slot)
        return min(round_up(int(self.length.max()) + tokens), len(self.slot))


class RecurrentSteps(ABC):
    """State of a batch of a head that recycles its state, and its steps."""

    weight_bytes: int | None = None
    """Bytes of one weight, as it is read; None for the head's own."""

    @abstractmethod
    def start(self, aux_hidden_states: Tensor, hidden: Tensor) -> Tensor:
        """(B, W, L * D), (B, W, D) -> the state that the first step recycles (B, W, D)."""

    @abstractmethod
    def normed(self, recycled: Tensor) -> Tensor:
        """Return the input of the output head for a recycled state."""

    @abstractmethod
    def logits(self, normed: Tensor) -> Tensor:
        """(B, W, D) -> (B, W, Vd)."""

    @abstractmethod
    def step(
        self, module: int, tokens: Tensor, states: Tensor, rows: Tensor | None, mapping: Observed | Drafted, extent: int
    ) -> tuple[Tensor, Tensor]:
        """One step of tokens (B, W), each beside a state (B, W', D): its own, or that of row `rows` (B, W).

        Attention sees the first `extent` slots. -> the states to recycle and those for the output head, (B, W, D)
        each."""

    def extend(
        self, observation: Observation, slot: Tensor, extent: int, recycled: list[Tensor], root: Tensor, length: Tensor
    ) -> None:
        """Take in true features, and renew what is drafted from: by module recycled (B, D), root (B,), length (B,)."""
        tokens, start, count = observation.tokens, observation.start, observation.count
        mapping = Observed(start, count, slot, observation.hidden.shape[1])
        above = self.start(observation.aux_hidden_states, observation.hidden)
        for module, newest in enumerate(recycled):
            made, _ = self.step(module, tokens[:, 1:], above, None, mapping, extent)
            if module + 1 < len(recycled):
                above = torch.cat([newest[:, None], made[:, :-1]], dim=1)  # what it made of the token before
            take_newest(tokens, start, count, root, length, recycled=newest, made=made)

    def draft_chain(
        self, pick: Pick, kept: Tensor, recycled: Tensor, root: Tensor, length: Tensor, depth: int, extent: int
    ) -> Proposal | None:
        """A chain behind each root (B,), which stands at `length` (B,), in one call, from the states (B, D) that the
        first step recycles; kept (Vd,) the target's ids of the draft's. None where it takes steps."""
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSpec:
    """A `heads.block.draft.DraftBlockHead` and the batch that it drafts for."""

    head: Any
    lm_head_weight: Tensor  # (V, D)
    cos_sin_table: tuple[Tensor, Tensor]  # (S, d) each, of all slots
    batch_size: int
    product: "Callable[[nn.Linear], Product]"


class BlockSteps(ABC):
    """The context of a batch of a head that drafts a block, and the pass over a block.

    Slot p holds the context's key of position p. A block's keys go to the slots from the root's on, and are taken over
    by what is observed there.
    """

    head: Any
    """The head with the backend's products in the place of its own."""
    lm_head: Any
    """(..., D) -> (..., V)."""

    def __init__(self, spec: BlockSpec) -> None:
        self.cos_sin_table = spec.cos_sin_table
        self.row = torch.arange(spec.batch_size, device=self.cos_sin_table[0].device)[:, None]  # (B, 1)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, T, d) of positions (B, T)."""
        return self.cos_sin_table[0][positions][:, None], self.cos_sin_table[1][positions][:, None]

    def slots(self, mapping: Observed) -> Tensor:
        """(B, M); padding goes to the last slot, which no block reaches."""
        return mapping.slots(len(self.cos_sin_table[0]) - 1)

    @abstractmethod
    def extend(self, aux_hidden_states: Tensor, mapping: Observed) -> None:
        """Take in the context of true features (B, M, L * D)."""

    @abstractmethod
    def run(self, x: Tensor, positions: Tensor, visible: Sequence[Tensor]) -> Tensor:
        """The rows of a block x (B, R, D) at positions (B, R), over the slots that they see in each layer, (B, R, E)
        -> (B, R, D) after the final norm."""


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
    """Renew, in rows with new tokens, root and length (B,); previous (B,), the token before the root; and recycled
    (B, D), taken from made (B, M, D), the states of the tokens but the first. Of tokens (B, M + 1), from position start
    (B,) on, count (B,) and the next are true."""
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
    """The forms that one backend has."""

    name: str
    is_required: bool = False
    """True if it was named, so that no other may take its place."""
    on_host: bool = True
    """True if tensors lie in the host's memory: it may look at them at any time, and padding only costs."""
    native: Callable[[LanguageModel], Any]
    """Layers of our own, `heads.backends.torch.decoder.NativeDecoder`; None where the model's own code runs."""
    decoder: Callable[[LanguageModel, CacheSpec], CachedDecoder]
    recurrent: Callable[[RecurrentSpec], RecurrentSteps]
    block: Callable[[BlockSpec], BlockSteps]
    product: "Callable[[nn.Linear], Product]"
    """A draft's product, from its weights as they are now."""
    select: "Select"
    """Of a tree's nodes."""
    take_newest: Callable[..., None]
    """As the function of this name."""
    sampling: "type[RowSampling]"
    """Noise, choices and a draft's picks."""
    match: Callable[[Proposal, Tensor, Tensor | None, int], Acceptance]
    """As `heads.backends.torch.accept.match`."""
    take_path: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """As `heads.backends.torch.accept.take_path`."""
    commit: "type[Commit]"
    """A round's outcome taken into the state of all rows."""
