"""Rows that depend on no other row, in bfloat16, where every other order of sums shows."""

import torch
from torch import Tensor

from heads.backends.triton import attention, experts, gemm, per_head
from heads.backends.triton.products import MAKERS, rows_are_independent

CUDA = torch.device("cuda")


def rows_of_the_kernels_are_independent(device: torch.device = CUDA) -> None:
    """Of the products that replace the library's where rows are not, or everywhere."""
    bank = torch.randn(8, 768, 2048, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)

    def by_head(x: Tensor, weight: Tensor) -> Tensor:
        own = weight[:, : weight.shape[1] // 16].unflatten(0, (16, -1))
        return per_head.per_head_mm(x.view(len(x), 16, -1), own.mT).flatten(1)

    def visited(x: Tensor, weight: Tensor) -> Tensor:
        ids = torch.stack([x[:, 0] > 0, x[:, 1] > 0], dim=1) + 2 * torch.arange(2, device=device)  # the token's own
        parts = zip(x.split(64), ids.split(64), strict=True)
        visits = torch.cat([experts.expert_mm(*part, bank, min(64, len(x))) for part in parts])
        return experts.weigh_visits(visits, x[:, 2:4].float(), None)

    for M in (1, 6, 33, 64, 70):
        for multiply, N, K in ((by_head, 16 * 512, 16 * 128), (by_head, 16 * 128, 16 * 512), (visited, 1, 2048)):
            weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
            assert rows_are_independent(multiply, weight, M), (multiply.__name__, M, N, K)
    for M in (1, 6, 16, 33, 64):
        for N, K in ((768, 4096), (4096, 4096), (1024, 14336)):
            weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
            for tile in gemm.TILES:
                assert rows_are_independent(MAKERS[str(tile)], weight, M), (M, N, K, tile)


def a_chain_is_bit_identical_in_attention(device: torch.device = CUDA) -> None:
    """Each node of a chain of 8 against the same query alone among padding."""
    N, S = 8, 600
    draw = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(1, n, h, 128, generator=draw) for n, h in ((N, 32), (S, 8), (S, 8)))
    q, keys, values = (x.to(device, torch.bfloat16) for x in (q, keys, values))
    depths = torch.arange(N, device=device)[None]
    for strict in (False, True):
        words, paths = attention.ancestor_words((depths - 1).clamp_min(0), depths, N - 1)
        own = paths if strict else None
        for start in (0, 251, 400):
            length = torch.tensor([start], device=device)
            chain = attention.tree_attention(q, keys, values, words, length, depths, paths=own)
            for j in range(N):
                padded = q[:, [j] * N].contiguous()
                alone = attention.tree_attention(padded, keys, values, words, length + j, depths, paths=own)
                assert torch.equal(alone[:, 0], chain[:, j]), (strict, start, j)
