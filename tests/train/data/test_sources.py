"""Real chat data: what cannot be used is skipped and counted, up to a share."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase as Tokenizer

from heads.core.errors import UserError
from heads.targets.frozen_target import FrozenTarget
from tests.eval.data.test_conversation_forms import GPT, HUMAN, A, U
from tests.support.chats import reader_of
from tests.support.refusals import refused
from train.data.answers import open_answers
from train.data.corpus import Document
from train.data.data_settings import Data
from train.data.sources import ChatSource
from train.data.tokenise import read_source

GOOD = {"conversations": [HUMAN, {**GPT, "value": "the sea"}]}
ODD: dict[str, dict[str, Any]] = {
    "two forms at once": {**GOOD, "question": "hi", "answer": "no"},
    "two system prompts": {**GOOD, "system": "be", "system_prompt": "me"},
    "a history that is no list of pairs": {**GOOD, "history": ["hi"]},
    "unknown role 'boss'": {"conversations": [{"from": "boss", "value": "a"}, *GOOD["conversations"]]},
    "a turn without text": {"messages": [{**U, "content": None}, A]},
    "no turns": {"messages": []},
    "no conversation": {"text": "a"},
    "without an answer": {"messages": [U]},
    "whose answers all have weight 0": {"messages": [{**U, "weight": 1}, {**A, "weight": 0}]},
    "refused by the chat template": {"messages": [{**U, "content": "FAIL"}, A]},
    "unreadable tools": {**GOOD, "tools": "{"},
    "unreadable tool calls": {"messages": [U, {**A, "content": None, "tool_calls": "look"}]},
    "tool calls not rendered": {"messages": [U, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
}
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'FAIL' %}{{ raise_exception('failed') }}{% endif %}<|{{ m.role }}|>"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    loaded: Any = copy.deepcopy(tokenizer)
    loaded.chat_template = TEMPLATE
    return loaded  # type: ignore[no-any-return]


Read = Callable[..., tuple[list[Document], str]]


@pytest.fixture
def read(tmp_path: Path, tokenizer: Tokenizer) -> Read:
    """(records, settings of the source) -> the documents of an array file, and what is said of them."""

    def read(records: list[dict[str, Any]], **settings: Any) -> tuple[list[Document], str]:
        path, said = tmp_path / "chats.json", list[str]()
        path.write_text(json.dumps(records))
        source = ChatSource(kind="chat", path=str(path), **settings)
        corpus = read_source(source, "data.sources.0", reader_of(tokenizer, said))
        (text,) = said
        return list(corpus), text

    return read


def test_records_that_are_held_out_are_counted(tmp_path: Path, read: Read) -> None:
    held_out = tmp_path / "held-out.jsonl"
    other = {"messages": [{**U, "content": "and now?"}, A]}
    held_out.write_text(json.dumps(other))
    documents, said = read([other, *[GOOD] * 3], held_out=str(held_out))
    assert len(documents) == 3 and "4 records: 3 conversations" in said and "are skipped" not in said
    assert "1 of 4 records are held out: they begin as one of held_out does" in said


@pytest.mark.parametrize("reason", ODD)
def test_one_odd_record_is_left_out_and_given(reason: str, read: Read) -> None:
    documents, said = read([GOOD, ODD[reason], *[GOOD] * 18])
    assert len(documents) == 19
    (line,) = (line for line in said.splitlines() if "are skipped" in line)
    assert f"1 of 20 records are skipped: 1 {reason}; the first is" in line and "chats.json: record 2: " in line


@pytest.mark.parametrize(
    ("name", "weight", "got"),
    [("weight", "yes", "'yes'"), ("weight", 2, "2"), ("weight", None, "None"), ("loss", [], "[]")],
)
def test_a_weight_is_0_or_1(name: str, weight: Any, got: str, read: Read) -> None:
    _, said = read([{"messages": [U, {**A, name: weight}]}, *[GOOD] * 19])
    assert "1 of 20 records are skipped: 1 a weight other than 0 or 1; the first is" in said
    assert f"messages[1]: {name}: expected 0 (not to be trained on) or 1, got {got}" in said


def test_what_is_worth_saying_of_answers_is_said_once(tokenizer: Tokenizer, read: Read) -> None:
    thinking = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [U, {**A, "masked": True}]
    records = [{"messages": given} for given in (turns * 2, [U, {**A, "reasoning_content": "so"}], turns)]
    tokenizer.chat_template = thinking
    _, said = read(records)
    assert "  3 answers have no reasoning, under a chat template that thinks\n" in said
    assert said.count("  3 answers have a key 'masked', which is not read; if it") == 1
    tokenizer.chat_template = "{% if enable_thinking is defined and not enable_thinking %}no {% endif %}" + thinking
    assert "that thinks; data.template.enable_thinking: false" in read(records)[1]


def test_reasons_are_counted_and_more_than_the_recipe_allows_are_refused(read: Read) -> None:
    records = [*[ODD["no turns"]] * 3, *ODD.values(), *[GOOD] * 4]
    documents, said = read(records, max_skipped=0.8)
    assert len(documents) == 4
    assert "16 of 20 records are skipped: 4 no turns, 1 " in said and ", 8 others; the first is" in said
    with pytest.raises(UserError, match=r"16 of 20 records are skipped: 4 no .* record 1: .* max_skipped=0\.79"):
        read(records, max_skipped=0.79)
    assert "no token to train on in its 0 texts" in refused(read, [ODD["no turns"]], max_skipped=1.0)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_record_with_a_token_that_the_target_lacks_is_left_out(
    kind: str, tmp_path: Path, target: FrozenTarget, tokenizer: Tokenizer
) -> None:
    tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    texts = ["the sea is near " * 4, "an <|image|> of the sea " * 4]
    forms = {"chat": [{"question": text, "answer": "so"} for text in texts], "text": [{"text": text} for text in texts]}
    path, said = tmp_path / "data.jsonl", list[str]()
    path.write_text("".join(json.dumps(forms[kind][n]) + "\n" for n in (0, 1, 0)))
    free = {"max_skipped": 0.5} if kind == "chat" else {}
    regenerate = {"prompts": None, "prompt_tokens": 200, "new_tokens": 8}
    settings = {"sources": [{"kind": kind, "path": str(path), **free}], "context_length": 300, "regenerate": regenerate}
    data = Data.model_validate(settings)
    reader = reader_of(tokenizer, said)
    reader = replace(reader, rendering=replace(reader.rendering, vocab_size=128))
    assert len(read_source(data.sources[0], "data.sources.0", reader)) == 2
    list(open_answers(data, 0, target, reader).dialogues())
    fault = f"the first is {path}:2: token '<|image|>' (128) is none of the target's 128 tokens"
    line = f"1 of 3 records are skipped: 1 with a token that the target has no row for; {fault}"
    assert [line in text for text in said] == [True, True]
    path.write_text(json.dumps(forms[kind][1]))
    with pytest.raises(UserError, match=r"1 of 1 records are skipped: 1 with a token that the target has no row"):
        read_source(data.sources[0], "data.sources.0", reader)


def test_the_price_of_a_template_that_rewrites_is_said(tokenizer: Tokenizer, read: Read) -> None:
    tokenizer.chat_template = f"{{{{ messages | length }}}}{TEMPLATE}"
    records = [{"messages": [U, A, U, A]}] * 19
    (all_answers, said), (last, _) = read(records), read(records, answers="last")
    (line,) = (line for line in said.splitlines() if "rewrites" in line)
    sizes = [sum(len(document.ids) for document in documents) for documents in (all_answers, last)]
    assert f"{sizes[0] / sizes[1]:.2f} times" in line and "data.sources.0.answers=last" in line
    assert len(all_answers) == 2 * len(last) == 38


SCREEN = """\
data.sources.0: FILE
  form: question, response: 18 records; conversations: 1 records
  20 records: 19 conversations, 281 tokens, 114 labels
  1 of 20 records are skipped: 1 without an answer; the first is FILE: record 20: expected an answer of the \
assistant, got none
  1 records begin with an answer, which is dropped
  columns 'notes', 'id' are not read
  the first of 19 documents, 15 tokens, labels in ⟦⟧:
  <|system|>be</s><|user|>hi</s><|assistant|>⟦the sea</s>⟧"""


def test_a_source_is_described_on_one_screen(tmp_path: Path, read: Read) -> None:
    orca = {"system_prompt": "be", "question": "hi", "notes": "", "response": "the sea"}
    leading = {"conversations": [{"from": "gpt", "value": "a"}, *GOOD["conversations"]], "id": "1"}
    records: list[dict[str, Any]] = [orca, {**orca, "notes": "here"}, *[orca] * 16, leading, {"messages": [U]}]
    for _ in range(2):  # the second time from the cache
        assert read(records)[1] == SCREEN.replace("FILE", str(tmp_path / "chats.json"))


def test_a_long_document_is_clipped_in_the_middle(read: Read) -> None:
    _, said = read([{"instruction": "a" * 999 + "b", "output": "c" * 1000}])
    clipped = r"  <\|user\|>a+ \[\.\.\. \d+ characters \.\.\.\] a+b</s><\|assistant\|>⟦c+ \[\..*\] c+</s>⟧"
    assert re.fullmatch(clipped, said.splitlines()[-1])
    _, said = read([{"data": ["line\n"] * 100}])
    assert len(said) < 2000


def test_prompts_are_read_past_odd_records(tmp_path: Path, target: FrozenTarget, tokenizer: Tokenizer) -> None:
    """The share is of a whole source, wherever in it the odd records are."""

    def asked(prompts: int | None, *records: dict[str, Any]) -> tuple[int, str]:
        path, said = tmp_path / "chats.json", list[str]()
        path.write_text(json.dumps(records))
        regenerate = {"prompts": prompts, "prompt_tokens": 16, "new_tokens": 8}
        settings = {"sources": [{"kind": "chat", "path": str(path)}], "context_length": 64, "regenerate": regenerate}
        answers = open_answers(Data.model_validate(settings), 0, target, reader_of(tokenizer, said))
        (text,) = said
        return len(list(answers.dialogues())), text

    count, said = asked(4, ODD["no turns"], *[GOOD] * 30)
    assert count == 4 and "1 of 31 records are skipped" in said
    with pytest.raises(UserError, match=r"2 of 32 records are skipped: 2 no turns; the first is .*record 31: .*max_sk"):
        asked(4, *[GOOD] * 30, *[ODD["no turns"]] * 2)
    long = {"instruction": "say " * 20, "response": "so"}
    count, said = asked(None, long, ODD["no turns"], *[GOOD] * 30, long)
    assert count == 30
    assert "30 conversations to answer; 2 begin with a prompt of more than 16 tokens (data.regenerate." in said
    assert "gives 0 prompts of at most 16 tokens, expected at least 1; raise prompt_tok" in refused(asked, None, long)
