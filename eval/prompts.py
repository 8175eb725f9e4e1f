"""Prompt suites: what a head is measured on.

`python-heldout` cuts prompts out of Python modules of this machine that no training run here sees (`eval.corpus`). The
public suites come from the Hub through `datasets`; every suite may also be a local JSON-lines file, gzipped or not,
whose records hold `turns`, `messages`, `prompt`, `question`, `instruction` or `text`. A conversation is rendered with
the tokenizer's chat template where it has one. A prompt is token ids from here on, and results carry a hash of them.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.corpus import read_split
from heads.errors import UserError

Message = dict[str, str]
Record = tuple[str, dict[str, Any]]  # where it stands ("file:line"), and what

HELD_OUT_SUITE = "python-heldout"
HUB_SUITES: dict[str, dict[str, Any]] = {
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
"""Public name -> the arguments of `datasets.load_dataset`."""

HELD_OUT_TOKENS = (64, 128)  # the least and most tokens of a prompt cut out of a module
HELD_OUT_REST = 64  # tokens of the module that must follow, so that there is something to continue
EXCERPT_CHARACTERS = 4_000
ID_KEYS = ("question_id", "prompt_id", "task_id", "id")
TEXT_KEYS = ("turns", "messages", "prompt", "question", "instruction", "text")


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to be decoded."""

    id: str
    suite: str
    category: str
    text: str
    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    """The conversation so far; empty for plain text."""
    later_turns: tuple[str, ...] = ()
    """What the user says next, once this prompt is answered (MT-Bench, Spec-Bench)."""


def load_prompts(
    suite_or_path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_prompts: int | None = None,
    max_prompt_tokens: int,
    seed: int = 0,
    skip_long: bool = False,
) -> list[Prompt]:
    """The prompts of one suite or JSON-lines file, at most `num_prompts`, spread evenly over the suite.

    A prompt of more than `max_prompt_tokens` is an error that says where it stands, or left out with `skip_long`.
    """
    if suite_or_path == HELD_OUT_SUITE:
        prompts = held_out_prompts(tokenizer, num_prompts or 64, max_prompt_tokens, seed)
    else:
        suite = suite_name(suite_or_path)
        records = spread(list(read_records(suite_or_path)), num_prompts)
        prompts = []
        for where, record in records:
            prompt = to_prompt(where, record, suite, tokenizer)
            if len(prompt.ids) <= max_prompt_tokens:
                prompts.append(prompt)
            elif not skip_long:
                raise UserError(
                    f"{where}: the prompt has {len(prompt.ids)} tokens where at most {max_prompt_tokens} fit; "
                    "leave long prompts out (--skip-long), or ask for fewer new tokens"
                )
    if not prompts:
        raise UserError(f"{suite_or_path}: no prompt of at most {max_prompt_tokens} tokens; nothing to measure")
    return prompts


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts' token ids: two results compare only where it is equal."""
    ids = json.dumps([prompt.ids for prompt in prompts], separators=(",", ":"))
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def follow_up(prompt: Prompt, answer: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt of the next turn: the conversation, the target's own answer, and what the user says then."""
    assert prompt.later_turns, f"{prompt.id} has no further turn"
    said, *later = prompt.later_turns
    messages = [*prompt.messages, {"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    text, ids = render(messages, tokenizer)
    turn = sum(message["role"] == "user" for message in messages)
    return Prompt(
        f"{prompt.id.split('#')[0]}#{turn}", prompt.suite, prompt.category, text, ids, tuple(messages), tuple(later)
    )


def held_out_prompts(tokenizer: PreTrainedTokenizerBase, count: int, max_tokens: int, seed: int) -> list[Prompt]:
    """64 to 128 tokens of each of `count` held-out modules, from the start of a random line.

    The line and the length follow from the seed and the module's path alone, so a package more or less on the machine
    changes no other module's prompt. Where there are fewer modules than prompts, each gives several.
    """
    modules = read_split(held_out=True)
    texts: list[tuple[str, str]] = []
    prompts: list[Prompt] = []
    for visit in range(count):
        before = len(prompts)
        for name, text in modules if visit == 0 else texts:
            if visit == 0:
                texts.append((name, text))
            rng = np.random.default_rng([seed, visit, zlib.crc32(name.encode())])
            prompt = cut_prompt(name, text, tokenizer, max_tokens, rng)
            if prompt is not None:
                prompts.append(prompt)
            if len(prompts) == count:
                return prompts
        if len(prompts) == before:
            break
    if not prompts:
        raise UserError(
            f"{HELD_OUT_SUITE}: no held-out Python module found on this machine; name a prompt file instead"
        )
    return prompts


def cut_prompt(
    name: str, text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int, rng: np.random.Generator
) -> Prompt | None:
    """A prompt from a random line of a module on; None where the module is too short."""
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
    shown = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    return Prompt(f"{name}:{start + 1}", HELD_OUT_SUITE, HELD_OUT_SUITE, shown, ids)


def read_records(suite_or_path: str) -> Iterator[Record]:
    """The records of a JSON-lines file, or of a public suite by name."""
    path = Path(suite_or_path)
    if path.is_file():
        yield from read_json_lines(path)
    elif suite_or_path in HUB_SUITES:
        yield from read_hub(suite_or_path)
    else:
        known = ", ".join([HELD_OUT_SUITE, *HUB_SUITES])
        raise UserError(f"{suite_or_path}: no such file, and no suite of that name; known suites: {known}")


def read_json_lines(path: Path) -> Iterator[Record]:
    """Each line's record with its file:line; blank lines are passed over."""
    found = False
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{where}: expected one JSON object a line: {error}") from error
                if not isinstance(record, dict):
                    raise UserError(f"{where}: expected a JSON object, got {type(record).__name__}")
                found = True
                yield where, record
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected JSON lines in UTF-8, gzipped if it ends in .gz: {error}") from error
    if not found:
        raise UserError(f"{path}: the file is empty; expected a JSON object a line with one of {', '.join(TEXT_KEYS)}")


def read_hub(suite: str) -> Iterator[Record]:
    """A public suite, fetched through `datasets`."""
    from datasets import load_dataset  # only a suite by name needs the network and a second of imports

    try:
        rows = load_dataset(**HUB_SUITES[suite])
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{suite}: could not be fetched ({reason}); without a network, name a local JSON-lines file instead"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{suite}:{number}", dict(row)


def to_prompt(where: str, record: dict[str, Any], suite: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """One record as a prompt: its first user turn, with a system message where the record has one."""
    key = next((key for key in TEXT_KEYS if record.get(key)), None)
    if key is None:
        raise UserError(
            f"{where}: expected one of {', '.join(TEXT_KEYS)}, got {', '.join(record) or 'an empty object'}"
        )
    value = record[key]
    system: list[Message] = []
    if key == "messages":
        system, turns = read_messages(where, value)
    else:
        turns = [value] if isinstance(value, str) else value
        if key == "instruction" and record.get("input"):
            turns = [f"{value}\n\n{record['input']}"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn for turn in turns):
        raise UserError(f"{where}: {key}: expected text or a list of texts, got {json.dumps(value)[:80]}")
    messages = [*system, {"role": "user", "content": turns[0]}]
    text, ids = render(messages, tokenizer)
    if not ids:
        raise UserError(f"{where}: {key}: the prompt has no tokens")
    name = next((str(record[k]) for k in ID_KEYS if k in record), where.rsplit(":", 1)[1])
    category = str(record.get("category") or suite)
    return Prompt(name, suite, category, text, ids, tuple(messages), tuple(turns[1:]))


def read_messages(where: str, messages: Any) -> tuple[list[Message], list[str]]:
    """A chat record's system message, if any, and first user turn; the recorded answers are not the target's."""
    try:
        said = [(message["role"], message["content"]) for message in messages]
    except (TypeError, KeyError) as error:
        raise UserError(f"{where}: messages: expected a list of objects with role and content") from error
    system = [{"role": role, "content": content} for role, content in said[:1] if role == "system"]
    turns = [content for role, content in said if role == "user"][:1]
    if not turns:
        raise UserError(f"{where}: messages: expected a message of role user, got {sorted({role for role, _ in said})}")
    return system, turns


def render(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[str, tuple[int, ...]]:
    """Text and ids of a conversation to be answered; without a chat template its texts, with blank lines between."""
    if tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages)
        return text, encode(text, tokenizer)
    text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    return text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids of plain text, with the special tokens the tokenizer puts before a text but not those it puts after."""
    ids = list(tokenizer(text)["input_ids"])
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return tuple(ids)


def spread(records: list[Record], count: int | None) -> list[Record]:
    """At most `count` records, evenly spread, so that every category of an ordered suite is met."""
    if count is None or count >= len(records):
        return records
    return [records[i * len(records) // count] for i in range(count)]


def suite_name(suite_or_path: str) -> str:
    """`data/gsm8k_test.jsonl.gz` -> `gsm8k_test`; a public name is its own."""
    return Path(suite_or_path).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
