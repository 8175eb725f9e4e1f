"""A native decoder is its Hugging Face model: the same logits and residual streams, node by node of a tree."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from heads.kernels.slots import PrefillSlots, TreeSlots, ancestors
from heads.targets.cached_decoder import CacheSpec
from heads.targets.frozen_target import Features, FrozenTarget
from heads.targets.native_decoder import Experts, NativeDecoder, native_stack, why_not_native
from tests.support.closeness import assert_close
from tests.support.small_targets import BASE, with_plain_experts
from tests.support.switches import kernels_on_cpu

LLAMA3 = dict(
    rope_type="llama3", rope_theta=100.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.9,
    beta_fast=32, beta_slow=1,
)  # fmt: skip
WINDOWS = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2)
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, llama3, one key head, biases": dict(
        rope_parameters=LLAMA3, num_key_value_heads=1, attention_bias=True, mlp_bias=True
    ),
    "llama, linear, as many key heads, tied": dict(
        rope_parameters=dict(rope_type="linear", rope_theta=100.0, factor=3.0), num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
    "llama, yarn, wide heads, gelu": dict(rope_parameters=YARN, head_dim=24, hidden_act="gelu"),
    "mistral": dict(sliding_window=None, head_dim=12),
    "mistral, window": dict(sliding_window=8),
    "qwen2, some windows": WINDOWS,
    "qwen3": dict(head_dim=16),
    "qwen3, biases, some windows": dict(head_dim=16, attention_bias=True, **WINDOWS),
    "mixtral": dict(sliding_window=None, **MIXTRAL),
    "mixtral, window": dict(sliding_window=8, **MIXTRAL),
    "qwen3_moe": dict(head_dim=16, num_experts=6, norm_topk_prob=True, **EXPERTS),
    "qwen3_moe, some dense, no renormalising": dict(
        head_dim=16, num_experts=6, norm_topk_prob=False, mlp_only_layers=[1], **EXPERTS
    ),
}  # fmt: skip


def make_target(variant: str, dtype: torch.dtype = torch.float64, **settings: Any) -> FrozenTarget:
    """A random target, in float64 by default, whose biases, norms and corrections are random too."""
    family = variant.partition(",")[0]
    # The epsilon is large enough to be missed where it is left out.
    config = AutoConfig.for_model(family, **BASE | {"rms_norm_eps": 1e-3} | VARIANTS.get(variant, {}) | settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and ("bias" in name or "norm" in name):
                tensor.data += 0.3 * torch.randn_like(tensor)
    return FrozenTarget(with_plain_experts(model), variant)


def prompts_and_tree() -> tuple[list[Tensor], Tensor, Tensor]:
    """Prompts of two lengths, and the tokens (B, N) and parents of a tree behind each."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(61, (n,), generator=generator) for n in (23, 9)]
    parents = torch.tensor([[0, 0, 0, 1, 3, 2], [0, 0, 1, 2, 3, 1]])
    return prompts, torch.randint(61, (2, 6), generator=generator), parents


def run(target: FrozenTarget, prompts: list[Tensor], tokens: Tensor, parents: Tensor) -> Features:
    """Each prompt in two chunks into its own row, then a tree (B, N) behind each."""
    spec = CacheSpec(batch_size=len(tokens), capacity=64, aux_layer_ids=(0, 1, target.num_layers))
    decoder = NativeDecoder(target, spec)
    for row, prompt in enumerate(prompts):
        for span in (slice(0, 3), slice(3, len(prompt))):
            chunk = prompt[None, span]
            known = PrefillSlots(torch.tensor([span.start]), None, decoder.slot, chunk.shape[1])
            decoder.forward(chunk, known, extent=64, row=row)
    length, above = torch.tensor([len(prompt) for prompt in prompts]), ancestors(parents, 4)
    tree = TreeSlots(length, parents, above.sum(-1) - 1, above, decoder.slot)
    return decoder.forward(tokens, tree, extent=64)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_every_node_of_a_tree_has_the_logits_and_streams_of_the_model(variant: str) -> None:
    target = make_target(variant)
    assert why_not_native(target) is None
    prompts, tokens, parents = prompts_and_tree()
    above = ancestors(parents, 4)
    whole = [[torch.cat([prompt, tokens[b, above[b, j]]])[None] for j in range(6)] for b, prompt in enumerate(prompts)]
    expected = [[target.model(path, output_hidden_states=True) for path in paths] for paths in whole]
    features = run(target, prompts, tokens, parents)  # which puts the weights in other places
    logits = target.shared.lm_head(features.hidden)
    for b in range(2):
        for j in range(6):
            out = expected[b][j]
            assert_close(logits[b, j], out.logits[0, -1], precision=torch.float32)
            streams = torch.cat([out.hidden_states[k][0, -1] for k in (0, 1)])
            assert_close(features.aux_hidden_states[b, j, :64], streams, precision=torch.float32)
    again = target.model(whole[0][5]).logits
    torch.testing.assert_close(again, expected[0][5].logits, atol=1e-12, rtol=0)  # the model itself is as it was


@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value)")  # by the interpreter's numpy
@pytest.mark.parametrize("variant", ["llama, yarn, wide heads, gelu", "qwen2, some windows", "mixtral, window"])
@torch.no_grad()
def test_the_kernel_sees_what_masks_show(variant: str) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU the kernel itself is run")
    target = make_target(variant, torch.float32, num_hidden_layers=2)
    masked = run(target, *prompts_and_tree())
    with kernels_on_cpu():
        found = run(target, *prompts_and_tree())
    torch.testing.assert_close(found.hidden, masked.hidden, atol=2e-5, rtol=2e-5)


def test_weights_are_kept_once_and_read_anew_when_they_change() -> None:
    target = make_target("llama")
    stack = native_stack(target)
    assert native_stack(target) is stack
    attention: Any = target.layers[0].self_attn
    fused = stack.layers[0].attention.qkv.weight
    parts = [module.weight for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert [part.data_ptr() - fused.data_ptr() for part in parts] == [0, 8 * 32 * 32, 8 * 32 * 48]
    with torch.no_grad():
        attention.q_proj.weight.mul_(2)
    renewed = native_stack(target)
    assert renewed is not stack
    torch.testing.assert_close(renewed.layers[0].attention.qkv.weight[:32], parts[0].data)


@torch.no_grad()
def test_both_ways_to_the_experts_are_one() -> None:
    experts = native_stack(make_target("mixtral")).layers[2].feedforward
    assert isinstance(experts, Experts)
    x, ids = torch.randn(7, 32, dtype=torch.float64), torch.rand(7, 4).topk(2, -1).indices
    assert len(ids.unique()) > 2
    torch.testing.assert_close(experts.gathered(x, ids), experts.by_expert(x, ids), atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_what_cannot_be_read_is_left_to_the_model() -> None:
    assert why_not_native(make_target("gpt2")) == "gpt2 has no native decoder"
    rotation = dict(rope_type="dynamic", rope_theta=100.0, factor=2.0)
    reason = why_not_native(make_target("llama", rope_parameters=rotation))
    assert reason == "rotary scaling 'dynamic' changes with the length of the text"
    hooked = make_target("llama")
    hooked.layers[1].mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    assert why_not_native(hooked) == "1.mlp has hooks"

    class Adapted(nn.Linear):
        """Linear in name only."""

    adapted = make_target("llama")
    adapted.layers[0].mlp.up_proj = Adapted(32, 48, bias=False).double()  # type: ignore[union-attr]
    assert why_not_native(adapted) == "0.mlp.up_proj is a Adapted"
    mixed = make_target("qwen3")
    mixed.layers[0].self_attn.q_norm.float()  # type: ignore[union-attr]
    assert why_not_native(mixed) == "0.self_attn.q_norm holds its weights in another form or place"
