"""A comparison of this runtime with an engine: its first question, about the head's folder and the prompts' ids, and
its record and page. The others are in `parity_ladder`, engines in `parity_engines`."""

import argparse
import asyncio
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from eval.data.prompts import Prompt, load_prompts, split_prompts
from eval.measure.machine import machine
from eval.measure.open_models import fitting_head, open_target_of
from eval.records.measure_settings import BenchSettings
from eval.records.results import write_record
from eval.runtime.near_ties import first_difference
from eval.servers.parity_counts import counts_of, same_text
from eval.servers.parity_engines import asked
from eval.servers.parity_ladder import Ladder, climb
from heads.core.contract import Drafter
from heads.core.engines import READERS
from heads.core.errors import UserError
from heads.core.files import write_text
from heads.published import is_published
from heads.registry import kind_of
from heads.saved import check_loaders, find_head, read_config, trained_depth

DEPTH = 5
"""Draft tokens in a round, where neither the command, the server nor the training says."""


class Compared(BaseModel):
    """One prompt, here and in the engine."""

    prompt: str
    texts_equal: bool
    first_difference: int | None
    here: dict[str, object]
    engine: dict[str, object]


class ParityRecord(BaseModel):
    measured_at: str
    versions: dict[str, str]
    device: dict[str, object]
    command: list[str]
    engine: str
    facts: dict[str, str]
    head: str
    kind: str
    target: str
    depth: int
    settings: dict[str, object]
    requests: list[Compared]
    lines: list[str]
    """What each step of the ladder found."""
    equal: bool
    answer: str


def compare(options: argparse.Namespace, settings: BenchSettings, command: list[str]) -> ParityRecord:
    """Compare a head here and in an engine. `command`: of the record."""
    target, tokenizer = open_target_of(options.head, options)
    head = fitting_head(options.head, target)
    folder = None if is_published(options.head) else find_head(options.head)
    trained = trained_depth(read_config(folder)) if folder else None
    depth = int(options.tree.removeprefix("chain:")) if options.tree else min(trained or DEPTH, DEPTH)
    misread, lines = check_folder(options, folder, head)
    room = target.context_length - settings.max_new_tokens - depth - 2
    limits: dict[str, Any] = {
        "num_prompts": settings.num_prompts,
        "max_prompt_tokens": min(settings.max_prompt_tokens or room, room),
        "seed": settings.seed,
        "skip_long": True,
        "vocab_size": target.vocab_size,
    }
    suites = split_prompts(settings.prompts)
    prompts = [prompt for suite in suites for prompt in load_prompts(suite, tokenizer, **limits)]
    if not prompts:
        raise UserError(f"--prompts {settings.prompts}: none has at most {settings.max_prompt_tokens} tokens")
    with (
        asyncio.Runner() as runner,
        asked(options, settings, target, head, depth, prompts, runner.run) as engine,
    ):
        if engine.depth and not options.tree:
            depth = engine.depth
        ids = [prompt.ids for prompt in prompts]
        other = other_ids(prompts, engine.ids_of, tokenizer.bos_token_id) if engine.ids_of else None
        if engine.ids_of:
            lines.append(f"template: {other or 'the server makes the same ids of the prompts'}")
        ladder = Ladder(target, head, depth, options.engine, ids, settings.max_new_tokens, engine, lines=lines)
        own, answer = climb(ladder, other)
    if misread and ladder.is_equal(own):
        answer += f"; it makes no difference on these prompts that {misread[0]}"
    requests = []
    for prompt, text, count, theirs in zip(prompts, own.texts, own.counts, engine.answers, strict=True):
        same = same_text(text, theirs)
        place = None if same else first_difference(text, theirs.tokens)
        here, there = counts_of(count), counts_of(theirs)
        requests.append(Compared(prompt=prompt.id, texts_equal=same, first_difference=place, here=here, engine=there))
    return ParityRecord(
        **machine(target.device),
        command=command,
        engine=engine.engine,
        facts=engine.facts,
        head=options.head,
        kind=kind_of(head),
        target=target.name,
        depth=depth,
        settings=settings.model_dump(include={"prompts", "num_prompts", "max_prompt_tokens", "max_new_tokens", "seed"}),
        requests=requests,
        lines=ladder.lines,
        equal=ladder.is_equal(own) and answer.startswith("the head"),
        answer=answer,
    )


def check_folder(options: argparse.Namespace, folder: Path | None, head: Drafter) -> tuple[list[str], list[str]]:
    """Return what the engine's reader misreads of a head's folder, and lines that say what it makes of it. UserError if
    it takes no such head."""
    if folder is None:
        return [], [f"folder: {line}" for line in (head.origin.differs if head.origin else ())]
    verdict = next(v for v in check_loaders(folder) if v.reader == READERS[options.engine])
    if verdict.unsupported and not (options.server or options.engine_head):
        raise UserError(f"{options.head}: {verdict.reader} {verdict.unsupported}")
    said = [verdict.unsupported] if verdict.unsupported else list(verdict.errors)
    lines = [f"folder: {verdict.reader}: {line}" for line in said] or [f"folder: {verdict.reader} reads it whole"]
    return list(verdict.errors), lines


def other_ids(prompts: Sequence[Prompt], ids_of: Callable[[Prompt], list[int]], bos: int | None) -> str | None:
    """Return how the ids that a server makes of the prompts differ from those here, or None. Of plain text only the
    first tokens are compared: held-out prompts are cut from longer texts."""
    found = []
    for prompt in prompts:
        ids = ids_of(prompt)
        ours = list(prompt.ids)
        number = leading(ids, bos)
        here = leading(ours, bos)
        if number != here:
            second = "a second BOS: " if number > here > 0 else ""
            found.append((prompt.id, f"{second}{number} BOS at their start, {here} here"))
        elif prompt.messages and ids != ours:
            place = first_difference(ours, ids)
            found.append((prompt.id, f"others from position {place} on, {len(ids)} for {len(ours)}"))
    if not found:
        return None
    name, what = found[0]
    return f"the server makes other ids of {len(found)} of {len(prompts)} prompts: {what} ({name})"


def leading(ids: Sequence[int], token: int | None) -> int:
    """Return how many times a list begins with a token."""
    return next((n for n, each in enumerate(ids) if each != token), len(ids))


def write_parity(record: ParityRecord, out: Path) -> None:
    """Write the record and its page."""
    write_record(record.model_dump(), out / "parity.json")
    rows = ["| prompt | text | here | engine |", "|---|---|---|---|"]
    for request in record.requests:
        same = "equal" if request.texts_equal else f"differs at {request.first_difference}"
        cells = [
            ", ".join(f"{name} {value}" for name, value in part.items()) for part in (request.here, request.engine)
        ]
        rows.append(f"| {request.prompt} | {same} | {cells[0]} | {cells[1]} |")
    facts = "".join(f", {name} {value}" for name, value in record.facts.items() if value)
    text = [
        f"# {record.kind} here and in {record.engine}",
        f"**{record.answer}**",
        f"Head {record.head}, target {record.target}, chain:{record.depth}, greedy{facts}; {record.measured_at[:10]}.",
        "\n".join(f"* {line}" for line in record.lines),
        "\n".join(rows),
        f"```bash\n{shlex.join(record.command)}\n```",
    ]
    write_text(out / "parity.md", "\n\n".join(text) + "\n")
