"""Every kernel in bfloat16 against float64, three times."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heads.kernels.choose_token import choose_in_tiles, logits_in_tiles
from heads.kernels.gumbel import gumbel
from heads.kernels.slots import TreeSlots, ancestors
from heads.kernels.tree_attention import for_groups, masked_attention, tree_attention
from heads.targets.masks import additive
from tests.gpu.conftest import Note, Sizes

pytestmark = pytest.mark.gpu


def judge(note: Note, name: str, runs: list[Tensor], error: float, limit: float) -> None:
    steady = all(torch.equal(run, runs[0]) for run in runs)
    note(name, error=error, repeats_itself=steady, ok=steady and error < limit)  # NaN is not ok


@pytest.mark.parametrize("window", [None, 48])
def test_tree_attention(window: int | None, sizes: Sizes, device: torch.device, dtype: torch.dtype, note: Note) -> None:
    H, Hkv, d, S = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim, sizes.slots
    for N in sizes.nodes:
        parents = torch.tensor([[0, *(int(torch.randint(max(0, j - 9), j, ())) for j in range(1, N))]], device=device)
        above = ancestors(parents, N)
        q = torch.randn(1, N, H, d, device=device).to(dtype)
        keys, values = torch.randn(2, 1, S, Hkv, d, device=device).to(dtype)
        for length in sorted({0, 61, 1022, S - N}):
            at = torch.tensor([length], device=device)
            tree = TreeSlots(at, parents, above.sum(-1) - 1, above, torch.arange(S, device=device))
            visible: Any = tree.visible(0, S)
            if window is not None:
                visible &= tree.positions[..., None] - tree.key_positions(S)[:, None] < window
            mask = for_groups(additive(visible, torch.float64)[:, 0], H // Hkv)
            expected = masked_attention(q.double(), keys.double(), values.double(), mask)
            runs = [tree_attention(q, keys, values, tree.visible_slots(), window=window) for _ in range(3)]
            error = float((runs[0].double() - expected).norm() / expected.norm())
            limit = 1e-2 if dtype == torch.bfloat16 else 1e-4
            judge(note, f"tree_attention, {N} nodes after {length} tokens, window {window}", runs, error, limit)


def test_choose(sizes: Sizes, device: torch.device, dtype: torch.dtype, note: Note) -> None:
    D, V = sizes.hidden_size, sizes.vocab_size
    weight = torch.randn(V, D, device=device).to(dtype) * D**-0.5
    for N in sizes.nodes:
        hidden, ids = torch.randn(N, D, device=device).to(dtype), torch.arange(N, device=device)
        expected = hidden.double() @ weight.double().T
        logits = [logits_in_tiles(hidden, weight) for _ in range(3)]
        error = float((logits[0].double() - expected).norm() / expected.norm())
        judge(note, f"logits, {N} rows", logits, error, 1e-4)
        temperature = torch.full((N,), 0.8, device=device)
        noise = gumbel(7 * ids, ids[:, None], torch.arange(V, device=device))[:, 0]
        for noisy, score in ((False, expected), (True, expected / 0.8 + noise)):
            runs = [choose_in_tiles(hidden, weight, temperature, 7 * ids, ids, noisy=noisy) for _ in range(3)]
            short = score.amax(1) - score.gather(1, runs[0][:, None])[:, 0]  # 0 where the choice is the best
            judge(note, f"choose, {N} rows, {'sampled' if noisy else 'greedy'}", runs, float(short.max()), 1e-3)
