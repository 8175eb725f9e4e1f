"""Small random heads in float64, random batches, and the state of a head that has seen the beginning of one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from heads.core.contract import Batch, DraftHead, Observation, Rows, SharedLayers
from heads.core.tree import Proposal, parse_shape
from heads.methods.eagle3 import Eagle3, Eagle3Config
from heads.methods.mtp import Mtp, MtpConfig
from heads.methods.state_recycling import Recycling
from heads.parts.initial_weights import TargetProbe
from heads.parts.vocab import build_vocab
from heads.targets.frozen_target import FrozenTarget
from train.features.feature_source import make_batch

Head = TypeVar("Head", bound=Recycling)
SIZES: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4, rms_norm_eps=1e-5,
    vocab_size=40, num_target_layers=8, draft_vocab_size=24, rope_theta=100.0, max_position_embeddings=64, depth=4,
)  # fmt: skip
BLOCK_SIZES = {name: value for name, value in SIZES.items() if name not in ("draft_vocab_size", "depth")} | dict(
    aux_layer_ids=(2, 4), mask_token_id=39, block_size=4, num_layers=2, num_anchors=6
)
"""Of heads that draft a block."""
BLOCK_HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": dict(conv_group_size=8, selector_rank=6, selector_top_k=12),
    "dspark": dict(markov_rank=6),
    "lilicorr": dict(
        lilicorr_candidate_topk=4, lilicorr_hidden_size=16, lilicorr_num_heads=2, lilicorr_factor_dim=6,
        lilicorr_mlp_ratio=1.5,
    ),
    "xpress": dict(xpress_rank=16, xpress_mlp_hidden=64, xpress_topc=12),
    "domino": dict(gru_hidden_dim=6, emb_dim=5),
}  # fmt: skip
"""Settings of their own."""


def eagle3_head(**changes: Any) -> Eagle3:
    return filled(Eagle3, Eagle3Config.from_plain({**SIZES, "aux_layer_ids": (2, 4, 5), **changes}))


def mtp_head(**changes: Any) -> Mtp:
    return filled(Mtp, MtpConfig.from_plain({**SIZES, **changes}))


def filled(kind: Callable[[Any, Tensor], Head], config: Any) -> Head:
    counts = torch.randint(0, 9, (config.vocab_size,), generator=torch.Generator().manual_seed(1))
    head: Head = randomised(kind(config, build_vocab(counts, config.draft_vocab_size)))
    return head.double()


def randomised(head: Any, std: float = 0.3) -> Any:
    """The head with random weights that nothing of its start is left in, the same at every call."""
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=draw)
    return head.eval()


def random_rows(documents: list[list[int]], vocab: int, labels_from: int = 0) -> Rows:
    """Rows of documents of the given lengths; labels from each document's `labels_from`-th token on."""
    tokens = torch.randint(2, vocab, (len(documents), sum(documents[0])))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in documents])
    return Rows(tokens, positions >= labels_from, positions, ids)


def target_batch(
    target: FrozenTarget, documents: list[list[int]], aux_layer_ids: Sequence[int] = (), **labels: int
) -> Batch:
    """Random rows with the features of a target."""
    torch.manual_seed(4)
    return make_batch(target, random_rows(documents, target.vocab_size, **labels), aux_layer_ids, target.dtype)


def random_batch(
    documents: list[list[int]], *, width: int = 16, vocab: int = 40, num_aux_layers: int = 3, labels_from: int = 3
) -> Batch:
    """Rows of documents of the given lengths, random features, float64; labels from each document's `labels_from`-th
    token on."""
    torch.manual_seed(2)
    table, out = torch.randn(2, vocab, width, dtype=torch.float64)
    rows = random_rows(documents, vocab, labels_from)
    B, T = rows.tokens.shape
    return Batch(
        **vars(rows),
        embeddings=table[rows.tokens],
        aux_hidden_states=torch.randn(B, T, num_aux_layers * width, dtype=torch.float64),
        hidden=torch.randn(B, T, width, dtype=torch.float64),
        shared=SharedLayers(
            embed_tokens=lambda ids: table[ids], lm_head=lambda hidden: hidden @ out.T, lm_head_weight=out
        ),
    )


def probe_of(batch: Batch, norm: Tensor, scales: Tensor | None = None) -> TargetProbe:
    """A batch's features, of which initial weights are made, with a final norm (D,) and scales of the streams (L,)."""
    assert batch.shared.lm_head_weight is not None
    return TargetProbe(
        **{name: getattr(batch, name) for name in ("tokens", "embeddings", "aux_hidden_states", "hidden")},
        scales=norm.new_ones(0) if scales is None else scales,
        norm=norm,
        lm_head_weight=batch.shared.lm_head_weight,
        logit_scale=1.0,
        token_counts=torch.ones(len(batch.shared.lm_head_weight)),
        embed_tokens=batch.shared.embed_tokens,
    )


def observe(head: DraftHead, state: Any, batch: Batch, start: Tensor, count: Tensor, width: int) -> None:
    """Show `count` (B,) positions of each row from `start` (B,) on, with padding behind them up to `width`."""
    rows = (start[:, None] + torch.arange(width + 1)).clamp_max(batch.tokens.shape[1] - 1)
    aux_hidden_states, hidden = (
        x.gather(1, rows[:, :width, None].expand(-1, -1, x.shape[2])) for x in (batch.aux_hidden_states, batch.hidden)
    )
    head.extend(state, Observation(batch.tokens.gather(1, rows), aux_hidden_states, hidden, start, count, None))


def seen(head: DraftHead, batch: Batch, shape: str, lengths: list[int]) -> Any:
    """A draft state that has seen the first `lengths` positions of each row, in one go."""
    state = head.new_state(batch.shared, batch_size=len(lengths), capacity=28, shape=parse_shape(shape))
    count = torch.tensor(lengths)
    observe(head, state, batch, torch.zeros_like(count), count, max(lengths))
    return state


def loss_agrees(head: Any, batch: Batch, loss: Tensor, sums: Tensor, scale: Tensor, **tolerance: Any) -> None:
    """Compare a head's loss, its sums (K,) and the gradients of all its weights with those worked out from the same
    weights. A loss weighted by the head's own predictions is a sum, to be divided by the sum of the weights."""
    loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}
    trained = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert wanted.keys() == trained.keys()
    head.zero_grad()
    found = head.loss(batch, scale)
    found.loss.backward()
    divisor = 1.0 if found.weight is None else float(found.weight)
    torch.testing.assert_close(found.sums, sums.detach(), **tolerance)
    torch.testing.assert_close(found.loss.detach() / divisor, loss.detach(), **tolerance)
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad / divisor, wanted[name], msg=name, **tolerance)


def greedy(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logp, columns = logits.log_softmax(-1).topk(count, dim=-1)
    return columns if token_ids is None else token_ids[columns], logp


def token_paths(proposal: Proposal, b: int = 0) -> list[tuple[int, ...]]:
    """The tokens on the path to each node of row b, from the root's child on."""
    paths: list[tuple[int, ...]] = [()]
    for j in range(1, proposal.tokens.shape[1]):
        paths.append((*paths[int(proposal.parents[b, j])], int(proposal.tokens[b, j])))
    return paths


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x (.., T, d) at positions (.., T), by complex numbers."""
    half = x.shape[-1] // 2
    angle = positions[..., None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)
