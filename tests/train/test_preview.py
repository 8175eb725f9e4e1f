"""The data of a recipe as it is printed, and what a run makes of it."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.chats import reader_of, write_chats
from tests.support.runs import Settings, train_in, write_recipe
from tests.train.data.test_chats import TALK
from train import preview
from train.data.sources import ChatSource
from train.data.tokenise import read_source


@pytest.fixture
def chats(settings: Settings, tmp_path: Path) -> Settings:
    """A recipe on twenty conversations, one of them unusable."""
    records = [{"messages": TALK[1:]}] * 19 + [{"messages": TALK[1:2]}]
    settings["data"]["sources"] = [write_chats(tmp_path / "chats.jsonl", records)]
    return settings


def test_conversations_are_shown_with_what_is_trained_on(chats: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert preview.main([str(write_recipe(chats))]) == 0
    said = capsys.readouterr().out
    assert said.count("<s><|user|>hi<|assistant|>⟦the sea</s>⟧<|user|>and<|assistant|>⟦sand</s>⟧\n") == 1
    assert "20 records: 19 conversations, " in said and "1 of 20 records are skipped: 1 without an answer" in said
    chats["data"]["regenerate"] = {"prompt_tokens": 32, "new_tokens": 8}
    assert preview.main([str(write_recipe(chats))]) == 0
    said = capsys.readouterr().out
    assert "the target answers these prompts itself" in said
    assert "data.regenerate: 20 conversations to answer\n" in said  # the one without an answer, too


def test_a_run_takes_up_what_the_preview_tokenised(chats: Settings, own_cache: Path) -> None:
    preview.main([str(write_recipe(chats))])
    before = {path: path.stat().st_mtime_ns for path in own_cache.rglob("*")}
    train_in(chats)
    assert before == {path: path.stat().st_mtime_ns for path in own_cache.rglob("*")}


def test_the_price_of_a_template_that_rewrites_is_said(chats: Settings) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chats["target"]["path"])
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    path = chats["data"]["sources"][0]["path"]
    said: list[str] = []
    corpus = read_source(ChatSource(kind="chat", path=path), "data.sources.0", reader_of(tokenizer, said))
    last = ChatSource(kind="chat", path=path, answers="last")
    only = read_source(last, "data.sources.0", reader_of(tokenizer, said))
    (line,) = (line for line in said[0].splitlines() if "rewrites" in line)
    assert f"{corpus.num_tokens / only.num_tokens:.2f} times" in line and "data.sources.0.answers=last" in line
    assert len(corpus) == 2 * len(only) == 38
