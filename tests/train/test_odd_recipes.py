"""Every key of a recipe with values that no one means: one line a fault, or a recipe that is read back as it is."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heads.core.errors import UserError
from train.recipe import dump_recipe, load_recipe, plain_settings

ANSWERS = "prompts: 4, prompt_tokens: 8, new_tokens: 8, batch_size: 2, seed: 0, temperature: 0.5, share: 0.5"
CHATS = "kind: chat, path: a/b, split: x, limit: 3, weight: 1.0, chat_template: x, max_skipped: 0.1"
REPORT = "num_prompts: 3, max_new_tokens: 4, batch_size: 1, trees: [auto], temperatures: [0.0], repeats: 1"
WHOLE: dict[str, Any] = yaml.safe_load(f"""
output_dir: runs/x
target: {{path: some/target, dtype: auto, trust_remote_code: false, quantize: int8, adapter: a/b}}
head: {{kind: draft, layers: [1, 2], loss: jsd, beta: 0.5, lora: {{rank: 2, modules: [q_proj]}}}}
data:
  sources: [{{{CHATS}}}, {{kind: python, limit: 3, weight: 2.0}}]
  context_length: 64
  regenerate: {{{ANSWERS}, train_on_prompts: false}}
  on_policy: {{{ANSWERS}, every: 2, samples: 2}}
train:
  {{max_steps: 10, epochs: null, seed: 0, batch_size: 2, grad_accum: 1, optimizer: adamw, lr: 0.001, betas: [0.9, 0.95],
   weight_decay: 0.0, schedule: wsd, warmup_steps: 1, decay_fraction: 0.2, min_lr_ratio: 0.1, max_grad_norm: 1.0,
   precision: fp32, checkpoint_every: 5, keep_checkpoints: 2, eval_every: 5, log_every: 2}}
eval:
  {{prompts: a.jsonl, num_prompts: 3, max_prompt_tokens: 10, skip_long: true, max_new_tokens: 10, batch_size: 2,
   tree: "chain:3", rule: match, temperature: 0.5, top_k: 3, top_p: 0.9, min_p: 0.1, seed: 0, report: {{{REPORT}}}}}
tracking: {{wandb: offline, project: p, name: n}}
""")
ODD: list[Any] = [
    *(None, True, "", " ", "x", "\0", "é😀", "a\nb", "x" * 10_000, "auto", "none", "chain:999999999999", "static:1.0"),
    *(0, -1, 1, 2**31, 10**15, 10**30, -(10**30), 10**400, 0.5, -0.5, 1e308, 1e-320, float("nan"), float("inf")),
    *([], [None], [[]], [1], [""], [{}], {}, {"kind": None}, {"kind": [1]}, {"": 1}, {1: 2}, {None: 1}),
]
GONE = object()


def cases() -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every key with every odd value, and without any."""

    def keys(tree: Any, key: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for name, value in (
            tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
        ):
            yield (*key, name)
            yield from keys(value, (*key, name))

    return ((key, odd) for key in keys(WHOLE, ()) for odd in [*ODD, GONE])


def changed(key: tuple[Any, ...], odd: Any) -> dict[str, Any]:
    tree = section = copy.deepcopy(WHOLE)
    for name in key[:-1]:
        section = section[name]
    if odd is GONE:
        del section[key[-1]]
    else:
        section[key[-1]] = odd
    return tree


def test_the_whole_recipe_is_one(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(WHOLE))
    load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("count", [25, pytest.param(1_000, marks=pytest.mark.slow)])
def test_no_value_is_a_traceback(count: int, tmp_path: Path) -> None:
    every = list(cases())
    path = tmp_path / "r.yaml"
    refused = 0
    for key, odd in random.Random(0).sample(every, min(count, len(every))):
        path.write_text(yaml.safe_dump(changed(key, odd), allow_unicode=True))
        try:
            recipe = load_recipe(path)
        except UserError as error:
            refused += 1
            lines = str(error).splitlines()
            assert lines and all(len(line) < 400 for line in lines), (key, odd)
            continue
        path.write_text(dump_recipe(plain_settings(recipe)))
        assert load_recipe(path) == recipe, (key, odd)
    assert 0 < refused < min(count, len(every))
