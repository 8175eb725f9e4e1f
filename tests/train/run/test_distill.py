"""A draft model in the loop: distilled, by adapters, on its own text, to the last bit where a run is broken off."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from eval.runtime.reference import generate
from heads.registry import build_head
from heads.saved import load_head
from heads.targets.frozen_target import FrozenTarget
from tests.support.chats import reader_of
from tests.support.closeness import assert_close
from tests.support.faults import signal_at
from tests.support.runs import Settings, measured_run, same, weights, write_recipe
from tests.support.runs import train_in as run
from tests.support.small_targets import make_target
from train.core.interrupts import Interrupted
from train.data.prepare import load_data
from train.recipe.recipe import load_recipe
from train.steps.draft_lora import add_adapters, merged_weights

ON_POLICY = {"every": 2, "prompts": 6, "samples": 4, "prompt_tokens": 8, "new_tokens": 12, "share": 0.5}


@pytest.fixture
def small(settings: Settings) -> Settings:
    settings["head"] = {"kind": "draft", "layers": [0, 7]}
    settings["train"]["lr"] = 1e-3
    return settings


def adapted(target: FrozenTarget, lora: Settings) -> tuple[Any, Any]:
    """A draft without adapters, and one with adapters that do something."""
    settings = {"layers": [0, 2], "lora": lora}
    plain = build_head("draft", settings, target, torch.ones(target.vocab_size))
    head = build_head("draft", settings, target, torch.ones(target.vocab_size))
    add_adapters(head)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return plain, head


PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("family", "lora", "modules"),
    [
        ("llama", {}, PROJECTIONS),
        ("llama", {"modules": ["q_proj", "down_proj"]}, {"q_proj", "down_proj"}),
        ("gpt2", {}, {"c_attn", "c_proj", "c_fc"}),  # which keeps its matrices transposed
    ],
)
def test_merged_weights_are_the_adapted_model(family: str, lora: Settings, modules: set[str]) -> None:
    plain, head = adapted(make_target(family, torch.float32), {"rank": 3, "alpha": 5.0, **lora})
    ids = torch.arange(20)[None]
    before = plain.model(input_ids=ids).logits
    wanted = head.model(input_ids=ids).logits
    plain.load_state_dict(merged_weights(head, head.state_dict()))
    assert not torch.allclose(before, wanted, atol=1e-2)
    assert_close(plain.model(input_ids=ids).logits, wanted, roundings=256)
    trained = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    assert {name.split(".lora_")[0].split(".")[-1] for name in trained} == modules


def test_a_whole_run_by_adapters_on_its_own_text(small: Settings) -> None:
    """Every option at once; the published form is a plain model, its outputs the target's own."""
    small["head"]["lora"] = {"rank": 4}
    small["data"] |= {"on_policy": ON_POLICY, "regenerate": {"prompts": 4, "prompt_tokens": 8, "new_tokens": 8}}
    small["eval"]["report"] = {"repeats": 1, "tree": ["chain:2", "tree:2x2x5"], "temperature": [0, 1]}
    folder, results = measured_run("distill", small)
    assert results["exact"]["prompts"] == 8
    head = load_head(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "head", dtype=torch.float32)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, head.model(input_ids=ids).logits)
    assert not any("lora" in name for name in load_file(folder / "head/model.safetensors"))
    assert head.config.lora.rank == 4
    assert sorted(path.name for path in (folder / "on_policy").iterdir()) == ["step-2.jsonl", "step-4.jsonl"]


@pytest.mark.parametrize("steps", [(3,), pytest.param((2, 4, 5), marks=pytest.mark.slow)])
def test_a_run_on_its_own_text_goes_on_bit_for_bit(steps: tuple[int, ...], small: Settings, tmp_path: Path) -> None:
    """Broken off before it writes, in the midst of what it wrote, and just before it writes anew."""
    small["data"]["on_policy"] = ON_POLICY
    unbroken = run(small)
    for step in steps:
        small["output_dir"] = str(tmp_path / f"broken at {step}")
        with signal_at(step), pytest.raises(Interrupted):
            run(small)
        broken = run(small)
        assert same(weights(unbroken, 6), weights(broken, 6)), step
        for name in ("step-2.jsonl", "step-4.jsonl"):
            assert (unbroken / "on_policy" / name).read_bytes() == (broken / "on_policy" / name).read_bytes(), step


def test_samples_are_the_drafts_own_and_are_learnt_from(
    small: Settings, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Greedy samples are what the draft of that step says; at share 1 they are all that the next steps learn from."""
    small["data"]["on_policy"] = {**ON_POLICY, "temperature": 0.0, "share": 1.0}
    folder, data = run(small), load_recipe(write_recipe(small)).data
    head: Any = build_head("draft", {"layers": [0, 7]}, target, torch.ones(128))
    head.load_state_dict(weights(folder, 4))
    _, written = load_data(data, 0, head, target, reader_of(tokenizer), folder)
    assert written is not None
    pool = written.mixture(4, written.read(4)).pools[0]
    rows = [pool.row(n).tokens[0] for n in range(len(pool))]
    prompts = [request.prompt for request in written.requests(4)]
    samples = [json.loads(line) for line in (folder / "on_policy/step-4.jsonl").read_text().splitlines()]
    packed = " ".join(" ".join(map(str, row.tolist())) for row in rows)
    assert len(samples) == len(prompts) == 4
    for prompt, sample in zip(prompts, samples, strict=True):
        expected, _ = generate(head.model, head.model, prompt, depth=0, max_new_tokens=12, eos_token_ids=(1,))
        assert sample == expected
        assert " ".join(map(str, [*prompt, *sample])) in packed
