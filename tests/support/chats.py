"""Conversion of one conversation to documents, as in a `chat` source."""

import json
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from eval.data.chat_template import ChatTemplate
from eval.data.data_files import Message
from train.data.chats import encode_conversations, read_conversation
from train.data.corpus import Document, Reader
from train.data.tokenise import CLOSE, OPEN, marked


def talk(*texts: str) -> list[Message]:
    """Return turns of a user and an assistant in turn."""
    return [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), texts, strict=False)]


def write_chats(path: Path, records: Iterable[Any]) -> dict[str, Any]:
    """Write records, one a line, and return the source that reads them."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return {"kind": "chat", "path": str(path)}


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat_template: str | None = None,
    *,
    place: str = "conversation",
    tools: Any = None,
    last_only: bool = False,
    **arguments: Any,
) -> list[Document]:
    """Return the documents of a conversation. RecordError if it cannot be trained on."""
    template = ChatTemplate(tokenizer, chat_template, arguments)
    texts, _ = read_conversation(template, messages, place=place, tools=tools, last_only=last_only)
    (documents,) = encode_conversations(template, [texts])
    return documents


def reader_of(tokenizer: PreTrainedTokenizerBase, said: list[str] | None = None, **arguments: Any) -> Reader:
    """Return the reader of a run of one process. `said`: a list to which its lines are added."""
    lines = [] if said is None else said
    return Reader(ChatTemplate(tokenizer, arguments=arguments), Accelerator(cpu=True), lines.append)


def bracketed(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> list[str]:
    """Return each document's text with its labels in brackets."""
    brackets = {ord(OPEN): "[", ord(CLOSE): "]"}
    return [marked(tokenizer, document).translate(brackets) for document in documents]
