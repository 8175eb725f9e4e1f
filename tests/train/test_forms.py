"""Targets of every attention form: a head trains on each through the one loop, and its output is the target's own."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from eval.bench import parse_arguments
from eval.measure.loading import open_target_of
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling import Sampling
from heads.core.tree import Proposal
from heads.saved import check_fits, load_head
from heads.targets.load import auto_class, load_target, load_tokenizer
from heads.targets.model import FrozenTarget
from heads.targets.quantization import weight_bytes
from tests.runs import Settings, WriteRecipe, audit, lines, train

BASE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
    initializer_range=0.2,  # wide, so that greedy text wanders
    tie_word_embeddings=False,
    pad_token_id=2,
    bos_token_id=0,
    eos_token_id=1,
)
GROUPED = dict(num_key_value_heads=2)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
GEMMA = dict(GROUPED, head_dim=16, sliding_window=8, query_pre_attn_scalar=16)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    **EXPERTS,
)
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "multi-head: llama": ("llama", dict(num_key_value_heads=4)),
    "multi-head: gpt_neox, part of each head rotated": ("gpt_neox", dict(rotary_pct=0.25)),
    "multi-head: opt, learned positions": ("opt", dict(ffn_dim=48, word_embed_proj_dim=32)),
    "multi-head: gpt2, learned positions, tied": ("gpt2", dict(tie_word_embeddings=True)),
    "multi-query: llama": ("llama", dict(num_key_value_heads=1)),
    "multi-query: falcon": ("falcon", dict(multi_query=True, new_decoder_architecture=False, alibi=False)),
    "multi-query: gpt_bigcode, learned positions": ("gpt_bigcode", dict(multi_query=True)),
    "grouped-query: llama": ("llama", GROUPED),
    "grouped-query: qwen3, normed queries and keys": ("qwen3", dict(GROUPED, head_dim=16)),
    "latent: deepseek_v2": ("deepseek_v2", dict(LATENT, n_group=1, topk_group=1, topk_method="greedy")),
    "latent: deepseek_v3": ("deepseek_v3", dict(LATENT, n_group=2, topk_group=1)),
    "sliding window: mistral": ("mistral", dict(GROUPED, sliding_window=8)),
    "sliding window in some layers: gemma2": ("gemma2", GEMMA),
    "sliding window in some layers: gemma3": ("gemma3_text", dict(GEMMA, sliding_window_pattern=2)),
    "sliding window in some layers: qwen2": (
        "qwen2",
        dict(GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    ),
    "multimodal: mistral3": (
        "mistral3",
        dict(
            text_config=dict(BASE, **GROUPED, model_type="mistral", sliding_window=8),
            vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
            tie_word_embeddings=False,
            image_token_id=127,
        ),
    ),
    "experts: mixtral": ("mixtral", dict(GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "experts: qwen3_moe": ("qwen3_moe", dict(GROUPED, head_dim=16, num_experts=6, decoder_sparse_step=1, **EXPERTS)),
    "experts: gpt_oss, attention sinks": (
        "gpt_oss",
        dict(GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    ),
}
QUICK = {
    "multi-head: opt, learned positions",
    "multi-query: llama",
    "latent: deepseek_v3",
    "sliding window in some layers: gemma3",
}
INT8 = "grouped-query: llama"
WITH_EXPERTS = ["experts: mixtral", "experts: qwen3_moe", "latent: deepseek_v2", "latent: deepseek_v3"]
TEXTS = (
    "the sea is near the",
    "there",
    "ten birds in the den on the",
    "sand; the",
    "stone is",
    "a",
    "the trees",
    "is on",
)
CHAIN, TREE = "chain:3", "tree:3x4x12"


def save_target(form: str, folder: Path, tokenizer_folder: Path) -> None:
    """A random target of one form in a folder, with the tiny tokenizer."""
    family, changes = FORMS[form]
    config = AutoConfig.for_model(family, **({} if "text_config" in changes else BASE) | changes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = auto_class(config).from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "sinks" not in name:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tokenizer_folder / file).read_bytes())


def forms() -> list[Any]:
    return [pytest.param(form, id=form, marks=[] if form in QUICK else pytest.mark.slow) for form in FORMS]


@pytest.fixture
def form_settings(settings: Settings, tmp_path: Path, tiny_target_dir: Path) -> Callable[[str], Settings]:
    """form -> the recipe of a few steps on the target's own answers."""

    def make(form: str) -> Settings:
        save_target(form, tmp_path / "target", tiny_target_dir)
        head = {"kind": "eagle3", "aux_layer_ids": [1, 2, 4], "depth": 3}
        data = dict(settings["data"], context_length=64)
        data["regenerate"] = {"prompts": 12, "prompt_tokens": 12, "new_tokens": 24}
        train = {"max_steps": 10, "batch_size": 12, "lr": 0.003, "log_every": 1}
        return settings | {"target": {"path": str(tmp_path / "target")}, "head": head, "data": data, "train": train}

    return make


@pytest.mark.parametrize("form", forms())
def test_a_head_trains_and_its_output_is_the_targets_own(
    form: str, form_settings: Callable[[str], Settings], write_recipe: WriteRecipe
) -> None:
    train_and_audit(form_settings(form), write_recipe)


def test_a_head_trains_on_a_quantised_target(
    form_settings: Callable[[str], Settings], write_recipe: WriteRecipe
) -> None:
    """Its output is the quantised target's own, and whoever opens the head gets that target unless asked otherwise."""
    pytest.importorskip("torchao")
    settings = form_settings(INT8)
    settings["target"]["quantize"] = "int8"
    folder = train_and_audit(settings, write_recipe)
    opened = []
    for asked in ([], ["--quantize", "none"]):
        options = parse_arguments([str(folder), *asked])
        opened.append(open_target_of(options.heads[0], options)[0])
    assert [target.quantize for target in opened] == ["int8", None]
    assert weight_bytes(opened[0].layers) < 0.5 * weight_bytes(opened[1].layers)


def train_and_audit(settings: Settings, write_recipe: WriteRecipe) -> Path:
    """The folder of a run whose head learnt and whose drafts changed nothing."""
    outcome = train(write_recipe(settings))
    recipe, target = outcome.recipe, outcome.features.target
    folder = Path(recipe.output_dir)
    losses = [line["loss"] for line in lines(folder, "train")]
    assert losses[-1] < losses[0], losses
    check_fits(folder, target)
    tokenizer = load_tokenizer(target.name)
    prompts = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
    requests = [
        Request(prompt, 10, Sampling(float(n % 2), seed=n), ignore_eos=True) for n, prompt in enumerate(prompts)
    ]
    audit(target, load_head(folder), requests, (CHAIN, TREE))
    return folder


@pytest.mark.parametrize("form", WITH_EXPERTS)
def test_routing_does_not_depend_on_neighbours(form: str, tmp_path: Path, tiny_target_dir: Path) -> None:
    """Not even where seven neighbours crowd the same experts: no expert is ever full."""
    save_target(form, tmp_path, tiny_target_dir)
    target = load_target(str(tmp_path))
    draw = random.Random(0)
    row, *others = ([draw.randrange(6, 128) for _ in range(13)] for _ in range(8))
    found = [verify(target, [row, *neighbours]) for neighbours in (others, [row] * 7, [[9] * 13] * 7)]
    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0], atol=1e-4, rtol=1e-4)
    request = Request(row, 16, Sampling(1.0, seed=3), ignore_eos=True)
    alone = Engine(target, None, EngineOptions(max_length=64)).generate([request])[0].tokens
    engine = Engine(target, None, EngineOptions(batch_size=8, max_length=64))
    for neighbours in (others, [row] * 7, [[9] * 13] * 7):
        requests = [request, *(Request(prompt, 16, ignore_eos=True) for prompt in neighbours)]
        assert engine.generate(requests)[0].tokens == alone


@torch.inference_mode()
def verify(target: FrozenTarget, rows: list[list[int]]) -> torch.Tensor:
    """(4, V) the first row's logits of its last four tokens, verified as a chain beside the other rows."""
    step = Engine(target, None, EngineOptions(batch_size=len(rows), max_length=64)).decoder.step
    tokens = torch.tensor(rows)
    for number in range(len(rows)):
        step.prefill(number, tokens[number : number + 1, :-4], 0)
    depths = torch.arange(4).expand(len(rows), -1)
    chain = Proposal(tokens[:, -4:], (depths - 1).clamp(min=0), depths, torch.zeros(len(rows), 4))
    length = torch.full((len(rows),), tokens.shape[1] - 4)
    return step.logits(step.verify(chain, None, length, 64).hidden)[0]
