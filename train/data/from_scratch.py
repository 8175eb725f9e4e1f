"""Training text of a target from scratch: this machine's Python source, and optionally conversations.

Both are split into training and held-out text by a hash (`eval.measure.python_source`). Conversations are rendered as
by the tokenizer's chat template: each turn follows a token for its role, and each answer ends with the end-of-document
token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from eval.measure.forms import read_chat
from eval.measure.progress import Progress
from eval.measure.python_source import installed_source, is_held_out, read_split
from eval.measure.records import Message, read_records
from heads.core.errors import UserError
from train.core.strict_yaml import Settings

WORDS = r" ?\p{L}+|\d| ?[^\s\p{L}\d]+|\n+ *| +|\s"
"""Pieces into which text is split before merges: words, digits, runs of symbols, newlines with indentation."""
END = "<|endoftext|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '" + END + "' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class TokenizerSettings(Settings):
    """The byte-level BPE tokenizer, trained on the training text."""

    vocab_size: Annotated[int, Field(ge=1)]
    """Number of tokens in the vocabulary."""
    train_modules: Annotated[int, Field(ge=1)]
    """Maximum number of Python modules, and of conversations, on which the tokenizer is trained."""


class DataSettings(Settings):
    """Training text in addition to this machine's Python source."""

    chats: list[str] = Field(default=[])
    """Files of conversations, in any format that a `chat` source reads."""


def prepare_text(settings: TokenizerSettings, data: DataSettings, folder: Path) -> None:
    """Train the tokenizer and tokenise both splits, unless done before: tokenizer.json, train.npy, held_out.npy."""
    if (folder / "held_out.npy").is_file():
        return
    chats = read_chats(data.chats)
    folder.mkdir(parents=True, exist_ok=True)
    modules = {
        name: [text for _, text in read_split(held_out=held_out, roots=installed_source())]
        for name, held_out in (("train", False), ("held_out", True))
    }
    learnt_from = modules["train"][: settings.train_modules] + chats["train"][: settings.train_modules]
    with Progress(f"a tokenizer is learnt from {len(learnt_from):,} texts, and all are tokenized"):
        tokenizer = learn_tokenizer(settings, learnt_from, chat=bool(data.chats))
        for name in modules:
            texts = modules[name] + chats[name]
            ids = np.concatenate(
                [
                    np.array([*encoding.ids, *([0] if encoding.ids[-1:] != [0] else [])], dtype=np.uint16)
                    for start in range(0, len(texts), 256)
                    for encoding in tokenizer.encode_batch(texts[start : start + 256])
                ]
            )
            size = sum(len(text.encode()) for text in texts)
            print(
                f"{name}: {len(modules[name])} modules, {len(chats[name])} conversations, {len(ids)} tokens, "
                f"{size / len(ids):.3f} bytes a token",
                flush=True,
            )
            np.save(folder / f".{name}.npy", ids)
            (folder / f".{name}.npy").replace(folder / f"{name}.npy")
    tokenizer.save(str(folder / "tokenizer.json"))


def read_chats(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the conversations in the files as text, by split."""
    splits: dict[str, list[str]] = {"train": [], "held_out": []}
    for path in paths:
        for record in read_records(path):
            text = chat_text(read_chat(record).messages)
            splits["held_out" if is_held_out(text) else "train"].append(text)
    if paths and not all(splits.values()):
        raise UserError(
            f"data.chats: {sum(map(len, splits.values()))} conversations are too few to hold some out; give more, or "
            "none with data.chats=[]"
        )
    return splits


def chat_text(messages: Sequence[Message]) -> str:
    return "".join(f"<|{m['role']}|>{m['content']}{END if m['role'] == 'assistant' else ''}" for m in messages)


def learn_tokenizer(settings: TokenizerSettings, texts: Sequence[str], *, chat: bool) -> Tokenizer:
    """Return a byte-level BPE trained on the texts. Id 0 ends a document; with `chat` the role tokens come next."""
    if settings.vocab_size > 2**16:
        raise UserError(f"tokenizer.vocab_size: expected at most {2**16}, got {settings.vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    cut = [
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=special_tokens(chat),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def special_tokens(chat: bool) -> list[str]:
    return [END, *(f"<|{role}|>" for role in ROLES if chat)]
