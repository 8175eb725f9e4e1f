"""Kernels at the sizes of a big model: the bytes and the time of each.

Weights are read from memory and not from a cache, because several copies are used in turn.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.benchmark.roofline import Part
from heads.backends.selection import TRITON
from heads.backends.torch.commit import RoundState
from heads.backends.torch.select import Select
from heads.backends.triton import accept, attention, choose, compaction, layers
from heads.backends.triton.commit import TritonCommit
from heads.backends.triton.pick import Noise, best_columns
from heads.backends.triton.products import COLD, MAKERS
from heads.growth import grow
from heads.tree import Proposal, TreeShape, parse_shape
from scripts.grown.shapes import ModelShape

ROWS = (1, 8, 16, 32, 64)
ACCEPTED = 7
"""Number of tokens of an accepted path."""
COLUMNS = 32000
"""Number of columns of a draft's logits."""


def kernel_parts(
    shape: ModelShape, rows: int, length: int, device: torch.device, seconds: Callable[..., float], cold: int = COLD
) -> list[Part]:
    """Return the kernels of one step of `rows` tokens after `length` tokens, in bfloat16."""
    D, H, Hkv, d = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim

    def empty(*size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.bfloat16, device=device)

    parts = []

    def add(name: str, size: int, work: Callable[[], Any], times: int = 1) -> None:
        parts.append(Part(f"{name}, {rows} rows", size, seconds(work, device) / times))

    products = {
        "qkv": ((H + 2 * Hkv) * d, D),
        "out": (D, H * d),
        "gate_up": (2 * shape.intermediate_size, D),
        "down": (D, shape.intermediate_size),
    }
    for name, (N, K) in products.items():
        copies = max(2, -(-cold // (2 * N * K)))
        weights, x = [empty(N, K) for _ in range(copies)], empty(rows, K)
        for maker, multiply in MAKERS.items():
            add(f"{name} by {maker}", 2 * N * K, partial(each, multiply, x, weights), copies)
    x, head = empty(rows, D), empty(shape.vocab_size, D)
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    for noisy in (False, True):
        work = partial(choose.choose, x, head, zeros.float(), zeros, zeros, noisy=noisy)
        add(f"choose{' with noise' if noisy else ''}", 2 * head.numel(), work)
    capacity = length + 64
    depths = torch.arange(rows, device=device)[None]
    words, paths = attention.ancestor_words((depths - 1).clamp_min(0), depths, rows - 1)
    stores = [empty(1, capacity, 2, Hkv, d) for _ in range(max(2, -(-cold // (4 * capacity * Hkv * d))))]
    q, at = empty(1, rows, H, d), torch.full((1,), length, device=device)
    for own in (None, paths):
        attend = partial(attend_each, q, stores, words, at, depths, own)
        add(
            f"tree_attention{' strict' if own is not None else ''} at {length}",
            4 * length * Hkv * d,
            attend,
            len(stores),
        )
    add("add_norm", 2 * 4 * rows * D, partial(layers.add_norm, x, empty(rows, D), head[0], 1e-5))
    qkv, half = empty(rows, (H + 2 * Hkv) * d), empty(rows, d // 2)
    keys, values = stores[0][0].unbind(1)
    work = partial(layers.rope_write, qkv, half, half, zeros + depths[0], keys, values, num_heads=H)
    add("rope_write", 2 * 2 * qkv.numel(), work)
    fused = empty(rows, 2 * shape.intermediate_size)
    add("silu_mul", 3 * fused.numel(), partial(layers.silu_mul, fused))
    proposal = Proposal(depths, (depths - 1).clamp_min(0), depths, depths)
    add("accept", 4 * 8 * rows, partial(accept.match, proposal, depths, None, rows - 1))
    if rows > 2 * ACCEPTED:
        end_of_round(add, shape, rows, capacity, device)
    if rows > 8:
        for timed in tree_works(f"tree:6x8x{rows}", device):
            add(*timed)
    return parts


def end_of_round(add: Callable[..., None], shape: ModelShape, rows: int, capacity: int, device: torch.device) -> None:
    """Time the steps after acceptance in a tree of `rows` nodes, in which every token of the path must be moved."""
    D, K = shape.hidden_size, ACCEPTED
    wide = 2 * shape.num_key_value_heads * shape.head_dim
    cache = torch.zeros(shape.num_hidden_layers, 1, capacity, wide, dtype=torch.bfloat16, device=device)
    aux_hidden_states, hidden = (
        torch.zeros(1, rows, width, dtype=torch.bfloat16, device=device) for width in (3 * D, D)
    )
    path = torch.arange(K + 1, device=device)[None] + rows - K - 1
    accepted, length = torch.full((1,), K, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    moved = 4 * len(cache) * K * wide
    add(f"compact {K}", moved, partial(compaction.compact, cache, length, path, accepted))
    add(f"take_path {K}", 4 * (K + 1) * 4 * D, partial(accept.take_path, aux_hidden_states, hidden, path))
    state = RoundState.new(batch_size=1, capacity=capacity, depth=K, device=device)
    commit = TritonCommit(state, torch.tensor([2], device=device), K)
    add("commit", state.report.numel() * 8, partial(commit, accepted, path, path))


def each(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Return the product of x and every weight."""
    return [multiply(x, weight) for weight in weights]


def attend_each(
    q: Tensor, stores: list[Tensor], words: Tensor, length: Tensor, depths: Tensor, paths: Tensor | None
) -> list[Tensor]:
    """Return the attention over every cache (1, S, 2, Hkv, d)."""
    caches = [store.unbind(2) for store in stores]
    return [attention.tree_attention(q, k, v, words, length, depths, paths=paths) for k, v in caches]


def tree_works(text: str, device: torch.device, columns: int = COLUMNS) -> list[tuple[str, int, Callable[[], Any]]]:
    """Return the work to draft a tree, without its head's passes: name, bytes read and written, and function."""
    shape = parse_shape(text)
    K, drawn = shape.top_k, 1 + shape.top_k + (shape.depth - 1) * shape.top_k**2
    distributions = torch.randn(shape.depth, 1, shape.nodes, K, device=device).log_softmax(-1)
    logits = torch.randn(1, K, columns, device=device).bfloat16()
    ids, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
    noise = Noise(ids[:, None].expand(-1, K), one, ids)
    picks = f"{K} of {columns} picked for each of {K}"
    return [
        (
            f"nodes of {text} chosen",
            36 * (drawn + shape.nodes),
            partial(grow_from, shape, distributions, TRITON.select),
        ),
        (picks, 2 * logits.numel(), partial(best_columns, logits, K)),
        (f"{picks} with noise", 2 * logits.numel(), partial(best_columns, logits, K, None, noise)),
    ]


def grow_from(shape: TreeShape, distributions: Tensor, select: Select) -> Proposal:
    """Grow a tree whose draws are columns 0, 1, ... with log-probabilities `distributions` (K, B, N, R) by level."""
    columns, level = torch.arange(distributions.shape[3], device=distributions.device), 0

    def pick(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        nonlocal level
        level += 1
        logp = distributions[level - 1, :, : logits.shape[1], :count]
        return columns[:count].expand(logp.shape), logp

    def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
        return distributions[0, :, :1].expand(-1, tokens.shape[1], -1)

    root = torch.arange(distributions.shape[1], device=distributions.device)
    return grow(shape, root, root, expand(root[:, None], root, root, 0), pick, expand, None, select)
