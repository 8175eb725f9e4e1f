"""Rows write where they stand, see what they are shown, and move what was accepted."""

import pytest
import torch

from heads.targets.cache import HFCache


@pytest.mark.parametrize("widths", [(4, 4), (6, 3)], ids=["equal", "keys wider than values"])
def test_rows_write_to_their_own_slots(widths: tuple[int, int]) -> None:
    B, S, H, N = 3, 64, 2, 4
    cache = HFCache(num_layers=2, batch_size=B, capacity=S)
    starts = torch.tensor([0, 10, 59])
    slots = starts[:, None] + torch.arange(N)
    cache.aim(slots, extent=S)
    for layer in range(2):
        keys, values = torch.randn(B, H, N, widths[0]), torch.randn(B, H, N, widths[1])
        shown_keys, shown_values = cache.update(keys, values, layer)
        assert shown_keys.shape == (B, H, S, widths[0]) and shown_values.shape == (B, H, S, widths[1])
        for b in range(B):
            for new, shown in ((keys, shown_keys), (values, shown_values)):
                assert torch.equal(shown[b][:, slots[b]], new[b])
                untouched = torch.ones(S, dtype=torch.bool).index_fill_(0, slots[b], False)
                assert not shown[b][:, untouched].any()


def test_one_row_alone_leaves_the_others_as_they_are() -> None:
    cache = HFCache(num_layers=1, batch_size=3, capacity=128)
    cache.aim(torch.arange(5)[None].repeat(3, 1), extent=64)
    cache.update(torch.randn(3, 1, 5, 2), torch.randn(3, 1, 5, 2), 0)
    before = cache.stores["keys"][0].clone()
    cache.aim(torch.arange(2, 6)[None], extent=64, row=1)
    keys, _ = cache.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), 0)
    assert keys.shape == (1, 1, 64, 2)
    after = cache.stores["keys"][0]
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])
    assert torch.equal(after[0, 1, 2:6], torch.ones(4, 1, 2))
    assert torch.equal(after[0, 1, :2], before[0, 1, :2])


def test_compaction_moves_paths_in_every_layer() -> None:
    B, S = 2, 64
    cache = HFCache(num_layers=3, batch_size=B, capacity=S)
    cache.aim(torch.arange(S)[None].repeat(B, 1), extent=S)
    for index, H in enumerate((2, 2, 1)):  # the last layer has a form of its own
        cache.update(torch.randn(B, H, S, 4), torch.randn(B, H, S, 4), index)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.row_layers]
    length, path = torch.tensor([7, 20]), torch.tensor([[0, 2, 5], [0, 1, 4]])
    goals = length[:, None] + torch.arange(3)
    cache.compact(length[:, None] + path, goals)
    for layer, (keys, values) in zip(cache.row_layers, before, strict=True):
        for b in range(B):
            for now, then in ((layer.keys[b], keys[b]), (layer.values[b], values[b])):
                assert torch.equal(now[goals[b]], then[length[b] + path[b]])
                others = torch.ones(S, dtype=torch.bool).index_fill_(0, goals[b], False)
                assert torch.equal(now[others], then[others])
