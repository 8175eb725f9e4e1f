"""EAGLE-3 against its formula, written the long way."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heads.core.contract import Batch
from heads.methods.eagle3 import Eagle3
from tests.heads.parts.test_ttt_attention import dense
from tests.support.refusals import refused
from tests.support.small_heads import eagle3_head, loss_agrees, probe_of, random_batch, rope


def by_head(x: Tensor, d: int) -> Tensor:
    return x.view(*x.shape[:2], -1, d).transpose(1, 2)


def plain_loss(head: Eagle3, batch: Batch) -> Tensor:
    """The same loss written the long way: one dense mask over T * steps keys, all logits at once. Returns (K,) sums."""
    config, T = head.config, batch.tokens.shape[1]
    kept = head.draft_to_target
    d = config.head_dim
    teacher = batch.shared.lm_head(batch.hidden)  # (B, T, V); row t predicts x_{t+1}
    p = teacher[..., kept].softmax(-1)
    state = head.fuse(batch.aux_hidden_states)
    sums = []
    seen: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(config.num_layers)]
    embeddings = batch.embeddings if head.embed_tokens is None else head.embed_tokens(batch.tokens)
    turned = int(d * (config.rope_scaling or {}).get("partial_rotary_factor", 1))
    layers: list[Any] = [head.midlayer, *head.layers.values()]
    for i in range(config.depth):
        at = (batch.positions + i)[:, None]
        for layer, (all_keys, all_values) in zip(layers, seen, strict=True):
            if layer is head.midlayer:
                normed = layer.hidden_norm(state)
                x = torch.cat([layer.input_layernorm(embeddings.roll(-1 - i, 1)), normed], -1)
                state = normed if config.norm_before_residual else state
            else:
                x = layer.input_layernorm(state)
            q, k, v = (by_head(layer.self_attn.get_submodule(f"{name}_proj")(x), d) for name in "qkv")
            if config.qk_norm:
                q, k = layer.self_attn.q_norm(q), layer.self_attn.k_norm(k)
            q, k = (torch.cat([rope(y[..., :turned], at, config.rope_theta), y[..., turned:]], -1) for y in (q, k))
            all_keys.append(k)
            all_values.append(v)
            out = dense(q, all_keys, all_values, batch.documents).transpose(1, 2).flatten(2)
            state = state + layer.self_attn.o_proj(out)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
        logq = head.lm_head(head.norm(state)).log_softmax(-1)
        ahead = i + 1  # from row t to the row that predicts its label, x_{t+2+i}
        labels = batch.loss_mask.roll(-ahead - 1, 1) & (batch.documents.roll(-ahead - 1, 1) == batch.documents)
        labels &= (torch.arange(T) + ahead + 1 < T) & torch.isin(teacher.argmax(-1), kept).roll(-ahead, 1)
        target = p.roll(-ahead, 1)
        sums.append((target * (target.log() - logq)).sum(-1)[labels].sum())
        if config.norm_output:
            state = head.norm(state)
    return torch.stack(sums)


PART: dict[str, Any] = {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}, "head_dim": 8}
FORMS: list[dict[str, Any]] = [
    {},
    {"norm_output": True, "fc_norm": True},
    {"norm_before_residual": True},
    {"hidden_size": 24, "target_hidden_size": 16, "own_embeddings": True, "num_layers": 2, "qk_norm": True, **PART},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_loss_and_gradients_equal_the_dense_reference(form: dict[str, Any]) -> None:
    head, batch = eagle3_head(**form), random_batch([[11, 3, 7], [2, 1, 18]])
    assert head.counts(batch).tolist() == [27, 27, 24, 21]
    scale = torch.tensor([0.5, 0.25, 0.2, 0.1], dtype=torch.float64)
    sums = plain_loss(head, batch)
    loss_agrees(head, batch, (sums * scale).sum(), sums, scale)


def test_one_norm_of_all_auxiliary_states() -> None:
    head, batch = eagle3_head(norm_before_fc=True), random_batch([[20]])
    assert head.input_norm is not None
    together = batch.aux_hidden_states  # (B, T, L * D)
    size = (together.square().mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt()
    torch.testing.assert_close(head.fuse(together), head.fc(together / size * head.input_norm.weight))
    assert "head.fc_norm, norm_before_fc" in refused(eagle3_head, norm_before_fc=True, fc_norm=True)


@pytest.mark.parametrize("fc_norm", [False, True])
def test_initialise_starts_from_states_of_unit_size(fc_norm: bool) -> None:
    head, batch, scales = eagle3_head(fc_norm=fc_norm), random_batch([[20]]), torch.tensor([3.0, 30.0, 300.0]).double()
    with torch.no_grad():
        head.fc.weight.normal_(std=0.02)
        for parameter in head.fc_norm.parameters() if head.fc_norm is not None else ():
            parameter.fill_(1.0)
    head.initialise(probe_of(batch, torch.rand(16).double(), scales))
    fused = head.fuse(batch.aux_hidden_states * scales.repeat_interleave(16))
    assert 0.8 < float(fused.detach().square().mean().sqrt()) < 1.3
