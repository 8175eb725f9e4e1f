"""The target's own first layers as its draft: an early exit, as in LayerSkip (Elhoushi et al., arXiv 2404.16710).
LayerSkip trains its targets for it; here any target is used unchanged. No training.

    q_t = softmax(W norm(h_t)),  h_t the residual stream after the first `layers` layers

Layers, norm and output head are the target's own modules, so no weight is stored twice. The draft has its own KV cache,
because it reads ahead of the target.
"""

import copy
from typing import Any

from torch import nn

from heads.base import Drafter, Observation, Pick, RoundReads, SharedLayers
from heads.draft_model import Draft, DraftConfig, DraftState
from heads.errors import UserError
from heads.target.model import FrozenTarget
from heads.target.smaller import cut_layers
from heads.tree import Proposal, TreeShape


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


class EarlyExit(Drafter):
    """Draft model made of the target's own first layers."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    @classmethod
    def for_target(cls, number: int, target: FrozenTarget) -> "EarlyExit":
        """Return the draft that exits after `number` layers."""
        if not 1 <= number < target.num_layers:
            raise UserError(
                f"early_exit:{number}: {target.name} has {target.num_layers} layers; name 1 to {target.num_layers - 1}"
            )
        V = target.vocab_size
        config = DraftConfig(layers=tuple(range(number)), model={}, vocab_size=V, common_size=V)
        model: Any = FirstLayers(target, number)
        return cls(Draft(config, model))

    def check_draft(self, shape: TreeShape, capacity: int) -> None:
        self.draft.check_draft(shape, capacity)

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> DraftState:
        return self.draft.new_state(shared, batch_size=batch_size, capacity=capacity, shape=shape)

    def extend(self, state: DraftState, observation: Observation) -> None:
        self.draft.extend(state, observation)

    def propose(self, state: DraftState, pick: Pick) -> Proposal:
        return self.draft.propose(state, pick)

    def bytes_per_round(self, state: DraftState) -> RoundReads:
        return self.draft.bytes_per_round(state)
