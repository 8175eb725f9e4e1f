"""Multi-token prediction against its formula, with one module or several."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.core.contract import Batch
from heads.kernels.product import Product
from heads.methods.mtp import MtpConfig
from heads.parts.family_layers import BlockMaker
from heads.parts.initial_weights import UNSURE
from tests.support.native_mtp import COMMON, GLM, D
from tests.support.small_heads import mtp_head, probe_of, random_batch, rope

FORMS = [
    {"num_modules": 1},
    {"num_modules": 2, "layout": "deepseek"},
    {"num_modules": 4},
    {"num_modules": 1, "layout": "qwen"},
]
"""One module for all four steps; two, of which the second does three; one for each; one that reads every token."""


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_states(config: MtpConfig, batch: Batch, weights: dict[str, Tensor]) -> list[Tensor]:
    """DeepSeek-V3's formula written the long way, slot by slot: h^k_t for each k, from lists of keys.

    Module k reads [norm(h^{k-1}_t) ; norm(e(x_{t+k}))] and attends to its own inputs of the slots before; where the
    last module is used again, to its first inputs of the slots before and to its own of this slot.
    """
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    B, T, D = batch.hidden.shape
    states, out = batch.hidden, []
    first: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    later: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    for k in range(1, config.depth + 1):
        i = min(k, config.num_modules) - 1
        w = {n.removeprefix(f"mtp_layers.{i}."): v for n, v in weights.items() if n.startswith(f"mtp_layers.{i}.")}
        made = torch.full_like(states, torch.nan)

        def norm(x: Tensor, name: str, w: dict[str, Tensor] = w) -> Tensor:
            return rms(x, w[f"{name}.weight"], config.rms_norm_eps)

        def attended(y: Tensor, name: str, w: dict[str, Tensor] = w) -> Tensor:
            name = f"block.self_attn.{name}_proj"
            return (w[f"{name}.weight"] @ y + w.get(f"{name}.bias", 0.0)).view(-1, d)

        if k <= config.num_modules:
            first, later = {}, {(b, t): [] for b in range(B) for t in range(T)}
        for b in range(B):
            for t in range(T):
                if t + k >= T or batch.documents[b, t + k] != batch.documents[b, t]:
                    continue
                position, theta = batch.positions[b, t : t + 1] + k - 1, config.rope_theta
                zeroed = int(position) == 0 and config.layout != "qwen"  # as the engines' classes of the others do
                token = batch.embeddings[b, t + k] * (not zeroed)
                parts = [norm(token, "token_layernorm"), norm(states[b, t], "hidden_layernorm")]
                x = w["input_proj.weight"] @ torch.cat(parts[::-1] if config.layout == "mimo" else parts)
                y = norm(x, "block.input_layernorm")
                q, key = (rope(attended(y, name), position, theta) for name in "qk")
                value = attended(y, "v")
                if k <= config.num_modules:
                    first[b, t] = (key, value)
                else:
                    later[b, t].append((key, value))
                start = t - int(batch.positions[b, t])
                seen = [first[b, s] for s in range(start, t + 1)] + later[b, t]
                heard = []
                for head_id in range(heads):
                    g = head_id // (heads // groups)
                    scores = torch.stack([q[head_id] @ key[g] for key, _ in seen]) / math.sqrt(d)
                    heard.append(scores.softmax(0) @ torch.stack([value[g] for _, value in seen]))
                x = x + w["block.self_attn.o_proj.weight"] @ torch.cat(heard)
                y = norm(x, "block.post_attention_layernorm")
                gate, up = w["block.mlp.gate_proj.weight"] @ y, w["block.mlp.up_proj.weight"] @ y
                x = x + w["block.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
                made[b, t] = norm(x, "final_layernorm")
        assert made.shape == (B, T, D)
        out.append(made)
        states = made
    return out


@pytest.mark.parametrize("form", FORMS)
def test_the_states_are_the_papers_formula(form: dict[str, object]) -> None:
    head, batch = mtp_head(**form), random_batch([[11, 3, 7], [2, 1, 18]])
    expected = plain_states(head.config, batch, head.state_dict())
    for k, (ours, plain) in enumerate(zip(head.unroll(batch, 4), expected, strict=True), start=1):
        there = ~plain.isnan().any(-1)
        assert there.sum() == sum(max(n - k, 0) for n in (11, 3, 7, 2, 1, 18))
        torch.testing.assert_close(ours[there], plain[there])


@pytest.mark.parametrize("layout", ["mimo", "deepseek"])
def test_a_new_head_hands_on_the_targets_state(layout: str) -> None:
    head, batch = mtp_head(layout=layout, num_modules=2), random_batch([[20]])
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
    head.initialise(probe_of(batch, torch.full((16,), 7.0).double()))
    normed = batch.hidden / batch.hidden.square().mean(-1, keepdim=True).sqrt()
    for state in head.unroll(batch, 2):
        assert float((state * normed).detach().mean()) / (7 * UNSURE) > 0.9  # the cosine of both


def test_the_weights_of_the_steps_are_fastmtps() -> None:
    weights = mtp_head(depth=3, depth_decay=0.6).depth_weights
    assert [round(weight, 2) for weight in weights] == [0.51, 0.31, 0.18]


def test_the_bytes_of_a_native_module_s_experts_are_of_those_that_its_tokens_may_choose() -> None:
    record = {**COMMON, **GLM, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    experts: Any = BlockMaker({"model_type": "glm4_moe", **record}).layers[0]
    read = []
    for tokens in (1, 8):  # two experts of the four each
        before = Product.bytes_read
        experts.layer.mlp(torch.randn(1, tokens, D))
        read.append(Product.bytes_read - before)
    assert read == [2 * 3 * 16 * D * 4, 4 * 3 * 16 * D * 4]  # up, gate and down, in float32
