"""A T5 and a draft distilled from it, the case of the first paper on speculative decoding (arXiv 2211.17192)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from eval.measure.open_models import load_pair
from heads.core.errors import UserError
from heads.targets.load import load_target
from heads.targets.smaller_models import load_smaller
from heads.targets.target_files import load_tokenizer
from tests.support.chats import encode_chat, talk, write_chats
from tests.support.runs import Settings, lines, train, train_in, write_recipe

WORDS = ["the sea", "ten birds in the den", "a stone", "trees on the sand", "there it is", "read on", "so", "no end"]


def save_t5(folder: Path, tokenizer_folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random T5 with the tiny tokenizer, which loses its chat template: the family has none."""
    sizes: dict[str, Any] = dict(d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, tie_word_embeddings=False)
    tokens: dict[str, Any] = dict(vocab_size=128, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
    config = T5Config(**{**tokens, **sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = T5ForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer: Any = load_tokenizer(str(tokenizer_folder))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def t5_settings(settings: Settings, tmp_path: Path, tiny_target_dir: Path) -> Settings:
    """A recipe on the T5's own answers to questions."""
    path = save_t5(tmp_path / "t5", tiny_target_dir)
    save_t5(tmp_path / "small", tiny_target_dir, seed=1, d_model=16, num_layers=1, num_heads=2)
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


@pytest.mark.parametrize(
    "head",
    [
        {"kind": "draft", "layers": [0, 2]},
        pytest.param({"kind": "draft", "fresh": {"d_model": 16, "num_layers": 1}}, marks=pytest.mark.slow),
        pytest.param({"kind": "draft", "path": "small"}, marks=pytest.mark.slow),
        pytest.param({"kind": "eagle3", "aux_layer_ids": [1, 2, 3], "depth": 3}, marks=pytest.mark.slow),
    ],
    ids=["layers", "fresh", "path", "eagle3"],
)
def test_a_head_learns_and_training_foresees_what_the_runtime_accepts(
    head: dict[str, Any], t5_settings: Settings, tmp_path: Path
) -> None:
    settings = t5_settings | {"head": head | ({"path": str(tmp_path / "small")} if "path" in head else {})}
    folder = train_in(settings)
    losses = [line["loss"] for line in lines(folder, "train")]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
    measured = lines(folder)[-1]
    assert measured["tau_by_training_step"] == pytest.approx(measured["tau"], rel=0.05)


def test_a_question_and_its_answer_are_one_sequence(tmp_path: Path, tiny_target_dir: Path) -> None:
    target, tokenizer = load_pair(
        str(save_t5(tmp_path, tiny_target_dir)), dtype="auto", device=torch.device("cpu"), trust_remote_code=False
    )
    question, answer = (list(tokenizer(text)["input_ids"]) for text in ("so it is", "ten"))
    messages = talk("so it is", "ten")
    (document,) = encode_chat(tokenizer, messages)
    assert target.start_token == 0
    assert document.ids.tolist() == [*question, 1, 0, *answer, 1]
    assert document.labels.tolist() == [False] * (len(question) + 2) + [True] * (len(answer) + 1)
    with pytest.raises(UserError, match="an encoder-decoder answers one turn"):
        encode_chat(tokenizer, messages * 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.sources.0.kind": "text"}, r"data\.sources\.0: an encoder-decoder target learns from questions"),
        ({"data.regenerate.train_on_prompts": True}, r"data\.regenerate\.train_on_prompts: "),
        (
            {"data.regenerate.server": {"url": "http://127.0.0.1:1"}},
            r"data\.regenerate\.server: servers take no prompts",
        ),
    ],
)
def test_data_that_no_decoder_writes_is_refused(changes: dict[str, Any], words: str, t5_settings: Settings) -> None:
    path = write_recipe(t5_settings | {"head": {"kind": "draft", "layers": [0, 2]}})
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    with pytest.raises(UserError, match=words):
        train(path, *overrides)


def test_an_answer_needs_a_first_token(tmp_path: Path, tiny_target_dir: Path) -> None:
    folder = save_t5(tmp_path / "t5", tiny_target_dir)
    for file in (folder / "config.json", folder / "generation_config.json"):
        fields = json.loads(file.read_text())
        fields.pop("decoder_start_token_id", None)
        file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="names no decoder_start_token_id"):
        load_target(str(folder))


def test_a_draft_reads_the_sequences_of_its_target(tmp_path: Path, tiny_target_dir: Path) -> None:
    draft = str(save_t5(tmp_path / "t5", tiny_target_dir))
    with pytest.raises(UserError, match="an encoder-decoder draft needs a target whose answers begin"):
        load_smaller(draft, load_target(str(tiny_target_dir)))
