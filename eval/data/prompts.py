"""Prompt suites on which heads are measured.

The prompts of `python-heldout` are cut from modules of Python's standard library that no training run sees
(`eval.data.python_source`). The public suites are loaded from the hub with `datasets`. A suite may also be a local
file of records with `turns` or `text`, or in a form of training data (`eval.data.conversation_forms`). A
conversation is rendered with the tokenizer's chat template if there is one. The runtime gets token ids, and results
contain a hash of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from eval.core.command_line import print_line
from eval.data.chat_template import chat_template_of
from eval.data.conversation_forms import (
    QUESTIONS,
    ROLE,
    TURNS,
    read_arguments,
    read_tools,
    read_turns,
    with_context,
    with_lists,
)
from eval.data.data_files import Message, Record, is_local, read_hub, read_records
from eval.data.python_source import read_split
from eval.data.rendered_text import unknown_token, without_second_bos
from heads.core.errors import UserError, shown
from heads.core.files import expanded, is_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

HELD_OUT_SUITE = "python-heldout"
HUB_SUITES: dict[str, dict[str, object]] = {
    "spec_bench": {
        "path": "json",
        "data_files": "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "split": "train",
    },
    "mt_bench": {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
    "humaneval": {"path": "openai/openai_humaneval", "split": "test"},
    "mbpp": {"path": "google-research-datasets/mbpp", "name": "full", "split": "test"},
    "gsm8k": {"path": "openai/gsm8k", "name": "main", "split": "test"},
}
"""Arguments of `datasets.load_dataset`, by the name of the suite."""

HELD_OUT_TOKENS = (64, 128)  # minimum and maximum number of tokens of a prompt cut from a module
HELD_OUT_REST = 64  # minimum number of tokens of the excerpt after the prompt, so that there is text to continue
EXCERPT_CHARACTERS = 4_000
MAX_HELD_OUT = 10_000  # prompts; there are far fewer modules to cut them from
ID_KEYS = ("question_id", "prompt_id", "task_id", "id")
LATER_TURN = re.compile(r"#\d+$")
"""End of the id of a prompt that `follow_up` made."""
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Start of the text in the rows of SPEED-Bench whose prompts may not be shared with it."""
COMMON_KEYS = ("turns", "messages", "conversations", "prompt", "question", "instruction", "text")
TEXT_KEYS = tuple(dict.fromkeys([*COMMON_KEYS, *TURNS, *QUESTIONS]))


@dataclass(frozen=True)
class Prompt:
    id: str
    suite: str
    category: str
    text: str
    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    """The conversation so far; empty for plain text."""
    later_turns: tuple[str, ...] = ()
    """Further turns of the user, for after the answer to this prompt (MT-Bench, Spec-Bench)."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the chat template for this prompt alone."""
    tools: list[object] | None = None
    """Tools that the target may call, as chat templates expect them."""


def load_prompts(
    suite_or_path: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    num_prompts: int | None = None,
    max_prompt_tokens: int,
    seed: int = 0,
    skip_long: bool = False,
    remedy: str = "skip long prompts (--skip-long), or ask for fewer new tokens",
    vocab_size: int | None = None,
) -> list[Prompt]:
    """Return the prompts of one suite or file: at most `num_prompts`, spread evenly over the suite.

    A prompt of more than `max_prompt_tokens` raises UserError with its place and `remedy`. With `skip_long` it is left
    out instead, and so is one with a token that a target of `vocab_size` tokens does not have. Without a tokenizer,
    prompts have messages and no token ids.
    """
    if suite_or_path == HELD_OUT_SUITE:
        assert tokenizer is not None
        return held_out_prompts(tokenizer, num_prompts or 64, max_prompt_tokens, seed)
    suite = suite_name(suite_or_path)
    prompts: list[Prompt] = []
    unknown: list[str] = []
    records = spread(list(suite_records(suite_or_path)), num_prompts)
    for record in records:
        prompt = to_prompt(record, suite, tokenizer)
        later = [] if tokenizer is None else [encode(turn, tokenizer) for turn in prompt.later_turns]
        if fault := unknown_token([*prompt.ids, *chain.from_iterable(later)], tokenizer, vocab_size):
            unknown.append(f"{record[0]}: {fault}")
        elif len(prompt.ids) <= max_prompt_tokens:
            prompts.append(prompt)
        elif not skip_long:
            what = f"the prompt has {len(prompt.ids)} tokens where at most {max_prompt_tokens} fit"
            raise UserError(f"{record[0]}: {what}; {remedy}")
    if unknown:
        line = f"{len(unknown)} of {len(records)} prompts have a token that the target has no row for"
        if len(unknown) == len(records):
            raise UserError(f"{suite_or_path}: {line}, such as {unknown[0]}; remove them")
        print_line(f"{suite_or_path}: {line} and are skipped; the first is {unknown[0]}")
    if long := len(records) - len(unknown) - len(prompts):
        line = f"{long} of {len(records)} prompts have more than {max_prompt_tokens} tokens and are skipped"
        print_line(f"{suite_or_path}: {line}")
    if not prompts:
        raise UserError(f"{suite_or_path}: no prompt of at most {max_prompt_tokens} tokens; nothing to measure")
    describe_prompts(suite_or_path, prompts, tokenizer)
    return prompts


def describe_prompts(name: str, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Print what the chat template does not do with prompts: arguments and tools that it does not read, and prompts
    that it has rendered already."""
    if tokenizer is None or tokenizer.chat_template is None:
        return
    template = chat_template_of(tokenizer)
    unread = {key for prompt in prompts for key in template.with_arguments(prompt.arguments)[1]}
    if unread:
        print_line(f"{name}: the chat template reads no argument {', '.join(sorted(unread))}, which its prompts have")
    if (number := sum(prompt.tools is not None for prompt in prompts)) and not template.reads_tools:
        print_line(f"{name}: the chat template renders no tools, which {number} prompts have")
    rendered = sum(template.has_rendered(prompt.messages[-1]["content"]) for prompt in prompts if prompt.messages)
    if rendered:
        print_line(f"{name}: {rendered} prompts are rendered by the chat template already, and are used as they are")


def windows(
    suite: str, tokenizer: PreTrainedTokenizerBase, length: int, count: int, vocab_size: int | None = None
) -> list[Prompt]:
    """Return `count` prompts of `length` tokens, cut one after another from the texts of a suite: whole modules for the
    held-out suite, else its prompts."""
    texts: Iterator[Sequence[int]]
    if suite == HELD_OUT_SUITE:
        texts = (encode(text, tokenizer) for _, text in read_split(held_out=True))
    else:
        prompts = load_prompts(suite, tokenizer, max_prompt_tokens=sys.maxsize, vocab_size=vocab_size)
        texts = (prompt.ids for prompt in prompts)
    ids = tuple(islice(chain.from_iterable(texts), length * count))
    if len(ids) < length * count:
        raise UserError(
            f"{suite}: its texts have {len(ids)} tokens, {count} prompts of {length} need {length * count}; ask "
            "for fewer prompts, a shorter --context or another suite"
        )
    name = suite_name(suite)
    cuts = [ids[begin : begin + length] for begin in range(0, length * count, length)]
    return [
        Prompt(str(i), name, name, str(tokenizer.decode(list(cut), clean_up_tokenization_spaces=False)), cut)
        for i, cut in enumerate(cuts)
    ]


def split_prompts(text: str) -> list[str]:
    """Split a list of suites and files at its commas."""
    return [part.strip() for part in text.split(",")]


def expanded_prompts(text: str) -> str:
    """Return a list of suites and files whose paths have no `~` and no variables (`heads.core.files.expanded`)."""
    return ",".join(map(expanded, split_prompts(text)))


def absolute_prompts(text: str) -> str:
    """Return a list of suites and files that means the same in every working folder."""
    return ",".join(os.path.abspath(name) if is_local(name) else name for name in split_prompts(text))


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the prompts' token ids, or of the texts and tools of prompts without. Two results can be
    compared only if it is the same."""
    texts = ((prompt.text, prompt.tools) if prompt.tools else prompt.text for prompt in prompts)
    ids = json.dumps([prompt.ids or text for prompt, text in zip(prompts, texts, strict=True)], separators=(",", ":"))
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def answered(prompt: str, answer: Sequence[int] | str, tokenizer: PreTrainedTokenizerBase | None) -> Message:
    """Return what the target wrote after a prompt, as tokens or as a server's text, as the assistant's turn."""
    if isinstance(answer, str) or tokenizer is None:
        return {"role": "assistant", "content": answer}
    if tokenizer.chat_template is None:
        text = tokenizer.decode(list(answer), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return {"role": "assistant", "content": text}
    template = chat_template_of(tokenizer)
    return {key: template.without_special(text) for key, text in template.turn(prompt, answer).items()}


def follow_up(prompt: Prompt, answer: Sequence[int] | str, tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    """Return the prompt of the next turn: the conversation, the target's own answer, and the user's next turn."""
    assert prompt.later_turns, f"{prompt.id} has no further turn"
    question, *later = prompt.later_turns
    own = answered(prompt.text, answer, tokenizer)
    messages = [*prompt.messages, own, {"role": "user", "content": question}]
    text, ids = render(messages, tokenizer, arguments=prompt.arguments, tools=prompt.tools)
    turn = sum(message["role"] == "user" for message in messages)
    number = f"{prompt.id.split('#')[0]}#{turn}"
    return replace(prompt, id=number, text=text, ids=ids, messages=tuple(messages), later_turns=tuple(later))


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, max_tokens: int, seed: int, root: Path | None = None
) -> list[Prompt]:
    """Return `count` prompts of 64 to 128 tokens from held-out modules, each from the start of a random line.

    The line and the length depend only on the seed, the module's path and the number of the prompt from this module. If
    there are fewer modules than prompts, modules are used several times.
    """
    if count > MAX_HELD_OUT:
        raise UserError(f"{HELD_OUT_SUITE}: expected at most {MAX_HELD_OUT} prompts, got {count}")
    modules = list(read_split(held_out=True, root=root))
    prompts: list[Prompt] = []
    for visit in range(count):
        rngs = [np.random.default_rng([seed, visit, zlib.crc32(name.encode())]) for name, _ in modules]
        cuts = (cut_prompt(*module, tokenizer, max_tokens, rng) for module, rng in zip(modules, rngs, strict=True))
        fresh = list(islice(filter(None, cuts), count - len(prompts)))
        prompts += fresh
        if not fresh or len(prompts) == count:
            break
    if not prompts:
        raise UserError(f"{HELD_OUT_SUITE}: no module of the standard library gives a prompt; name a prompt file")
    return prompts


def cut_prompt(
    name: str, text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int, rng: np.random.Generator
) -> Prompt | None:
    """Return a prompt that starts at a random line of a module, or None if too little text follows."""
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines[: max(1, len(lines) * 3 // 4)]) if line.strip()]
    if not starts:
        return None
    start = int(rng.choice(starts))
    length = min(int(rng.integers(HELD_OUT_TOKENS[0], HELD_OUT_TOKENS[1] + 1)), max_tokens)
    ids = encode("".join(lines[start:])[:EXCERPT_CHARACTERS], tokenizer)
    if len(ids) < length + HELD_OUT_REST:
        return None
    ids = ids[:length]
    shown = str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return Prompt(f"{name}:{start + 1}", HELD_OUT_SUITE, HELD_OUT_SUITE, shown, ids)


def suite_records(suite_or_path: str) -> Iterator[Record]:
    if is_file(suite_or_path):
        return read_records(suite_or_path)
    if suite_or_path in HUB_SUITES:
        return read_hub(suite_or_path, **HUB_SUITES[suite_or_path])
    known = ", ".join([HELD_OUT_SUITE, *HUB_SUITES])
    raise UserError(f"{suite_or_path}: no such file, and no suite of that name; known suites: {known}")


def check_suites(names: str) -> None:
    """Raise UserError if one of several suites and files cannot be read, before hours are spent on the target."""
    suites = split_prompts(names) if names else []
    if not all(suites):
        raise UserError(f"--prompts {names!r}: expected suites or files, separated by commas")
    for suite in suites:
        if suite != HELD_OUT_SUITE:
            next(suite_records(suite), None)


def to_prompt(record: Record, suite: str, tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    """Return a record as a prompt: its first user turn, after its system message if it has one."""
    place, fields = record = with_lists(record)
    key = next((key for key in TEXT_KEYS if fields.get(key)), None)
    if key is None and (empty := next((key for key in TEXT_KEYS if key in fields), None)) is not None:
        raise UserError(f"{place}: {empty}: the prompt is empty; write some text, or remove the record")
    if key is None:
        keys = ", ".join(fields) or "an empty object"
        raise UserError(f"{place}: expected a prompt in one of {', '.join(TEXT_KEYS)}, got {keys}")
    system, turns = system_and_turns(record, key)
    if (number := next((n for n, turn in enumerate(turns, start=1) if not turn.strip()), None)) is not None:
        which = f"turn {number} of the user" if len(turns) > 1 else "the prompt"
        raise UserError(f"{place}: {key}: {which} is empty; write some text, or remove the record")
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise UserError(f"{place}: {key}: a placeholder of SPEED-Bench; fill it in with NVIDIA's prepare_data.py")
    messages = [*system, {"role": "user", "content": turns[0]}]
    arguments, tools = read_arguments(record), read_tools(record, messages)
    text, ids = render(messages, tokenizer, place, arguments, tools)
    if not ids and tokenizer is not None:
        raise UserError(f"{place}: {key}: the prompt has no tokens; write some text, or remove it")
    name = next((str(fields[key]) for key in ID_KEYS if key in fields), place.rsplit(":", 1)[1].strip())
    category = str(fields.get("category") or suite)
    return Prompt(name, suite, category, text, ids, tuple(messages), tuple(turns[1:]), arguments, tools)


def system_and_turns(record: Record, key: str) -> tuple[list[Message], list[str]]:
    """Return a record's system message, if any, and its user turns. A conversation with recorded answers yields only
    its first turn, because the answers are not the target's."""
    place, fields = record
    value = fields[key]
    if key == "turns" and isinstance(value, list) and all(isinstance(turn, dict) for turn in value):  # Arena-Hard
        value = [turn if not turn.keys().isdisjoint(ROLE) else turn.get("content") for turn in value]
    if key not in TURNS and isinstance(value, list) and not isinstance(value[0], dict):  # as MT-Bench has them
        if not all(isinstance(turn, str) and turn for turn in value):
            raise UserError(f"{place}: {key}: expected text or a list of texts, got {shown(value)}")
        return with_context(record, [])[0], value
    messages, _ = with_context(record, read_turns(record, key))
    turns = [message["content"] for message in messages if message["role"] == "user"]
    if not turns:
        raise UserError(f"{place}: {key}: expected a message of role user, got none")
    is_answered = any(message["role"] == "assistant" for message in messages)
    return [message for message in messages[:1] if message["role"] == "system"], turns[:1] if is_answered else turns


def render(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    place: str = "conversation",
    arguments: Mapping[str, object] | None = None,
    tools: object = None,
) -> tuple[str, tuple[int, ...]]:
    """Return the text and token ids of a conversation, ready for an answer. `arguments`: those of the chat template for
    this conversation; names that it does not read are passed over. Without a chat template, messages are joined with
    blank lines; without a tokenizer there are no ids. RecordError if the template leaves out a turn."""
    if tokenizer is None or tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages)
        return text, () if tokenizer is None else encode(text, tokenizer)
    template, _ = chat_template_of(tokenizer).with_arguments(arguments or {})
    text, ids = template.prompt(messages, place=place, tools=tools)
    return text, tuple(ids)


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token ids of plain text, with the tokenizer's special tokens before it but without EOS after it."""
    # No warning about its length, which is checked elsewhere.
    ids = without_second_bos(list(tokenizer(text, verbose=False)["input_ids"]), tokenizer)
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return tuple(ids)


def spread(items: Sequence[Item], count: int | None) -> Sequence[Item]:
    """Return at most `count` of the items, evenly spread, so that every category of an ordered suite is included."""
    if count is None or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def suite_name(suite_or_path: str) -> str:
    """Return the name of a suite: `gsm8k_test` for `data/gsm8k_test.jsonl.gz`. Names of public suites are unchanged."""
    return Path(suite_or_path).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
