"""Records as dialogues: prompts for the target, one after another, each after the target's own earlier answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from eval.benchmark.records import Message, RecordError
from train.data.chats import token_ids
from train.data.templates import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts = Generator[list[int], list[int], str | None]
"""Yields prompts and is sent their answers. Returns why it ends before the end of the record, or None."""


class Dialogue:
    """The prompts of one record, with their answers."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self.prompt: list[int] | None = None
        """Token ids of the next prompt, or None at the end."""
        self.exchanges: list[tuple[list[int], list[int]]] = []
        """Pairs of a prompt and its answer."""
        self.cut: str | None = None
        """Reason why the dialogue ended before its record, or None."""
        self._next(None)

    def answer(self, ids: list[int]) -> None:
        """Add the answer to `prompt`, and go on to the next prompt."""
        assert self.prompt is not None
        self.exchanges.append((self.prompt, ids))
        self._next(ids)

    def take(self, kept: Callable[[list[int]], list[int] | None]) -> None:
        """Add stored answers, which `kept` returns, up to the first prompt without one."""
        while self.prompt is not None and (ids := kept(self.prompt)) is not None:
            self.answer(ids)

    def _next(self, answer: Any) -> None:
        try:
            self.prompt = self._prompts.send(answer)
        except StopIteration as end:
            self.prompt, self.cut = None, end.value


def lone(prompt: list[int]) -> Prompts:
    """Yield a single prompt."""
    yield prompt
    return None


def answer_by_answer(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    place: str,
    tools: Any = None,
    most: int,
    last_only: bool = False,
    calls: bool = False,
) -> Prompts:
    """Yield the prompts of a conversation, in which the target's answers replace the assistant's. Turns that call tools
    are kept, since the next turns answer their calls. It ends before a prompt of more than `most` tokens.

    `last_only`: the target gives only the last answer. `calls`: a turn that calls tools also counts as an answer.
    RecordError for a conversation without a first prompt.
    """
    messages = list(template.prepared(messages, place=place, tools=tools))
    tokenizer = template.tokenizer
    special = special_ids(tokenizer)
    answers = (n for n, message in enumerate(messages) if message["role"] == "assistant")
    turns = [n for n in answers if calls or "tool_calls" not in messages[n]]
    if not turns:
        raise RecordError(f"{place}: expected an answer of the assistant, got none", "without an answer")
    for turn in turns[-1:] if last_only else turns:
        try:
            text = template.render(messages[:turn], place=place, tools=tools, answer_next=True)
        except RecordError as error:
            if turn == turns[0] or last_only:
                raise
            return f"a turn {error.reason}"
        prompt = token_ids(tokenizer, text)
        if len(prompt) > most:
            return f"a prompt of more than {most} tokens"
        answer = yield prompt
        said = answer[:-1] if answer[-1] in special else answer
        if turn != turns[-1] and not special.isdisjoint(said):
            # Such as channels and calls: only the template knows which turn they would belong to.
            return "a turn on an answer with special tokens"
        messages[turn] = {"role": "assistant", "content": str(tokenizer.decode(said))}
    return None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens, which are not text."""
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids).union(added)
