"""Drafters that are not trained: prompt lookup and early exit.

Letters: B batch, S slots.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.core.contract import LONGEST_MATCH, Drafter, Observation, SharedLayers
from heads.core.errors import UserError, expect
from heads.core.tree import Pick, Proposal, TreeShape, is_chain
from heads.methods.draft_model import Draft, DraftConfig
from heads.targets.frozen_target import FrozenTarget
from heads.targets.smaller_models import cut_layers

NOTHING = -1
"""Id of a missing token. It is equal to no token."""


@dataclass
class LookupState:
    """Text of each row. Slot t holds x_t; the last slot is for padding."""

    shape: TreeShape
    tokens: Tensor  # (B, S + 1) int64
    length: Tensor  # (B,) int64, the root's position: tokens up to it are known


class Lookup(Drafter):
    """Drafter of chains by n-gram matches in the text so far."""

    earliest = False
    """True if the first of the longest matches is copied, up to the text's end, and nothing is drafted without one."""

    def __init__(self, ngram: int, device: torch.device | str = "cpu") -> None:
        """`ngram`: maximum length of a match. Longer matches add nothing."""
        expect(1 <= ngram <= LONGEST_MATCH, "lookup", f"a longest match of 1 to {LONGEST_MATCH} tokens", ngram)
        self.ngram, self.device = ngram, device

    @classmethod
    def for_target(cls, number: int, target: FrozenTarget) -> "Lookup":
        return cls(number, target.device)

    def check_draft(self, shape: TreeShape) -> None:
        if not is_chain(shape):
            raise UserError(
                f"tree {shape}: lookup has one guess at a time; ask for a chain, such as chain:{shape.depth}"
            )

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> LookupState:
        self.check_draft(shape)
        tokens = torch.full((batch_size, capacity + 1), NOTHING, dtype=torch.int64, device=self.device)
        return LookupState(shape, tokens, torch.zeros(batch_size, dtype=torch.int64, device=self.device))

    def extend(self, state: LookupState, observation: Observation) -> None:
        tokens, count = observation.tokens, observation.count
        offset = torch.arange(tokens.shape[1], device=tokens.device)
        padding = state.tokens.shape[1] - 1
        known = (offset <= count[:, None]) & (count > 0)[:, None]  # the rows observed, and the root
        state.tokens.scatter_(1, torch.where(known, observation.start[:, None] + offset, padding), tokens)
        state.length.copy_(torch.where(count > 0, observation.start + count, state.length))

    def propose(self, state: LookupState, pick: Pick) -> Proposal:
        return self.find(state)[0]

    def find(self, state: LookupState) -> tuple[Proposal, Tensor]:
        """Return the draft, and the length (B,) of the match that it follows."""
        given = state.tokens[:, :-1], state.length, state.shape.depth, self.ngram
        drafted, matched = look_up(*given, earliest=self.earliest)
        root = state.tokens.gather(1, state.length[:, None])  # a row without a request has none
        tokens = torch.cat([root, drafted], dim=1).clamp_min(0)
        depths = torch.arange(state.shape.nodes, device=tokens.device).expand_as(tokens)
        scores = torch.zeros(tokens.shape, device=tokens.device)
        copied = torch.ones_like(matched, dtype=torch.bool)
        return Proposal(tokens, (depths - 1).clamp_min(0), depths, scores, copied=copied), matched


class EngineLookup(Lookup):
    """Drafter as vLLM's `ngram` with `prompt_lookup_min` 1 and `prompt_lookup_max` `ngram` (vLLM 0.32)."""

    earliest = True


def look_up(tokens: Tensor, length: Tensor, depth: int, ngram: int, *, earliest: bool = False) -> tuple[Tensor, Tensor]:
    """Return the tokens (B, depth) after the longest earlier match of the text's end, the latest one if several are as
    long, and the length (B,) of that match, 0 if there is none. `earliest`: after the first one, and `NOTHING` past the
    text's end and without a match; by default the tokens repeat there.

    tokens (B, S): the text of row b is its first length[b] + 1 tokens. A match ends at slot e < length[b]. Its length
    is the number of tokens up to e that equal those up to length[b], at most `ngram`.
    """
    B, S = tokens.shape
    slot = torch.arange(S, device=tokens.device)
    back = torch.arange(ngram, device=tokens.device)
    end = (length[:, None] - back).clamp_min(0)  # (B, n)
    newest = tokens.gather(1, end).masked_fill(length[:, None] < back, NOTHING - 1)
    padded = torch.cat([tokens.new_full((B, ngram - 1), NOTHING), tokens], dim=1)
    before = torch.stack([padded[:, ngram - 1 - j : ngram - 1 - j + S] for j in range(ngram)], dim=1)  # x_{e-j} at e
    matched = (before == newest[..., None]).cumprod(dim=1).sum(dim=1)  # (B, S)
    # Without a match the slot before the root wins. The token after it is the root.
    order = S - 1 - slot if earliest else slot
    score = torch.where(slot < length[:, None], matched * S + order, -1)
    match_end = score.argmax(dim=1, keepdim=True)  # (B, 1)
    ahead = torch.arange(depth, device=tokens.device)
    period = (length[:, None] - match_end).clamp_min(1)
    drafted = tokens.gather(1, match_end + 1 + ahead % period)
    longest = (score.gather(1, match_end)[:, 0] // S).clamp_min(0)
    if earliest:
        drafted = torch.where((ahead < period) & (longest > 0)[:, None], drafted, NOTHING)
    return drafted, longest


class FirstLayers(nn.Module):
    """The target's first layers as a language model: its own modules, in a decoder with a shorter list of layers."""

    def __init__(self, target: FrozenTarget, count: int) -> None:
        super().__init__()
        self.config = copy.deepcopy(target.config)
        cut_layers(self.config, range(count), target)
        self.decoder = copy.copy(target.base)
        place = next((name for name, module in target.base.named_children() if module is target.layers), None)
        if place is None:
            raise UserError(
                f"early_exit: {type(target.base).__name__} does not hold its layers where they can be cut; "
                "draft by lookup:3 or a head"
            )
        self.decoder._modules = {**target.base._modules, place: target.layers[:count]}
        self.head = target.head

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.head
        return head


class EarlyExit(Draft):
    """Draft model made of the target's own first layers."""

    is_borrowed = True

    @classmethod
    def for_target(cls, number: int, target: FrozenTarget) -> "EarlyExit":  # type: ignore[override]
        if not 1 <= number < target.num_layers:
            raise UserError(
                f"early_exit:{number}: {target.name} has {target.num_layers} layers; name 1 to {target.num_layers - 1}"
            )
        V = target.vocab_size
        config = DraftConfig(layers=tuple(range(number)), model={}, vocab_size=V, common_size=V)
        model: Any = FirstLayers(target, number)
        return cls(config, model)
