"""What a round's end does to states, caches and features: its kernels against their twins, on the device."""

from dataclasses import fields

import torch
from torch import Tensor

from eval.runtime.state import Commit
from heads.backends.round_state import RoundState
from heads.backends.triton import accept, compaction

CUDA = torch.device("cuda")


def states_equal_their_twins(device: torch.device = CUDA) -> None:
    """What rounds decide, taken into random states."""
    draw = torch.Generator().manual_seed(0)

    def random(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=draw).to(device)

    B = 64
    for depth, eos in ((0, [3]), (4, []), (7, [2, 5, 8])):
        ours = RoundState.new(batch_size=B, capacity=60, depth=depth, device=device, rounds=3)
        for name, low, high in (("length", 1, 20), ("root", 0, 9), ("output_length", 1, 50), ("rounds", 0, 20)):
            getattr(ours, name).copy_(random(low, high, B))
        ours.limit.copy_(ours.output_length + random(1, 9, B))
        ours.done.copy_(random(0, 4, B) == 0)
        ours.heeds_eos.copy_(random(0, 2, B) == 0)
        theirs = RoundState(**{field.name: getattr(ours, field.name).clone() for field in fields(ours)})
        shared = torch.tensor(eos, dtype=torch.int64, device=device)
        by_kernel, in_tensors = Commit(ours, shared, depth), Commit(theirs, shared, depth).in_tensors
        for _ in range(5):
            outcome = random(0, depth + 1, B), random(0, 9, B, depth + 1), random(0, depth + 1, B, 9)
            for one, two in ((by_kernel(*outcome), in_tensors(*outcome)), (ours, theirs)):
                for field in fields(one):
                    assert torch.equal(getattr(one, field.name), getattr(two, field.name)), (depth, field.name)


def paths_equal_their_twins(device: torch.device = CUDA) -> None:
    """Caches compacted and features taken along accepted paths."""
    draw = torch.Generator().manual_seed(0)

    def random(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=draw).to(device)

    B = 64
    for K, N, X in ((3, 8, 100), (7, 40, 2048)):
        path = random(0, N, B, K + 1)
        aux_hidden_states, hidden = (torch.randn(B, N, width, generator=draw).to(device) for width in (3 * X, X))
        for own, twin in zip(
            accept.take_path(aux_hidden_states, hidden, path),
            accept.take_path_twin(aux_hidden_states, hidden, path),
            strict=True,
        ):
            assert torch.equal(own, twin)
        nodes = torch.rand(B, N - 1, generator=draw).argsort(1)[:, :K].sort(1).values + 1
        ascending = torch.cat([torch.zeros_like(path[:, :1]), nodes.to(device)], dim=1)
        cache = torch.randn(5, B, N + 30, X, generator=draw).to(device)
        length, accepted, other = random(0, 30, B), random(0, K + 1, B), cache.clone()
        compaction.compact(cache, length, ascending, accepted)
        compaction.compact_twin(other, length, ascending, accepted)
        assert torch.equal(cache, other), (K, N, X)
