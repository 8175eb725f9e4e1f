"""Prompts of one record, which the target answers turn by turn, each after its own earlier answers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING

from eval.data.conversation_forms import ARGUMENTS, NO_CONVERSATION, REASONING, Chat, read_chat
from eval.data.data_files import Message, Record, RecordError
from eval.data.prompts import to_prompt
from heads.core.errors import UserError
from train.data.chats import Rendered, token_ids, trained_answers

if TYPE_CHECKING:
    from eval.data.chat_template import ChatTemplate

ASKED: Message = {"role": "assistant", "content": ""}
"""Turn that the target is to write."""


class Dialogue:
    """A single prompt, and the base of dialogues of several turns."""

    def __init__(self, template: ChatTemplate, prompt: list[int] | None) -> None:
        self.template = template
        self.prompt = prompt
        """Token ids of the next prompt, or None at the end."""
        self.exchanges: list[tuple[list[int], list[int]]] = []
        """The prompts so far, with their answers."""
        self.cut: str | None = None
        """Reason why the dialogue ended before its record, or None."""
        self.about: Mapping[str, str] = {}
        """What a document says of the record: its `form`, `unread` and `notes`."""

    def answer(self, ids: list[int]) -> None:
        """Take the answer to `prompt`, and go on to the next prompt."""
        assert self.prompt is not None
        self.exchanges.append((self.prompt, ids))
        self.prompt = self.next_prompt()

    def next_prompt(self) -> list[int] | None:
        return None

    def checked_length(self, prompt: list[int], max_tokens: int) -> list[int] | None:
        """Return a prompt of at most `max_tokens`, or None, which ends the dialogue."""
        if len(prompt) <= max_tokens:
            return prompt
        self.cut = f"a prompt of more than {max_tokens} tokens"
        return None

    def record(self) -> dict[str, object]:
        """Return the answered dialogue as a record that a source of kind text or chat reads."""
        prompt, answer = self.exchanges[-1]
        return {"text": self.template.tokenizer.decode([*prompt, *answer], clean_up_tokenization_spaces=False)}


class RenderedDialogue(Dialogue):
    """A text that the chat template has rendered, in which the target's answers replace those of the text."""

    def __init__(self, template: ChatTemplate, rendered: Rendered, max_tokens: int) -> None:
        super().__init__(template, None)
        self.rendered = rendered
        self.max_tokens = max_tokens
        self.prompt = self.next_prompt()

    def next_prompt(self) -> list[int] | None:
        text, spans = self.rendered
        number = len(self.exchanges)
        if number == len(spans):
            return None
        ids: list[int] = []
        at = 0
        if number:
            prompt, answer = self.exchanges[-1]
            ids = [*prompt, *answer]
            start, at = spans[number - 1]
            end = self.template.ends.search(text, start, at)
            if end is not None and answer[-1] not in self.template.all_end_ids:
                at = end.start()
        return self.checked_length(
            [*ids, *token_ids(self.template.tokenizer, text[at : spans[number][0]])], self.max_tokens
        )


class ChatDialogue(Dialogue):
    """A conversation in which the target's answers replace the assistant's. Turns that call tools stay as they are,
    since the next turns answer their calls, and so do answers of weight 0, which are context."""

    def __init__(
        self,
        template: ChatTemplate,
        chat: Chat,
        place: str,
        max_tokens: int,
        *,
        last_only: bool = False,
        calls: bool = False,
    ) -> None:
        """`last_only`: the target gives only the last answer. `calls`: a turn that calls tools also counts as an
        answer. RecordError for a conversation without a first prompt."""
        super().__init__(template, None)
        self.chat = chat
        self.place = place
        self.max_tokens = max_tokens
        self.text = ""
        """Text of the next prompt."""
        self.messages = list(template.prepared(chat.messages, place=place, tools=chat.tools))
        turns = [n for n in trained_answers(self.messages, place) if calls or "tool_calls" not in self.messages[n]]
        if not turns:
            raise RecordError(f"{place}: expected an answer of the assistant, got none", "without an answer")
        self.turns = turns[-1:] if last_only else turns
        """Numbers of the turns that the target writes."""
        self.prompt = self.render_prompt()

    def render_prompt(self) -> list[int] | None:
        number = len(self.exchanges)
        template = self.template
        turn = self.turns[number]
        num_read = self.turns[number - 1] + 1 if number else 0
        turns = self.messages[:turn]
        tools = self.chat.tools
        self.text, prompt = template.prompt(turns, place=self.place, tools=tools, num_checked=num_read)
        template.check_ids(prompt, self.place)
        return self.checked_length(prompt, self.max_tokens)

    def next_prompt(self) -> list[int] | None:
        number = len(self.exchanges)
        turn = self.template.turn(self.text, self.exchanges[-1][1])
        self.messages[self.turns[number - 1]] = turn
        if number == len(self.turns):
            return None
        text = "\n".join(turn[key] for key in ("content", *REASONING) if key in turn)
        if self.template.without_special(text) != text:
            # Such as channels and calls: only the template knows which turn they would belong to.
            self.cut = "a turn on an answer with special tokens"
            return None
        try:
            return self.render_prompt()
        except RecordError as error:
            self.cut = f"a turn {error.reason}"
            return None

    def record(self) -> dict[str, object]:
        answered = self.turns[: len(self.exchanges)]
        recorded = {n for n, message in enumerate(self.messages) if message["role"] == "assistant"}.difference(answered)
        messages = [
            message | ({"weight": 0} if n in recorded else {})
            for n, message in enumerate(self.messages[: answered[-1] + 1])
        ]
        more = {"tools": self.chat.tools, ARGUMENTS: dict(self.chat.arguments)}
        return {"messages": messages} | {name: value for name, value in more.items() if value}


def read_asked(record: Record) -> Chat:
    """Return the conversation of a record for the target to answer, whose answers are empty if the record has only
    prompts, as prompt files have them. RecordError as from `read_chat`."""
    try:
        chat = read_chat(record)
    except RecordError as error:
        if error.reason != NO_CONVERSATION or "text" in record[1]:
            raise
        try:
            prompt = to_prompt(record, "", None)
        except UserError:
            raise error from None
        turns = [prompt.messages, *([{"role": "user", "content": text}] for text in prompt.later_turns)]
        answered = [message for asked in turns for message in (*asked, ASKED)]
        return Chat(answered, prompt.tools, "prompts", (), arguments=prompt.arguments)
    if any(message["role"] == "assistant" for message in chat.messages):
        return chat
    return chat._replace(messages=[*chat.messages, ASKED])


def first_turns(record: Record) -> tuple[str, ...] | None:
    """Return the roles and texts of the turns before a record's first answer, or None if it has no conversation."""
    try:
        messages = read_asked(record).messages
    except RecordError:
        return None
    asked = takewhile(lambda message: message["role"] != "assistant", messages)
    return tuple(text for message in asked for text in (message["role"], message["content"]))
