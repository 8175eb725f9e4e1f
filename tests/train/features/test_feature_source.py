"""Features for training are the target's own on packed documents, by products in autocast's dtype."""

import pytest
import torch
from torch import Tensor

from heads.core.contract import Rows
from heads.targets.frozen_target import FrozenTarget
from heads.targets.layer_placement import drop_layers
from tests.heads.targets.test_native_decoder import make_target
from train.features.feature_source import FeatureSource, make_batch

AUX_LAYER_IDS = (0, 2, 3)


def test_products_are_in_the_dtype_of_autocast() -> None:
    target = make_target("llama", torch.float32)
    documents = (torch.arange(30) >= 20).long().expand(2, -1)
    tokens = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(0))
    everywhere, positions = torch.ones_like(tokens, dtype=torch.bool), torch.arange(30) - 20 * documents
    rows = Rows(tokens, everywhere, positions, documents)
    plain = make_batch(target, rows, AUX_LAYER_IDS, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = make_batch(target, rows, AUX_LAYER_IDS, torch.float32)
    alone = target.alone(tokens[:, 20:])
    assert distance(plain.hidden[:, 20:], alone) < 1e-5
    assert 1e-4 < distance(narrow.hidden[:, 20:], alone) < 0.05
    assert narrow.hidden.dtype == narrow.aux_hidden_states.dtype == torch.float32
    exact, rounded = (batch.shared.lm_head(plain.hidden) for batch in (plain, narrow))
    assert 1e-4 < distance(rounded, exact) < 0.02 and rounded.dtype == torch.float32


@pytest.mark.parametrize(("room", "copies"), [(True, 1), (False, 2)])
def test_a_whole_copy_is_loaded_once_where_there_is_room(
    room: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.features.feature_source.has_room", lambda _: room)
    loaded: list[FrozenTarget] = []
    without_layers = make_target("llama", torch.float32)
    without_layers.move(torch.device("cpu"), None, drop_layers)

    def load() -> FrozenTarget:
        loaded.append(make_target("llama", torch.float32))
        return loaded[-1]

    source = FeatureSource(without_layers, load)
    for _ in range(2):
        with source.whole() as target:
            assert target is loaded[-1]
    assert len(loaded) == copies


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
