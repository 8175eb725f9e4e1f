"""A T5 and a draft distilled from it, the case of the first paper on speculative decoding (arXiv 2211.17192)."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from eval.measure.open_models import load_pair
from heads.core.errors import UserError
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from heads.targets.smaller_models import load_smaller
from tests.support.chats import encode_chat, talk, write_chats
from tests.support.refusals import refused
from tests.support.runs import Settings, lines, train, train_in, write_recipe
from tests.support.small_targets import make_target

WORDS = ["the sea", "ten birds in the den", "a stone", "trees on the sand", "there it is", "read on", "so", "no end"]


def save_t5(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """A random T5 with the tiny tokenizer, which loses its chat template: the family has none."""
    target = make_target("t5", torch.float32, vocab_size=128, pad_token_id=0, tie_word_embeddings=False, **changes)
    target.model.save_pretrained(folder)
    bare: Any = copy.copy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(folder)
    return folder


@pytest.fixture
def t5_settings(settings: Settings, tmp_path: Path, tokenizer: Tokenizer) -> Settings:
    """A recipe on the T5's own answers to questions."""
    path = save_t5(tmp_path / "t5", tokenizer)
    save_t5(tmp_path / "small", tokenizer, d_model=16, num_layers=1, num_heads=2)
    chats = [{"instruction": f"say {a} and {b}", "response": b} for a in WORDS for b in WORDS]
    questions = write_chats(tmp_path / "questions.jsonl", ({"prompt": f"write {a}"} for a in WORDS))["path"]
    data = {
        "sources": [write_chats(tmp_path / "chats.jsonl", chats)],
        "context_length": 96,
        "regenerate": {"prompts": 24, "prompt_tokens": 48, "new_tokens": 24},
    }
    train = {"max_steps": 12, "batch_size": 8, "lr": 0.01, "log_every": 1}
    measured = {"prompts": questions, "max_new_tokens": 12, "tree": "chain:3"}
    return settings | {"target": {"path": str(path)}, "data": data, "train": train, "eval": measured}


HEADS: list[dict[str, Any]] = [
    {"kind": "draft", "layers": [0, 2]},
    {"kind": "draft", "fresh": {"d_model": 16, "num_layers": 1}},
    {"kind": "draft", "path": "small"},
    {"kind": "eagle3", "aux_layer_ids": [1, 2, 3], "depth": 3},
]


@pytest.mark.parametrize("head", [HEADS[0], *(pytest.param(head, marks=pytest.mark.slow) for head in HEADS[1:])])
def test_a_head_learns_and_training_foresees_what_the_runtime_accepts(
    head: dict[str, Any], t5_settings: Settings, tmp_path: Path
) -> None:
    settings = t5_settings | {"head": head | ({"path": str(tmp_path / "small")} if "path" in head else {})}
    folder = train_in(settings)
    losses = [line["loss"] for line in lines(folder, "train")]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
    measured = lines(folder)[-1]
    assert measured["tau_by_training_step"] == pytest.approx(measured["tau"], rel=0.05)


def test_a_question_and_its_answer_are_one_sequence(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = str(save_t5(tmp_path, tokenizer))
    target, tokenizer = load_pair(path, dtype="auto", device=torch.device("cpu"), trust_remote_code=False)
    question, answer = (list(tokenizer(text)["input_ids"]) for text in ("so it is", "ten"))
    messages = talk("so it is", "ten")
    (document,) = encode_chat(tokenizer, messages)
    assert target.start_token == 0
    assert document.ids.tolist() == [*question, 1, 0, *answer, 1]
    assert document.labels.tolist() == [False] * (len(question) + 2) + [True] * (len(answer) + 1)
    assert "an encoder-decoder answers one turn" in refused(encode_chat, tokenizer, messages * 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.sources.0.kind": "text"}, r"data\.sources\.0: an encoder-decoder target learns from questions"),
        ({"data.regenerate.train_on_prompts": True}, r"data\.regenerate\.train_on_prompts: "),
        ({"data.regenerate.server": {"url": "http://127.0.0.1:1"}}, r"data\.regenerate\.server: servers take no"),
    ],
)
def test_data_that_no_decoder_writes_is_refused(changes: dict[str, Any], words: str, t5_settings: Settings) -> None:
    path = write_recipe(t5_settings | {"head": {"kind": "draft", "layers": [0, 2]}})
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    with pytest.raises(UserError, match=words):
        train(path, *overrides)


def test_an_answer_needs_a_first_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = save_t5(tmp_path / "t5", tokenizer)
    for file in (folder / "config.json", folder / "generation_config.json"):
        fields = json.loads(file.read_text())
        fields.pop("decoder_start_token_id", None)
        file.write_text(json.dumps(fields))
    assert "names no decoder_start_token_id" in refused(load_target, str(folder))


def test_a_draft_reads_the_sequences_of_its_target(tmp_path: Path, target: FrozenTarget, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="an encoder-decoder draft needs a target whose answers begin"):
        load_smaller(str(save_t5(tmp_path / "t5", tokenizer)), target)
