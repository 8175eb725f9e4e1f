"""A tree step through a model equals the model run on each path by itself."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.runtime.checks import check_family
from eval.runtime.round import TargetStep
from heads.errors import UserError, warn_once
from heads.target.cached import CacheSpec
from heads.target.hf import HFDecoder
from heads.target.model import FrozenTarget
from heads.target.slots import ancestors
from heads.tree import Proposal
from tests.small_targets import open_engine


def step_of(target: FrozenTarget, spec: CacheSpec) -> TargetStep:
    return TargetStep(target, HFDecoder(target, spec))


TargetOf = Callable[[str], FrozenTarget]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral-window", "deepseek_v3", "gpt_oss", "gpt2"])
@torch.no_grad()
def test_every_node_gets_the_logits_of_its_own_path(family: str, target_of: TargetOf) -> None:
    target = target_of(family)
    step = step_of(target, CacheSpec(batch_size=2, capacity=128, aux_layer_ids=(1,)))
    prompts = [torch.randint(3, 61, (n,)) for n in (23, 4)]
    for row, prompt in enumerate(prompts):
        padded = torch.zeros(1, 32, dtype=torch.int64)
        padded[0, : len(prompt)] = prompt
        step.prefill(row, padded, 0)
    tokens = torch.randint(3, 61, (2, 6))
    parents = torch.tensor([[0, 0, 0, 1, 3, 2], [0, 0, 1, 2, 3, 1]])
    above = ancestors(parents, 4)
    depths = above.sum(-1) - 1
    proposal = Proposal(tokens, parents, depths, torch.zeros(2, 6))
    features = step.verify(proposal, above, torch.tensor([23, 4]), 64)
    logits = step.logits(features.hidden)
    for b, prompt in enumerate(prompts):
        for j in range(6):
            path = torch.cat([prompt, tokens[b, above[b, j]]])[None]
            true = target.model(path, use_cache=False, output_hidden_states=True)
            torch.testing.assert_close(logits[b, j].double(), true.logits[0, -1].double(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                features.aux_hidden_states[b, j], true.hidden_states[1][0, -1], atol=1e-5, rtol=1e-5
            )


@torch.no_grad()
def test_a_prompt_in_chunks_equals_a_prompt_at_once(target_of: TargetOf) -> None:
    target = target_of("gemma3_text")
    tokens = torch.randint(3, 61, (1, 80))
    whole = step_of(target, CacheSpec(batch_size=1, capacity=128)).prefill(0, tokens, 0)
    step = step_of(target, CacheSpec(batch_size=1, capacity=128))
    parts = [step.prefill(0, tokens[:, start : start + 16], start).hidden for start in range(0, 80, 16)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.hidden, atol=1e-6, rtol=1e-6)


def test_padded_chunks_have_few_sizes(target_of: TargetOf) -> None:
    step = step_of(target_of("llama"), CacheSpec(batch_size=1, capacity=64))
    assert not step.pads and [step.chunk_size(n) for n in (1, 100, 1000)] == [1, 100, 256]
    step.pads = True
    assert {step.chunk_size(n) for n in range(1, 2000)} == {16, 32, 64, 128, 256}
    assert all(step.chunk_size(n) >= min(n, 256) for n in range(1, 2000))


@pytest.mark.parametrize("family", ["bloom", "falcon", "mamba", "llama4_text"])
def test_families_without_tree_masks_are_refused(family: str) -> None:
    extra: dict[str, dict[str, int]] = {
        "falcon": {"alibi": True},
        "llama4_text": {"num_local_experts": 2, "intermediate_size": 32, "intermediate_size_mlp": 32},
    }
    size = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**size, **extra.get(family, {})}))
    with pytest.raises(UserError, match="its name: "):
        check_family(FrozenTarget(model, "its name"))


def test_flex_attention_is_refused(target_of: TargetOf) -> None:
    target = copy.deepcopy(target_of("llama"))
    target.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(UserError, match="takes no 4-D mask"):
        check_family(target)


@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask"])
def test_a_decoder_that_ignores_what_it_is_given_is_found_out(ignored: str, target_of: TargetOf) -> None:
    target = copy.deepcopy(target_of("llama"))
    forward = target.base.forward

    @functools.wraps(forward)
    def deaf(**given: Any) -> Any:
        if given["use_cache"]:  # the model's own pass stays as it is
            given[ignored] = given[ignored] * 0
        return forward(**given)

    target.base.forward = deaf
    with pytest.raises(UserError, match="does not take tree masks, positions and states"):
        target.native = False
        open_engine(target, None, max_length=64)


@pytest.mark.parametrize(
    ("dtype", "weight", "value", "fault"),
    [
        ("float32", "mlp.up_proj", torch.nan, "from layer 1 on, and model.layers.1.mlp.up_proj.weight holds"),
        ("float16", "mlp.down_proj", 6e4, "from layer 1 on; float16 overflows above 65504: ask for bfloat16"),
        ("bfloat16", "mlp.down_proj", 3e38, "from layer 1 on; bfloat16 may not suffice: ask for float32"),
    ],
)
def test_states_that_are_not_finite_are_said_to_be_so(
    dtype: str, weight: str, value: float, fault: str, target_of: TargetOf
) -> None:
    target = copy.deepcopy(target_of("llama"))
    target.model.to(getattr(torch, dtype))
    target.layers[1].get_parameter(f"{weight}.weight").data.fill_(value)
    for check in (target.check, lambda: open_engine(target, None, max_length=64)):
        with pytest.raises(UserError, match=f"the target's states are not finite {fault}"):
            check()


def test_a_target_without_a_native_decoder_is_given_of_once(
    target_of: TargetOf, caplog: pytest.LogCaptureFixture
) -> None:
    """In a process, however many engines there are; a warning, which is seen where logging was never set up."""
    warn_once.cache_clear()
    for _ in range(2):
        open_engine(target_of("gpt2"), None, max_length=64)
    said = "gpt2: decoded by its Hugging Face model, slower: gpt2 has no native decoder"
    assert [(r.levelno, r.message) for r in caplog.records] == [(logging.WARNING, said)]
    caplog.clear()
    open_engine(target_of("llama"), None, max_length=64)
    assert not caplog.records
