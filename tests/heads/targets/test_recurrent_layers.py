"""Recurrent layers over a row cache: states that drafts, neighbours and earlier texts leave no trace in."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heads.targets.cache import HFCache
from heads.targets.recurrent_layers import find_mixers, state_name
from tests.support.small_targets import HYBRIDS, make_hybrid


class Layer:
    """One recurrent layer with a cache for two rows."""

    def __init__(self, mixer: Any, num_states: int) -> None:
        self.mixer = mixer
        self.cache = HFCache(num_layers=4, batch_size=2, capacity=64, num_states=num_states)

    def read(self, x: Tensor, starts: list[int], *, row: int | None = None, prompt: bool = False) -> Tensor:
        """Outputs of tokens x (B, N, D) behind the first `starts` of each row."""
        slots = torch.tensor(starts)[:, None] + torch.arange(x.shape[1])
        self.cache.set_slots(slots, extent=64, row=row, prompt=prompt)
        made: Tensor = self.mixer(x, **{str(state_name(self.mixer)): self.cache})
        return made

    def states(self, row: int, length: int) -> list[Tensor]:
        """States of a row behind its first `length` tokens."""
        R = self.cache.num_states
        return [kept[row * R + length % R] for kept in self.cache.recurrent[self.mixer.layer_idx].stored.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", HYBRIDS)
@torch.inference_mode()
def test_accepted_tokens_leave_what_single_steps_leave(family: str, dtype: torch.dtype) -> None:
    """Bit for bit, outputs and states, in rows of different lengths that accept different numbers of tokens."""
    mixer, N = find_mixers(make_hybrid(family, dtype).layers)[-1], 8
    x = torch.randn(2, 60, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    chains, single = Layer(mixer, N + 1), Layer(mixer, N + 1)
    lengths = [7, 20]
    for layer in (chains, single):
        for row, length in enumerate(lengths):
            layer.read(x[row : row + 1, :length], [0], row=row, prompt=True)
    for accepted in ([1, 8], [5, 2], [2, 4], [8, 8]):
        drafts = torch.stack([x[row, length : length + N] for row, length in enumerate(lengths)])
        for row, count in enumerate(accepted):
            drafts[row, count:] = 3 * drafts[row, count:]  # rejected
        verified = chains.read(drafts, lengths)
        steps = [single.read(drafts[:, n : n + 1], [length + n for length in lengths]) for n in range(max(accepted))]
        for row, count in enumerate(accepted):
            assert torch.equal(torch.cat(steps, dim=1)[row, :count], verified[row, :count])
            lengths[row] += count
            pairs = zip(chains.states(row, lengths[row]), single.states(row, lengths[row]), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
