"""Drafted blocks under the rules that need q: the distribution of what comes out, by enumeration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import Observation, SharedLayers
from heads.block.draft import DraftBlockHead
from heads.dflash import DFlash, DFlashConfig
from heads.dflash2 import DFlash2, DFlash2Config
from heads.dspark import DSpark, DSparkConfig
from heads.tree import Proposal, TreeShape, parse_shape
from tests.enumeration import Toy, prefixes_of
from tests.eval.runtime.test_rejection import EXACT, distance, outcome
from tests.heads.small_heads import BLOCK_SIZES

D, V = 8, 3


HEADS: dict[str, Callable[[dict[str, Any]], DraftBlockHead]] = {
    "dflash": lambda settings: DFlash(DFlashConfig(**settings)),
    # Of three tokens it chooses among two: q is 0 at the third.
    "dflash2": lambda settings: DFlash2(
        DFlash2Config(**settings, conv_group_size=4, selector_rank=4, selector_top_k=2)
    ),
    "dspark": lambda settings: DSpark(DSparkConfig(**settings, markov_rank=4)),
}


def make_head(kind: str) -> DraftBlockHead:
    """A random head of a target of three tokens."""
    sizes = dict(hidden_size=D, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, vocab_size=V)
    depth = dict(num_target_layers=4, aux_layer_ids=(2,), mask_token_id=2, num_layers=1)
    settings: dict[str, Any] = BLOCK_SIZES | sizes | depth
    torch.manual_seed(3)
    head = HEADS[kind](settings)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, 0.7)
    return head.double()


class Drafted(Toy):
    """The target's distributions of a toy, and the drafts of a head in the place of the toy's."""

    def __init__(self, head: DraftBlockHead, depth: int) -> None:
        super().__init__(V, depth + 1, 7)
        self.head = head

    def grow(self, shape: TreeShape, pick: Any, rows: int) -> tuple[Proposal, Tensor]:
        torch.manual_seed(4)
        table, out = torch.randn(2, V, D, dtype=torch.float64)
        shared = SharedLayers(lambda ids: table[ids], lambda hidden: hidden @ out.T, out)
        state = self.head.new_state(shared, batch_size=rows, capacity=16, shape=shape)
        known, ids = (
            torch.randn(5, D, dtype=torch.float64).expand(rows, -1, -1),
            torch.zeros(rows, 6, dtype=torch.int64),
        )
        count = torch.full((rows,), 5)
        self.head.extend(state, Observation(ids, known, known, torch.zeros_like(count), count, None))
        proposal = self.head.propose(state, lambda logits, *rest: pick(logits.log_softmax(-1), *rest))
        return proposal, prefixes_of(proposal, V, ids[:, 0])


@pytest.mark.parametrize(
    ("rule", "shape"), [("ratio", "chain:3"), ("block", "chain:3"), ("ratio", "static:2.2")], ids=str
)
@pytest.mark.parametrize("kind", HEADS)
def test_what_comes_out_has_the_targets_distribution(kind: str, rule: str, shape: str) -> None:
    tree = parse_shape(shape)
    drafted = Drafted(make_head(kind), tree.depth)
    distribution, tokens = outcome(drafted, tree, rule)
    assert distance(drafted, distribution, tree) < EXACT
    assert 1 < tokens <= tree.depth + 1
