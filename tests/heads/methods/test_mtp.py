"""Multi-token prediction against its formula, with one module or several."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heads.core.contract import Batch
from heads.kernels.product import Product
from heads.methods.mtp import MtpConfig
from heads.parts.family_layers import BlockMaker
from heads.parts.initial_weights import UNSURE
from tests.heads.methods.test_eagle3 import by_head
from tests.heads.parts.test_ttt_attention import dense
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
    """DeepSeek-V3's formula by one dense mask: h^k_t for each k, and no number where there is no such slot.

    Module k reads [norm(h^{k-1}_t) ; norm(e(x_{t+k}))] and attends to its own inputs of the slots before; where the
    last module is used again, to its first inputs of the slots before and to its own of this slot.
    """
    states, out, slot = batch.hidden, [], torch.arange(batch.tokens.shape[1])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for k in range(1, config.depth + 1):
        i = min(k, config.num_modules) - 1
        w = {n.removeprefix(f"mtp_layers.{i}."): v for n, v in weights.items() if n.startswith(f"mtp_layers.{i}.")}
        at = batch.positions + k - 1

        def norm(x: Tensor, name: str, w: dict[str, Tensor] = w) -> Tensor:
            return rms(x, w[f"{name}.weight"], config.rms_norm_eps)

        def linear(x: Tensor, name: str, w: dict[str, Tensor] = w) -> Tensor:
            return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

        read = (at > 0) | (config.layout == "qwen")  # the first token is zeroed, as the engines' classes do
        tokens = batch.embeddings.roll(-k, 1) * read[..., None]
        parts = [norm(tokens, "token_layernorm"), norm(states, "hidden_layernorm")]
        x = linear(torch.cat(parts[::-1] if config.layout == "mimo" else parts, -1), "input_proj")
        y = norm(x, "block.input_layernorm")
        q, key, value = (by_head(linear(y, f"block.self_attn.{name}_proj"), config.head_dim) for name in "qkv")
        if k <= config.num_modules:
            keys, values = [], []
        keys.append(rope(key, at[:, None], config.rope_theta))
        values.append(value)
        heard = dense(rope(q, at[:, None], config.rope_theta), keys, values, batch.documents)
        x = x + linear(heard.transpose(1, 2).flatten(2), "block.self_attn.o_proj")
        y = norm(x, "block.post_attention_layernorm")
        gate, up = linear(y, "block.mlp.gate_proj"), linear(y, "block.mlp.up_proj")
        states = norm(x + linear(gate * gate.sigmoid() * up, "block.mlp.down_proj"), "final_layernorm")
        there = (slot + k < len(slot)) & (batch.documents.roll(-k, 1) == batch.documents)
        out.append(states.masked_fill(~there[..., None], torch.nan))
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
