"""Targets from scratch: every recipe loads, and a tiny one is trained, resumed and published with its chat template."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from heads.core.errors import UserError
from heads.targets.load import load_target
from train.data.from_scratch import CHAT_TEMPLATE, chat_text
from train.target_making import loop_settings, make_target
from train.target_recipe import load_target_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TARGETS = [*sorted((RECIPES / "targets").glob("*.yaml")), RECIPES / "quickstart/target.yaml"]
TINY = [
    *("tokenizer.vocab_size=400", "model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=2"),
    *("model.num_key_value_heads=1", "model.head_dim=16", "model.intermediate_size=48", "train.compile=false"),
    *("model.max_position_embeddings=1024", "train.tokens_per_step=256", "train.tokens_per_pass=128"),
    *("train.warmup_steps=2", "train.decay_steps=4", "train.precision=fp32", "train.checkpoint_every=3"),
]


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few modules in place of the machine's."""

    def modules(*, held_out: bool, roots: object) -> Iterator[tuple[str, str]]:
        for i in range(3 if held_out else 9):
            body = "".join(f"def f{n}(x):\n    return x + {n * i}\n\n\n" for n in range(60))
            yield f"m{i}.py", body

    monkeypatch.setattr("train.data.from_scratch.read_split", modules)


def chats(path: Path, count: int) -> Path:
    lines = [
        {"messages": [{"role": "user", "content": f"add {i} and 1"}, {"role": "assistant", "content": f"{i + 1}"}]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.name)
def test_every_recipe_of_a_target_loads(path: Path) -> None:
    assert loop_settings(load_target_recipe(path)).grad_accum >= 1


def test_a_tiny_target_of_code_and_conversations(tmp_path: Path, small_corpus: None) -> None:
    path = RECIPES / "targets/code-chat-160m.yaml"
    given = [*TINY, f"data.chats=[{chats(tmp_path / 'chats.jsonl', 120)}]", f"output_dir={tmp_path / 'run'}"]
    stages = "train.stages=[{steps: 3, context_length: 64}, {steps: %d, context_length: 64, unlearn_loops: true}]"
    assert make_target([str(path), *given, "train.stages=[{steps: 3, context_length: 64}]"]) == 0
    first = (tmp_path / "run/checkpoints/step-3/model.safetensors").read_bytes()
    assert make_target([str(path), *given, stages % 3]) == 0  # goes on from step 3
    assert (tmp_path / "run/checkpoints/step-6/model.safetensors").read_bytes() != first
    target = load_target(str(tmp_path / "run/model"))
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "run/model"))
    turns = [{"role": "user", "content": "add 4 and 1"}, {"role": "assistant", "content": "5"}]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.apply_chat_template(turns, tokenize=False) == chat_text(turns)
    ids = tokenizer(chat_text(turns), add_special_tokens=False)["input_ids"]
    assert ids[-1] == target.eos_token_ids[0] == 0 and tokenizer.convert_ids_to_tokens(ids[0]) == "<|user|>"
    assert "; conversations" in (tmp_path / "run/model/README.md").read_text()


def test_conversations_that_cannot_be_split_are_refused(tmp_path: Path, small_corpus: None) -> None:
    path = RECIPES / "targets/code-chat-160m.yaml"
    given = [*TINY, f"output_dir={tmp_path / 'run'}", "train.stages=[{steps: 3, context_length: 64}]"]
    with pytest.raises(UserError, match="2 conversations are too few to hold some out"):
        make_target([str(path), *given, f"data.chats=[{chats(tmp_path / 'chats.jsonl', 2)}]"])
    with pytest.raises(UserError, match=r"chats.jsonl: no such file"):
        make_target([str(path), *given])
    assert not (tmp_path / "run").exists()
