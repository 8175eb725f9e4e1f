"""The choice among noisy logits, in C, against torch's, which computes the noise of every token."""

import pytest
import torch

from heads.kernels.noisy_argmax import by_c, by_torch, load
from tests.support.switches import need_c

ROWS = 40


@pytest.mark.parametrize("V", [1, 127, 128, 2000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0], ids=["ties", "flat", "steep"])
def test_the_choice_in_c_is_that_of_torch(V: int, spread: float) -> None:
    need_c()
    library = load()
    assert library is not None, "it chose other tokens than torch"
    draw = torch.Generator().manual_seed(V)
    logits = spread * torch.randn(ROWS, 3, V + 7, generator=draw)[..., 3:-4]  # not contiguous
    logits[5, 1], logits[6, :, V // 2 :], logits[7, 2, V // 3] = -torch.inf, -torch.inf, torch.nan
    logits[8, 0, V // 2] = torch.inf
    temperature = torch.linspace(0, 2, ROWS)
    temperature[1] = 1e-30
    seeds = torch.randint(-(2**62), 2**62, (ROWS,), generator=draw)
    positions = torch.randint(2**20, (ROWS, 1), generator=draw).expand(-1, 3)
    ids = torch.randperm(3 * V, generator=draw)[:V]
    for token_ids in (None, ids):
        given = logits, temperature, seeds, positions, token_ids
        assert torch.equal(by_c(library, *given), by_torch(*given))
