"""Reference implementations of the Triton kernels, with torch operations."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from heads.backends.slot_mapping import Drafted, Observed, ancestors
from heads.backends.torch.linear import Norm
from heads.backends.torch.noise import gumbel
from heads.backends.triton.inputs import Stand


def pack_bits(above: Tensor) -> Tensor:
    """Pack (B, N, N) bool into (B, N, W) int64, 64 bits per word."""
    B, N, _ = above.shape
    W = -(-N // 64)
    padded = torch.nn.functional.pad(above, (0, W * 64 - N)).view(B, N, W, 64)
    return (padded.long() << torch.arange(64, device=above.device)).sum(-1)


def ancestor_words_twin(parents: Tensor, depths: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    above = ancestors(parents, depth)
    B, N, _ = above.shape
    place = torch.where(above, depths[:, None].expand(B, N, N), depth + 1)
    node = torch.arange(N, device=parents.device).expand(B, N, N)
    return pack_bits(above), node.new_zeros(B, N, depth + 2).scatter_(2, place, node)[..., : depth + 1]


def tree_attention_twin(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    words: Tensor,
    length: Tensor,
    depths: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Return the attention of a tree's nodes, computed in float32 or wider."""
    (B, N, H, _), (S, Hkv) = q.shape, keys.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    slot = torch.arange(S, device=q.device)
    node = (slot - length[:, None])[:, None]  # (B, 1, S), the tree's node in each slot
    at = node.clamp(0, N - 1).expand(B, N, S)
    bit = (words.gather(2, at // 64) >> (at % 64)) & 1  # (B, N, S)
    seen = (node < 0) | ((node < N) & (bit == 1))
    if window:
        key_position = torch.where(node < 0, slot, length[:, None, None] + depths.gather(1, at[:, 0])[:, None])
        seen &= (length[:, None] + depths)[:, :, None] - key_position < window
    grouped = q.to(wide).view(B, N, Hkv, H // Hkv, -1)
    scores = torch.einsum("bnkgd,bskd->bkgns", grouped, keys.to(wide)) * scale
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    out = torch.einsum("bkgns,bskd->bnkgd", weights, values.to(wide))
    return out.reshape(B, N, H, -1).to(q.dtype)


def choose_twin(
    hidden: Tensor, weight: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, noisy: bool
) -> Tensor:
    logits = hidden.float() @ weight.float().T  # (M, V)
    if not noisy:
        return logits.argmax(-1)
    row = torch.arange(len(hidden), device=hidden.device) // (len(hidden) // len(seeds))
    temperature, seeds = temperature[row], seeds[row]
    hot = (temperature > 0)[:, None]
    noise = gumbel(seeds, positions[:, None], torch.arange(len(weight), device=hidden.device))[:, 0]
    return torch.where(hot, logits / torch.where(hot, temperature[:, None], 1.0) + noise, logits).argmax(-1)


def compact_twin(cache: Tensor, length: Tensor, path: Tensor, accepted: Tensor) -> None:
    place = torch.arange(path.shape[1], device=path.device)
    goal = length[:, None] + place
    source = torch.where(place <= accepted[:, None], length[:, None] + path, goal)
    row = torch.arange(len(length), device=path.device)[:, None]
    cache[:, row, goal] = cache[:, row, source]


def add_parts_twin(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the parts, added in the kernel's order."""
    total = torch.zeros_like(sums[0])
    for part in sums:
        total += part
    return total.to(dtype)


def add_norm_twin(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if x is not None:
        residual.add_(x)
    return normed(residual, weight, eps)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x divided by its root mean square and scaled by `weight`, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope_write_twin(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> Tensor:
    Hkv, d = keys.shape[1:]
    q, k, v = qkv.view(len(qkv), -1, d).split([num_heads, Hkv, Hkv], dim=1)
    rotated = []
    for x, norm in ((q, q_norm), (k, k_norm)):
        first, second = (x if norm is None else normed(x, norm, 1e-6)).float().chunk(2, dim=-1)
        c, s = cos.float()[:, None], sin.float()[:, None]
        rotated.append(torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(qkv.dtype))
    keys.index_copy_(0, slots, rotated[1].to(keys.dtype))
    values.index_copy_(0, slots, v.to(values.dtype))
    return rotated[0]


def silu_mul_twin(fused: Tensor) -> Tensor:
    gate, up = fused.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(fused.dtype)


def per_head_mm_twin(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def expert_mm_twin(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Return each visit's product with its expert's matrix, which is copied for every visit."""
    visits = x[:, None].expand(-1, ids.shape[1], -1) if x.dim() == 2 else x
    return torch.einsum("mank,mak->man", weight[ids], visits)


def weigh_visits_twin(visits: Tensor, weights: Tensor, added: Tensor | None) -> Tensor:
    total = (visits.float() * weights[..., None]).sum(1)
    return (total if added is None else total + added.float()).to(visits.dtype)


def stand_twin(mapping: Observed | Drafted, *, behind: int) -> Stand:
    (B, W), S, positions = mapping.positions.shape, len(mapping.slot), mapping.positions
    if isinstance(mapping, Drafted):
        word, paths = torch.arange(-(-behind // 64)), mapping.paths[..., None]
        words = torch.where(paths // 64 == word, 1 << (paths % 64), 0).sum(2)
    else:
        node = torch.arange(W)
        true = torch.full_like(positions[:, 0], W) if mapping.count is None else mapping.count
        words = pack_bits((node <= node[:, None]) & (node[:, None] < true[:, None, None]))
    slots = mapping.slots(S - 1) + torch.arange(B)[:, None] * S
    return Stand(positions.flatten(), slots.flatten(), words)


def enter_twin(
    tokens: Tensor,
    embedded: Tensor,
    states: Tensor,
    rows: Tensor | None,
    mapping: Observed | Drafted,
    token_norm: Norm,
    state_norm: Norm,
    *,
    behind: int,
    state_first: bool = False,
    zero_first: bool = False,
) -> tuple[Tensor, Tensor, Stand]:
    table = embedded[tokens] if embedded.dim() == 2 else embedded
    if zero_first:
        table = table.masked_fill((mapping.positions == 0)[..., None], 0.0)
    above = states if rows is None else states.gather(1, rows[..., None].expand(-1, -1, states.shape[2]))
    halves = [token_norm(table.to(states.dtype).flatten(0, 1)), state_norm(above.flatten(0, 1))]
    x = torch.cat(halves[::-1] if state_first else halves, dim=1)
    return x, above.flatten(0, 1).clone(), stand_twin(mapping, behind=behind)
