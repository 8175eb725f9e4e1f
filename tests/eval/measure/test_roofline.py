"""The roofline: every byte of the weights is in some part, and the figures follow from the parts."""

from typing import Any

import pytest
import torch
from torch import nn

from eval.measure.roofline import copy_bandwidth, roofline
from eval.pages.report_tables import roofline_table
from eval.runtime.engine import Request
from heads.kernels.product import Product
from heads.registry import build_head
from heads.targets.frozen_target import FrozenTarget
from tests.support.refusals import refused
from tests.support.small_targets import make_drafter, open_engine


def linear_bytes(module: nn.Module) -> int:
    """Return the bytes that the products of a module's linear layers read."""
    return sum(Product(part.weight, part.bias).bytes for part in module.modules() if isinstance(part, nn.Linear))


@pytest.mark.parametrize("tree", ["chain:3", "tree:3x2x6"])
def test_the_parts_of_a_round(tree: str, tiny_target: FrozenTarget) -> None:
    head = build_head("eagle3", {}, tiny_target, torch.ones(128, dtype=torch.int64))
    drafts: Any = (head, tree), (None,)
    engine, plain = (open_engine(tiny_target, *draft, batch_size=2, max_length=128) for draft in drafts)
    assert copy_bandwidth(plain) > 1e7
    record = roofline(engine, plain, length=40, tau=2.0, bandwidth=1e9)
    parts: dict[str, Any] = {part.part: part for part in record.round}
    size = tiny_target.dtype.itemsize
    whole, output, fuse = linear_bytes(head), linear_bytes(head.lm_head), linear_bytes(head.fc)
    assert parts["draft"].bytes == 3 * output + 2 * (whole - output - fuse)  # the first level was made beforehand
    assert parts["accept and commit"].bytes == whole - output
    cache = 2 * 40 * 8 * 2 * (2 * 8) * size  # rows, tokens, layers, keys and values, two heads of 8
    assert parts["verify and choose"].bytes == sum(p.nbytes for p in tiny_target.model.parameters()) + cache
    assert record.round_floor_us == pytest.approx(sum(part.floor_us for part in record.round))
    assert record.speedup.now == pytest.approx(2.0 * record.plain_us / record.round_us)
    assert record.speedup.floor == pytest.approx(2.0 * record.plain_floor_us / record.round_floor_us)
    assert all(part.us > 0 for part in record.round if part.part != "gaps")
    record.plain_share_of_bandwidth = 0.9
    assert len(roofline_table(record).rows) == len(record.round) + len(record.plain) + 2
    record.plain_share_of_bandwidth = 2.5
    assert "the floors say little here" in roofline_table(record).notes[-1]
    # What was timed has left the engine fit for use.
    drafted, own = (each.generate([Request([5, 6, 7], 12)])[0].tokens for each in (engine, plain))
    assert drafted == own


@pytest.mark.parametrize("kind", ["medusa", "draft", "early_exit:2"])
def test_what_other_drafts_read(kind: str, tiny_target: FrozenTarget) -> None:
    """Medusa's heads once a round; a draft model once a token, but for the embeddings that are no output head."""
    head = make_drafter(kind, tiny_target)
    read = 3 * (linear_bytes(tiny_target.layers[:2]) + linear_bytes(tiny_target.head))
    engine = open_engine(tiny_target, head, "chain:3", max_length=128)
    plain = open_engine(tiny_target, None, max_length=128)
    record = roofline(engine, plain, length=40, tau=2.0, bandwidth=1e9)
    draft = next(part for part in record.round if part.part == "draft")
    assert draft.bytes == (linear_bytes(head) if kind == "medusa" else read)


def test_a_context_without_room_is_refused(tiny_target: FrozenTarget) -> None:
    plain = open_engine(tiny_target, None, max_length=64)
    fault = refused(roofline, plain, plain, length=63, tau=1.0, bandwidth=1e9)
    assert "a context of 63 tokens leaves no room in 64 slots" in fault
