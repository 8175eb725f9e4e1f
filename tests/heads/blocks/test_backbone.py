"""Heads that draft a whole block: what they are trained to do is what they do when they draft."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import pad

from heads.blocks.backbone import DraftBlockHead
from heads.blocks.block_attention import AttentionWindow, BlockVisibility, all_blocks, by_pieces, by_tiles, draw_blocks
from heads.blocks.dflash2 import DFlash2
from heads.blocks.domino import Domino
from heads.blocks.dspark import DSpark
from heads.blocks.lilicorr import LiLiCorr
from heads.blocks.xpress import XPress
from heads.core.contract import Batch
from heads.core.tree import parse_shape
from heads.parts.head_shape import spread_layer_ids
from heads.registry import HEADS
from heads.targets.masks import TILE
from tests.heads.conftest import largest_tensor
from tests.support.refusals import refused
from tests.support.small_heads import (
    BLOCK_HEADS,
    BLOCK_SIZES,
    greedy,
    loss_agrees,
    random_batch,
    randomised,
    rope,
    seen,
    token_paths,
)  # fmt: skip

V, D = 40, 16
SCALED = {"rope_type": "linear", "factor": 3.0}
ROWS = [[11, 3, 7], [2, 1, 18]]


def make_head(kind: str, **changes: Any) -> DraftBlockHead:
    method: Any = HEADS[kind].head
    own = BLOCK_HEADS[kind] | ({"lattice_margin_weight": 0.5} if kind == "lilicorr" else {})
    head: DraftBlockHead = randomised(method(method.Config.from_plain(BLOCK_SIZES | own | changes)))
    return head.double()


def make_batch(documents: list[list[int]] = ROWS, *, labels_from: int = 3) -> Batch:
    return random_batch(documents, width=D, vocab=V, num_aux_layers=2, labels_from=labels_from)


def lm_head(batch: Batch) -> Tensor:
    """(V, D) the target's output head."""
    assert batch.shared.lm_head_weight is not None
    return batch.shared.lm_head_weight


def plain_block(head: DraftBlockHead, batch: Batch, b: int, anchor: int, rows: int) -> Tensor:
    """(R, D): one block by itself, written the long way over the keys that it sees and no others."""
    config = head.config
    document = batch.documents[b] == batch.documents[b, anchor]
    before = [p for p in range(anchor) if document[p]]
    context = head.hidden_norm(head.fc(batch.aux_hidden_states[b, before]))
    ids = torch.tensor([int(batch.tokens[b, anchor]), *[config.mask_token_id] * (rows - 1)])
    x = batch.shared.embed_tokens(ids)
    at = batch.positions[b, anchor] + torch.arange(rows)
    positions = torch.cat([batch.positions[b, before], at])
    G, d = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling["factor"]
    layers: Any = head.layers
    for i, layer in enumerate(layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        u = plain_convolution(layer, "attention_conv", normed, normed, 0)

        def heads(y: Tensor) -> Tensor:
            return y.view(len(y), -1, d).transpose(0, 1)

        both = torch.cat([context, u])
        q, k = attention.q_norm(heads(attention.q_proj(u))), attention.k_norm(heads(attention.k_proj(both)))
        q = rope(q, at.double() / factor, config.rope_theta)
        k = rope(k, positions.double() / factor, config.rope_theta).repeat_interleave(G, 0)
        v = heads(attention.v_proj(both)).repeat_interleave(G, 0)
        scores = q @ k.mT / math.sqrt(d)
        window = config.sliding_window if config.kinds[i] == "sliding_attention" else None
        for j in range(rows):
            if config.is_causal or (window and config.sliding_causal):
                scores[:, j, len(before) + j + 1 :] = -torch.inf
            if window:  # its own position and window - 1 before it
                scores[:, j, positions <= at[j] - window] = -torch.inf
        made = attention.o_proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        x = x + plain_convolution(layer, "attention_conv", made, normed, 1)
        normed = layer.post_attention_layernorm(x)
        made = layer.mlp(plain_convolution(layer, "mlp_conv", normed, normed, 0))
        x = x + plain_convolution(layer, "mlp_conv", made, normed, 1)
    out: Tensor = head.norm(x)
    return out


def plain_convolution(layer: Any, name: str, x: Tensor, normed: Tensor, side: int) -> Tensor:
    """One convolution over the rows x (R, D) of a block, channel by channel; x itself where the layer has none."""
    conv = getattr(layer, name, None)
    if conv is None:
        return x
    (R, D), t = x.shape, conv.base_kernel.shape[1]
    group = D // (len(conv.kernel_projection.weight) // (2 * t))
    out = torch.zeros_like(x)
    for row in range(R):
        dynamic = (conv.kernel_projection.weight @ normed[row]).view(2, t, -1)
        for tap in range(min(t, row + 1)):
            kernel = conv.base_kernel[side, tap] + dynamic[side, tap].repeat_interleave(group)
            out[row] = out[row] + kernel * x[row - tap]
    return out


def plain_choice(head: DFlash2, logits: Tensor, state: Tensor, before: int) -> Tensor:
    """(V,) logits of which those of the likeliest tokens alone are finite, with what the token before adds."""
    selector = head.candidate_selector
    wanted = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ state)
    chosen = torch.full_like(logits, -torch.inf)
    for token in logits.argsort(descending=True)[: head.config.selector_top_k].tolist():
        chosen[token] = logits[token] + selector.successor_codebook[token] @ wanted
    return chosen


def plain_lattice(head: LiLiCorr, batch: Batch, states: Tensor, newest: Tensor) -> tuple[list[list[int]], Any]:
    """The candidates of each row of a block with states (K, D), and a function (row, a, b) -> score of the b-th
    candidate of a row behind the a-th of the row before it. newest (D,): the context before the root."""
    net: Any = head.lilicorr
    c, K = head.config, len(states)
    h, k, H = c.lattice_width, c.lilicorr_candidate_topk, c.lilicorr_num_heads
    logs = (states @ lm_head(batch).T).log_softmax(-1)
    candidates = [row.argsort(descending=True)[:k].tolist() for row in logs]
    nodes = []
    for row, tokens in enumerate(candidates):
        for rank, token in enumerate(tokens):
            log, first = logs[row, token], logs[row, tokens[0]]
            features = torch.stack(
                [log, log.exp(), log - first, log.new_tensor(rank / (k - 1)), log.new_tensor(float(rank == 0))]
            )
            node = net.pass_hidden_proj(states[row]) + net.feature_mlp(net.feature_norm(features))
            embedding = batch.shared.embed_tokens(torch.tensor(token))
            node = node + (embedding if h == D else net.token_proj(embedding))
            nodes.append(node + net.slot_embedding[0, 0, row, 0] + net.rank_embedding[0, 0, 0, rank])
    x = torch.stack(nodes)
    slot = torch.arange(K * k) // k
    apart = slot[:, None] - slot
    for layer in net.layers:
        u = layer.attn_norm(x)
        q, keys, v = (u @ layer.attn.in_proj_weight.T + layer.attn.in_proj_bias).split(h, -1)
        found = []
        for i in range(H):
            part = slice(i * h // H, (i + 1) * h // H)
            scores = q[:, part] @ keys[:, part].T / math.sqrt(h // H)
            bias = net.relative_slot_bias[i, apart + c.block_size - 1] + net.same_slot_bias[i] * (apart == 0)
            found.append((scores + bias).softmax(-1) @ v[:, part])
        x = x + layer.attn.out_proj(torch.cat(found, -1))
        x = x + layer.mlp(layer.mlp_norm(x))
    x, anchor = net.output_norm(x), net.anchor_norm(net.context_proj(newest))
    inner = [torch.nn.functional.silu(net.factor_input_proj(torch.cat([y, anchor, y * anchor]))) for y in x]

    def score(row: int, a: int, b: int) -> Tensor:
        leaving = net.out_head(inner[(row - 1) * k + a]) if row else net.anchor_out_head(anchor)
        entering = net.in_head(inner[row * k + b])
        cosine: Tensor = leaving @ entering / leaving.norm() / entering.norm()
        return c.lilicorr_logit_scale * cosine

    return candidates, score


def plain_refined(head: XPress, states: Tensor, path: list[int]) -> Tensor:
    """(V,) what the refiner adds to the logits of the row behind a path from the root on. states (R, D): of all
    rows."""
    net, mean = head.xpress_head, states.mean(0)
    before = [path[0], *path]
    x = [
        net.in_proj.weight @ torch.cat([net.down_h(state), net.down_g(mean), net.w1.weight[token]])
        for state, token in zip(states, before, strict=False)
    ]
    last = len(x) - 1
    y = x[-1] + sum(net.mix.L[:, last, i] * x[i] for i in range(len(x)))
    added: Tensor = net.w2.weight @ (y + net.mlp(y))
    return added


def plain_correction(head: Domino, batch: Batch, state: Tensor, path: list[int]) -> Tensor:
    """(V,) what is added to the logits of the row behind a path from the root on."""
    gru: Any = head.prefix_gru
    inner, outer = (cast(nn.Linear, head.embed_proj[i]) for i in (0, 2))
    g = torch.zeros(head.config.gru_hidden_dim, dtype=torch.float64)
    for token in path:
        x = batch.shared.embed_tokens(torch.tensor(token))
        reset, update, new = (gru.weight_ih_l0 @ x).chunk(3)
        of_reset, of_update, of_new = (gru.weight_hh_l0 @ g).chunk(3)
        share = (update + of_update).sigmoid()
        g = share * g + (1 - share) * (new + (reset + of_reset).sigmoid() * of_new).tanh()
    latent = inner.weight @ torch.cat([state, g])
    added: Tensor = outer.weight @ (latent * latent.sigmoid())
    return added


def plain_lattice_loss(head: LiLiCorr, logits: Tensor, p: Tensor, label: int) -> Tensor:
    """What one row adds to the loss, from its logits by the lattice (V,) and the target's distribution p (V,)."""
    config, kept = head.config, logits.isfinite()
    logq = logits.log_softmax(-1)
    truth = torch.eye(V)[label].double() if config.loss == "labels" else p
    loss = -config.lattice_ce_weight * (truth * logq)[kept].sum()
    if kept[label]:
        others = kept.clone()
        others[label] = False
        margin = config.lattice_margin - logits[label] + logits[others].max()
        loss = loss + config.lattice_margin_weight * margin.relu()
        gaps = (p[label].log() - p.log()).clamp_min(0)
        loss = loss + config.lattice_penalty_weight * (logq.exp() * gaps)[kept].sum()
    return loss


def plain_logits(
    head: DraftBlockHead, batch: Batch, b: int, anchor: int, drafts: int | None = None
) -> Callable[[int, list[int]], Tensor]:
    """(k, path) -> logits (V,) of the k-th token of a block, behind a path from its root on: in training, or of a draft
    of so many tokens. Those of tokens that are no candidates are -inf; all candidates are alike behind a token that was
    none."""
    rows = head.config.spare_rows + (drafts or head.depth)
    every, matrix = plain_block(head, batch, b, anchor, rows), lm_head(batch)
    states = every[head.first_row :]
    if isinstance(head, LiLiCorr):
        candidates, score = plain_lattice(head, batch, states, head.fuse(batch.aux_hidden_states[b, anchor - 1]))

    def logits(k: int, path: list[int]) -> Tensor:
        base = matrix @ states[k]
        if isinstance(head, DFlash2):
            return plain_choice(head, base, states[k], path[-1])
        if isinstance(head, DSpark):
            return base + head.markov_head.markov_w2.weight @ head.markov_head.markov_w1.weight[path[-1]]
        if isinstance(head, XPress):
            weakest = base.sort(descending=True).values[head.config.candidates - 1]
            return (base + plain_refined(head, every, path)).masked_fill((base < weakest) & bool(drafts), -torch.inf)
        if isinstance(head, Domino) and k >= head.config.pure_draft_prefix_len:
            return base + plain_correction(head, batch, states[k], path)
        if not isinstance(head, LiLiCorr):
            return base
        drafted = torch.full((V,), -torch.inf, dtype=torch.float64)
        if k and path[-1] not in candidates[k - 1]:
            drafted[candidates[k]] = 0.0
        else:
            a = candidates[k - 1].index(path[-1]) if k else 0
            drafted[candidates[k]] = torch.stack([score(k, a, i) for i in range(len(candidates[k]))])
        return drafted

    return logits


def plain_loss(head: DraftBlockHead, logq: Tensor, p: Tensor, label: int) -> Tensor:
    """DFlash's loss of one row, from log q (V,) and the target's distribution p (V,)."""
    return -logq[label] if head.config.loss == "labels" else (p * (p.log() - logq)).sum()


def plain_losses(head: DraftBlockHead, batch: Batch, b: int, anchor: int) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of a block's rows up to the first without a label, and the draft's probabilities of the labels."""
    config, K, matrix = head.config, head.depth, lm_head(batch)
    every, logits = plain_block(head, batch, b, anchor, config.block_size), plain_logits(head, batch, b, anchor)
    states = every[head.first_row :]
    root, rounds, losses, probs, held = int(batch.tokens[b, anchor]), [], [], [], True
    if isinstance(head, XPress):
        best = (states @ matrix.T).argmax(-1).tolist()
        for _ in range(config.consistency_passes):
            rounds.append([root, *best[:-1]])
            best = [int(logits(k, rounds[-1][: k + 1]).argmax()) for k in range(K)]
    for k, label in enumerate(range(anchor + 1, anchor + 1 + K)):
        if label >= batch.tokens.shape[1] or not batch.loss_mask[b, label]:
            break
        if batch.documents[b, label] != batch.documents[b, anchor]:
            break
        token, path = int(batch.tokens[b, label]), batch.tokens[b, anchor:label].tolist()
        p = batch.shared.lm_head(batch.hidden[b, label - 1]).softmax(-1)
        choice, base = logits(k, path), (matrix @ states[k]).log_softmax(-1)
        logq = base if isinstance(head, LiLiCorr) else choice.log_softmax(-1)
        if isinstance(head, DSpark):
            assert head.confidence_head is not None
            proj: Any = head.confidence_head.proj
            distance = (p - logq.exp()).abs().sum()
            w1 = head.markov_head.markov_w1.weight[path[-1]]
            sure = (proj.weight[0] @ torch.cat([states[k], w1]) + proj.bias[0]).sigmoid()
            truth = (1 - distance / 2).detach()
            bce = -(truth * sure.log() + (1 - truth) * (1 - sure).log())
            kl = (p * (p.log() - logq)).sum()
            loss = 0.1 * -logq[token] + config.kl_weight * kl + 0.9 * distance + bce
        elif isinstance(head, XPress):
            loss = plain_loss(head, logq, p, token) + config.base_weight * plain_loss(head, base, p, token)
            drafted = [logits(k, before[: k + 1]).log_softmax(-1) for before in rounds]
            if drafted:
                of_rounds = torch.stack([plain_loss(head, log, p, token) for log in drafted])
                loss = loss + config.consistency_weight * of_rounds.mean()
        elif isinstance(head, Domino):
            share = max(0.0, 1 - batch.progress / config.base_decay)
            loss = (1 - share) * plain_loss(head, logq, p, token) + share * plain_loss(head, base, p, token)
        else:
            loss = plain_loss(head, base, p, token)
            if isinstance(head, DFlash2):
                truth, chosen = torch.eye(V)[token].double() if config.loss == "labels" else p, choice.isfinite()
                loss = loss - config.selector_weight * (truth * logq)[chosen].sum()
            if isinstance(head, LiLiCorr):
                loss = loss + (plain_lattice_loss(head, choice, p, token) if held else 0)
                held = held and bool(choice[token].isfinite())
        losses.append(loss)
        probs.append(logq[token].exp().detach())
    return losses, probs


def plain_terms(head: DraftBlockHead, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted losses (K,), weights (K,) and unweighted losses (K,), summed over blocks, all logits at once."""
    K, blocks = head.depth, draw_blocks(batch, head.config.num_anchors)
    weighted = torch.zeros(K, dtype=torch.float64)
    weights, plain = torch.zeros(2, K, dtype=torch.float64)
    for b, n in blocks.live.nonzero().tolist():
        losses, probs = plain_losses(head, batch, b, int(blocks.anchors[b, n]))
        reached = [math.prod(0.5 + 0.5 * float(q) for q in probs[: k + 1]) for k in range(len(probs))]
        for k, loss in enumerate(losses):
            weight = sum(reached[k:]) if head.weighs_rows else math.exp(-k / head.config.gamma)
            weighted = weighted + weight * loss * torch.eye(K)[k]
            weights[k] += weight
            plain[k] += loss.detach()
    return weighted, weights, plain


BY_LABELS = {"loss": "labels", "weights": "d_pace"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {}),
    ("dflash", {"loss": "labels", "causal": True}),
    ("dflash", {"weights": "d_pace"}),
    ("dflash", {"sliding_window": 5}),
    ("dflash", {"sliding_window": 5, "layer_types": ("full_attention", "sliding_attention"), "sliding_causal": False}),
    ("dflash", {"sliding_window": 6, "sliding_causal": False, "rope_scaling": SCALED}),
    ("dflash2", {}),
    ("dflash2", {**BY_LABELS, "conv_kernel_size": 3, "conv_group_size": 16}),
    ("dflash2", {"sliding_window": 5, "conv_kernel_size": 1, "selector_top_k": 1, "selector_weight": 0.3}),
    ("dflash2", {"sliding_window": 6, "sliding_causal": False, "conv_kernel_size": 4}),
    ("dspark", {}),
    ("dspark", {"weights": "d_pace", "kl_weight": 0.5}),
    ("dspark", {"sliding_window": 4, "layer_types": ("sliding_attention", "sliding_attention")}),
    ("dspark", {"rope_scaling": SCALED}),
    ("lilicorr", {}),
    ("lilicorr", {**BY_LABELS, "lilicorr_candidate_topk": 16, "lilicorr_hidden_size": 12, "conv_kernel_size": 2}),
    ("xpress", {}),
    ("xpress", {**BY_LABELS, "consistency_passes": 1, "xpress_topc": 0, "causal": True}),
    ("xpress", {"consistency_passes": 0, "base_weight": 0.0, "xpress_topc": 7}),
    ("domino", {}),
    ("domino", {**BY_LABELS, "shift_label": False, "pure_draft_prefix_len": 0}),
    ("domino", {"base_decay": 0.1, "sliding_window": 5}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_loss_and_gradients_equal_the_plain_formula(
    kind: str, changes: dict[str, Any], few_rows: Callable[[int], None]
) -> None:
    few_rows(8)  # chunks of a few blocks
    head, batch = make_head(kind, **changes), make_batch()
    batch = dataclasses.replace(batch, seed=5, progress=0.2)
    weighted, weights, plain = plain_terms(head, batch)
    # transformers makes scaled positions in float32
    close: dict[str, Any] = dict(rtol=1e-4, atol=1e-5) if "rope_scaling" in changes else dict(rtol=1e-6, atol=1e-9)
    scale = head.loss_scale(head.counts(batch).double())
    assert (head.loss(batch, scale).weight is None) == (not head.weighs_rows)
    loss_agrees(head, batch, weighted.sum() / weights.sum(), plain, scale, **close)


@pytest.mark.parametrize("kind", BLOCK_HEADS)
def test_no_tensor_holds_the_logits_of_all_rows(kind: str) -> None:
    wide, count = 4096, 40
    head = make_head(kind, vocab_size=wide, num_anchors=count, block_size=8, num_layers=1)
    batch = random_batch([[48]] * 4, width=D, vocab=wide, num_aux_layers=2)
    scale = head.loss_scale(head.counts(batch))
    most = largest_tensor(lambda: head.loss(batch, scale).loss.backward())
    assert most < 4 * count * head.depth * wide / 3


def test_a_step_s_anchors_are_drawn_by_its_seed() -> None:
    rows = [dataclasses.replace(make_batch([[40], [40]]), seed=seed) for seed in (1, 1, 2)]
    drawn = [draw_blocks(each, 6).anchors.tolist() for each in rows]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(row == sorted(set(row)) for row in drawn[0])


def test_anchors_are_followed_by_a_label_and_labels_stay_in_their_document() -> None:
    batch = make_batch()
    blocks = draw_blocks(batch, 21)
    for b, documents in enumerate(batch.documents):
        may = [a for a in range(1, 20) if documents[a - 1] == documents[a + 1] and batch.loss_mask[b, a + 1]]
        assert blocks.anchors[b][blocks.live[b]].tolist() == may
    slots, valid = blocks.labels(batch, 3)
    for b, n in blocks.live.nonzero().tolist():
        a = int(blocks.anchors[b, n])
        assert slots[b, n].tolist() == [min(a + k, 20) for k in (1, 2, 3)]
        expected = [a + k < 21 and bool(batch.documents[b, a + k] == batch.documents[b, a]) for k in (1, 2, 3)]
        assert valid[b, n].tolist() == expected
    assert not valid[~blocks.live].any()


def test_blocks_without_labels_or_context_give_no_nan() -> None:
    """A row with fewer anchors than blocks, and a batch with none at all."""
    head = make_head("dspark", num_anchors=30)
    for batch in (make_batch(), make_batch(labels_from=20)):
        counts = head.counts(batch)
        found = head.loss(batch, head.loss_scale(counts))
        found.loss.backward()
        assert found.loss.isfinite() and all(p.grad.isfinite().all() for p in head.parameters() if p.grad is not None)
    assert counts.sum() == 0 == found.loss


WINDOWS = [AttentionWindow(), AttentionWindow(causal=True), AttentionWindow(True, 25), AttentionWindow(False, 7)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_both_forms_of_attention_are_a_dense_mask_s(window: AttentionWindow) -> None:
    B, H, Hkv, T, N, R, d = 2, 4, 2, 150, 50, 7, 8
    torch.manual_seed(3)
    q, k, v = (torch.randn(B, heads, N * R, d, dtype=torch.float64, requires_grad=True) for heads in (H, Hkv, Hkv))
    ck, cv = (torch.randn(B, Hkv, T, d, dtype=torch.float64, requires_grad=True) for _ in range(2))
    anchors = torch.stack([torch.randperm(T)[:N].sort().values for _ in range(B)])
    anchors[1, :5] = 0  # blocks that there are no anchors for
    starts = anchors // 40 * 40
    visible = BlockVisibility(starts, anchors, R, T, window)
    key, row = torch.arange(T + N * R), torch.arange(N * R)
    block = row // R
    before = (key >= starts[:, block, None]) & (key < anchors[:, block, None])
    own = (key >= T) & ((key - T) // R == block[:, None])
    own &= ((key - T) % R <= (row % R)[:, None]) | (not window.causal)
    if window.size is not None:
        before &= key > anchors[:, block, None] + (row % R)[:, None] - window.size
    seen = before | own  # (B, N * R, T + N * R)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, torch.cat([ck, k], 2), torch.cat([cv, v], 2), attn_mask=seen[:, None], enable_gqa=True
    )
    inputs, grad = (q, k, v, ck, cv), torch.randn_like(dense)
    wanted = torch.autograd.grad(dense, inputs, grad)
    found = by_pieces(*inputs, visible)
    torch.testing.assert_close(found, dense)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, grad), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    mask = visible.block_mask
    assert torch.equal(
        create_block_mask(mask.mask_mod, B, None, N * R, T + N * R, device="cpu").to_dense(), tiles(seen)
    )
    assert torch.equal(mask.to_dense().bool() & tiles(seen).bool(), tiles(seen).bool())  # no tile is left out
    for tensor in inputs:  # FlexAttention has no backward pass on a CPU
        tensor.requires_grad_(False)
    torch.testing.assert_close(by_tiles(q, k, v, ck, cv, visible), dense)


def tiles(seen: Tensor) -> Tensor:
    """(B, 1, query tiles, key tiles): 1 where a tile holds anything visible."""
    _, rows, keys = seen.shape
    padded = pad(seen, (0, -keys % TILE, 0, -rows % TILE))
    shown: Tensor = padded.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).any(2).any(-1).int()[:, None]
    return shown


# Drafting


@pytest.mark.parametrize(
    ("shape", "kind", "changes"),
    [("chain:2", *row) for row in CASES]
    + [("tree:3x4x25", *row) for row in CASES if row[1].get("selector_top_k") != 1]
    + [("static:3.2.1", kind, {}) for kind in BLOCK_HEADS],
)
def test_a_nodes_score_is_the_sum_of_log_q_along_its_path(shape: str, kind: str, changes: dict[str, Any]) -> None:
    """By the formula that training has. Each token is drawn behind the tokens before it, which q depends on as the
    method says."""
    head, batch, lengths = make_head(kind, **changes), make_batch([[20], [20]]), [9, 13]
    proposal = head.propose(seen(head, batch, shape, lengths), greedy)
    for b, n in enumerate(lengths):
        logits = plain_logits(head, batch, b, n, parse_shape(shape).depth)
        for path, score in zip(token_paths(proposal, b), proposal.scores[b].tolist(), strict=True):
            tokens = [int(proposal.tokens[b, 0]), *path]
            steps = [float(logits(k, tokens[: k + 1]).detach().log_softmax(-1)[t]) for k, t in enumerate(path)]
            assert score == pytest.approx(sum(steps), abs=1e-4 if "rope_scaling" in changes else 1e-9)


@pytest.mark.parametrize(("kind", "count"), [("dflash2", 12), ("lilicorr", 4)])
def test_no_tree_has_more_children_of_a_node_than_there_are_candidates(kind: str, count: int) -> None:
    said = refused(seen, make_head(kind), make_batch([[20]]), f"tree:2x{count + 1}x{count + 2}", [9])
    assert f"{count + 1} children of a node, the head drafts {count} tokens" in said


def test_the_confidence_of_dspark_reads_the_token_before() -> None:
    head, batch = make_head("dspark"), make_batch([[20]])
    assert isinstance(head, DSpark)
    state = seen(head, batch, "chain:3", [9])
    tokens = head.propose(state, greedy).tokens
    proj: Any = head.confidence_head and head.confidence_head.proj
    before = head.markov_head.markov_w1.weight[tokens[0, :-1]]
    wanted = torch.cat([plain_block(head, batch, 0, 9, 3), before], 1) @ proj.weight[0] + proj.bias
    torch.testing.assert_close(head.confidence(state, tokens)[0], wanted.detach())


# Settings


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [(36, 5, (2, 10, 18, 26, 34)), (20, 3, (2, 10, 18)), (8, 1, (5,)), (5, 5, (2, 3))],
)
def test_default_layers_are_those_of_the_published_heads(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert spread_layer_ids(layers, count) == ids


def test_a_block_begins_where_its_document_does_whatever_the_positions() -> None:
    """A later part of a long document stands behind others, with positions that go on."""
    batch = make_batch([[7, 11, 3]])
    blocks = all_blocks(batch.documents)
    first = torch.tensor([[0] * 7 + [7] * 11 + [18] * 3])
    assert torch.equal(blocks.starts(batch.documents), first[:, 1:])
    head = make_head("dflash", num_anchors=32)
    moved = dataclasses.replace(batch, positions=batch.positions + 40 * (batch.documents == 1))
    for rows in (2, 4):
        torch.testing.assert_close(head.unroll(moved, blocks, rows).states, head.unroll(batch, blocks, rows).states)
