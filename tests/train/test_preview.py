"""The data of a recipe as it is printed, and what a run makes of it."""

from pathlib import Path

import pytest

from tests.support.chats import write_chats
from tests.support.runs import Settings, train_in, write_recipe
from tests.train.data.test_chats import TALK
from train import preview


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
