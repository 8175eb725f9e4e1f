"""Answers that are shown while they are decoded are plain decoding's, whole characters, with their drafts marked."""

import copy
import io
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from eval import chat as module
from eval.chat import Conversation, interruptible
from eval.core.command_line import exit_status
from eval.data.prompts import render
from eval.measure.open_models import Opened
from eval.runtime.engine import Request
from eval.runtime.request import Detokenizer
from eval.runtime.sampling_params import Sampling
from heads.core.tree import parse_shape
from heads.targets.frozen_target import FrozenTarget
from heads.targets.target_files import load_tokenizer
from tests.conftest import CHAT_TEMPLATE
from tests.support.annotations import Capture, Patch
from tests.support.refusals import refused
from tests.support.small_targets import open_engine

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def main(x):"


@pytest.fixture
def opened(pair_head: Any, tiny_target: FrozenTarget, tiny_tokenizer: PreTrainedTokenizerBase) -> Opened:
    return Opened(pair_head, tiny_target, tiny_tokenizer)


def terminal(**options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60, **options)


def conversation(opened: Opened, length: int, console: Console | None = None, **sampling: Any) -> Conversation:
    return Conversation(opened, parse_shape("chain:3"), Sampling(**sampling), length, console or Console())


def decoded(opened: Opened, ids: Sequence[int], new_tokens: int, **sampling: Any) -> list[int]:
    engine = open_engine(opened.target, None, max_length=len(ids) + new_tokens + 1)
    return engine.generate([Request(ids, new_tokens, Sampling(**sampling))])[0].tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_is_plain_decodings_text(opened: Opened, temperature: float, capsys: Capture) -> None:
    """Its tokens are marked as the output says, also if its last round is cut on a draft token."""
    _, ids = render([{"role": "user", "content": PROMPT}], opened.tokenizer)
    plain = decoded(opened, ids, 40, temperature=temperature, top_k=9, seed=5)
    capsys.readouterr()
    talk = conversation(opened, 40, temperature=temperature, top_k=9, seed=5)
    output, said = talk.answer(PROMPT), capsys.readouterr()
    text = str(opened.tokenizer.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    assert output.tokens == plain and said.out.rstrip("\n") == text.rstrip("\n") and text
    assert said.err.startswith(f"{len(plain)} tokens, tau ") and "tokens/s" in said.err
    drafted_last = 0
    for talk.max_new_tokens in range(1, 24):
        talk.messages.clear()
        assert talk.answer(PROMPT).drafted() == talk.marks
        drafted_last += talk.marks[-1]
    assert drafted_last and not all(talk.marks)


def test_a_terminal_shows_drafts_in_colour_and_the_figures_below(opened: Opened) -> None:
    for no_color in (False, True):
        console = terminal(no_color=no_color)
        output = conversation(opened, 30, console).answer(PROMPT)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert any(output.drafted()) and "tokens/s" in shown and ("\x1b[32m" in shown) != no_color


def test_what_a_terminal_would_obey_is_not_written_to_it(opened: Opened) -> None:
    console = terminal()
    conversation(opened, 9, console).show("a\x1b]0;title\x07\tb\nc\x9b31m", "green")
    written = console.file.getvalue()  # type: ignore[attr-defined]
    shown = Text.from_ansi(written).plain
    assert "title" in shown and "\x1b]" not in written and "\x9b" not in written and "\x07" not in shown


def test_a_conversation_is_rendered_anew_each_turn(opened: Opened, capsys: Capture) -> None:
    """By a template that drops the reasoning of earlier answers. A turn without room is refused and not remembered."""
    tokenizer = copy.copy(opened.tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
    talk = conversation(opened._replace(tokenizer=tokenizer), 12)
    talk.messages = [{"role": "system", "content": "be calm"}]
    first = talk.answer(PROMPT).text(tokenizer)
    talk.messages[-1]["content"] = f"so</think>{first}"
    second = talk.answer("and then?")
    text = f"<s><|system|>be calm<|user|>{PROMPT}<|assistant|>{first}</s><|user|>and then?<|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert second.tokens == decoded(opened, ids, 12)
    assert re.search(r"this prompt has \d+ tokens; expected 1 to \d+", refused(talk.answer, "x " * 600))
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 2]


def test_ctrl_c_ends_the_answer_after_the_round(opened: Opened, capsys: Capture) -> None:
    talk = conversation(opened, 40)
    whole = talk.answer(PROMPT)
    asked = iter([False, False, True])
    talk.messages.clear()
    cut = talk.answer(PROMPT, lambda: next(asked))
    assert cut.finish_reason == "stop" and cut.rounds == 2 and cut.tokens == whole.tokens[: len(cut.tokens)]
    with interruptible() as is_interrupted:
        assert not is_interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_pieces_are_whole_characters() -> None:
    tokenizer = load_tokenizer(str(ROOT / "recipes/quickstart/target"))
    for text in ("naïve façade, 日本語 and 😀👩‍👩‍👧!", "  two spaces\n\tand a tab\n"):
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(token) for token in tokenizer(text)["input_ids"]]
        assert "".join(pieces) == text and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert detokenizer.flush() == ""
    half = tokenizer("日")["input_ids"][:-1]
    assert [detokenizer.push(token) for token in half] == [""] * len(half)
    assert detokenizer.flush() == tokenizer.decode(half) != ""


def the_lines(capsys: Capture) -> list[str]:
    """Return what was said on standard error, without how long things take and how the target computes."""
    return [line for line in capsys.readouterr().err.splitlines() if not re.search("decodes in| so far$", line)]


def call(words: Sequence[object]) -> int:
    return exit_status(lambda: module.main([str(word) for word in words]))


def test_lines_are_answered_until_the_input_ends(tiny_target_dir: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """An empty one among them, and two for which there is no room until the conversation is reset."""
    long = b"x " * 180
    given = b"\n".join([b"one", b"", long, long, long, b"/reset", long])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    assert call(["lookup:2", "--target", tiny_target_dir, "--max-new-tokens", 5, "--system", "be calm"]) == 0
    said = the_lines(capsys)
    assert ["/reset" in line for line in said] == [False, False, True, True, False], said
    assert said[0].startswith("5 tokens, tau ") and "tokens/s (plain decoding " in said[0], said
    monkeypatch.setattr("eval.measure.machine.busy_cores", lambda _: 1.9)
    assert call(["lookup:2", "--target", tiny_target_dir, "--max-new-tokens", 5, "--prompt", "x"]) == 0
    assert the_lines(capsys)[0].endswith("(plain decoding is not compared: something else uses this machine)")


def test_what_cannot_be_answered_is_refused_in_one_line(capsys: Capture) -> None:
    commands: list[tuple[list[object], str]] = [
        (["lookup:2", "--prompt", "x"], "give --target"),
        (["--prompt", "x"], "head"),
        (["lookup:2", "--tree", "none"], "--tree"),
        (["lookup:2", "--temperature", "0,1"], "--temperature"),
        (["lookup:2", "--temperature", "1", "--sampling", "model"], "--temperature: --sampling model"),
        (["no-such-folder", "--prompt", "x"], "no-such-folder"),
        (["lookup:2", "--target", ROOT / "recipes/quickstart/target", "--system", "x"], "has no chat template"),
    ]
    for words, said in commands:
        assert call(words) == 2
        (line,) = the_lines(capsys)
        assert line.startswith("error: ") and said in line
