"""The target's own answers as training data: generated once, by our runtime or by a server, and kept for all heads.

Each process of a launch appends to its own file of JSON lines, one conversation a line, as soon as it is answered. A
line is a record that a source of kind chat (or text) reads, with the token ids of its prompts and answers:

    {"messages": [...], "number": 3, "exchanges": [[prompt ids, answer ids], ...], "cut": null}

The name of the folder is a hash of everything on which the answers depend. Its `made_of.json` holds that in plain
values, so that a run that answers again can say what changed.
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate.utils import gather_object

from eval.core.progress import Progress
from eval.data.data_files import RecordError
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling_params import Sampling
from eval.servers.openai_client import ServerClient
from heads.core.errors import UserError
from heads.core.files import lock, write_json
from heads.targets.frozen_target import FrozenTarget
from heads.targets.identity import changes
from train.data.answering_server import AnsweringServer, answer_by_server, serving
from train.data.chats import join_texts
from train.data.corpus import (
    HELD_OUT,
    Corpus,
    Document,
    Reader,
    Tally,
    cache_errors,
    cache_root,
    fingerprint,
    has_documents,
    load_documents,
)
from train.data.data_settings import Answers, Data, Regenerate
from train.data.dialogues import Dialogue, read_asked
from train.data.packing import shares
from train.data.sources import AnySource, ChatSource, skipped_document
from train.data.tokenise import describe_skipped, describe_source, describe_template, texts_of, tokens_key

BATCHES = 64
"""Batches per call of the engine, which keeps its outputs in memory. Only at the end of a call are rows empty."""


class Prompts(NamedTuple):
    """The first prompts of the dialogues that a source gives."""

    source: AnySource
    wanted: int | None
    """Number of dialogues to take from the source. None: all."""
    fingerprint: str
    """A hash of everything on which the dialogues' prompts depend, the answers apart."""
    corpus: Corpus
    """Each prompt as a document without labels."""


def read_prompts(
    data: Data, seed: int, settings: Answers, name: str, reader: Reader, *, recorded: bool = False, quiet: bool
) -> list[Prompts]:
    """Return the prompts of each source, in proportion to its weight, or all. `name`: the key of `settings` in the
    recipe. `recorded`: the prompts of last turns. `quiet`: the sources have been described already. UserError if the
    prompts are too few, or too long to train on."""
    counts: list[int | None] = [None] * len(data.sources)
    if settings.prompts is not None:
        if settings.prompts < len(data.sources):
            raise UserError(f"{name}.prompts: expected at least one for each source, got {settings.prompts}")
        counts = [*shares([source.weight or 1.0 for source in data.sources], settings.prompts)]
    max_tokens = settings.prompt_tokens
    prompts = [
        _read_prompts(source, count, max_tokens, seed, reader, recorded)
        for source, count in zip(data.sources, counts, strict=True)
    ]
    for number, (source, count, _, corpus) in enumerate(prompts):
        lines = [*source.unread(), *describe_skipped(source, corpus.tally)]
        lines += describe_template(source, reader.rendering)
        sizes = f"{len(corpus):,} {texts_of(source)} to answer"
        if corpus.tally.too_long:
            sizes += f"; {corpus.tally.too_long:,} begin with a prompt of more than {max_tokens:,} tokens"
            sizes += f" ({name}.prompt_tokens) and are skipped"
        if not quiet:
            title = f"data.sources.{number}: {source}"
            reader.say(describe_source(title, f"{name}: {sizes}", corpus, reader.rendering.tokenizer, *lines))
        elif count is None:
            reader.say(f"{name}: {source}: {sizes}")
        if len(corpus) < (count or 1):
            remedy = "raise prompt_tokens" if count is None else "lower prompts or raise prompt_tokens"
            raise UserError(
                f"{name}.prompts: {source} gives {len(corpus)} prompts of at most {max_tokens} tokens, "
                f"expected {count or 'at least 1'}; {remedy}"
            )
        longest = int(np.diff(corpus.ends, prepend=0).max()) + settings.new_tokens
        if longest > data.context_length:
            raise UserError(
                f"data.context_length: expected at least {longest}, the longest prompt and answer of {name}, "
                f"got {data.context_length}"
            )
    return prompts


def _read_prompts(
    source: AnySource, count: int | None, max_tokens: int, seed: int, reader: Reader, recorded: bool
) -> Prompts:
    rendering = reader.rendering
    kind = "prompts" if recorded else "first prompts"
    drawn = None if source.kind == "chat" else seed  # prompts are cut from texts at random
    key = fingerprint(source.content() | tokens_key(source, rendering) | {kind: [max_tokens, count, drawn]})

    def documents() -> Iterator[list[Document]]:
        num_read = 0
        for dialogue in source.dialogues(rendering, max_tokens, count, seed, recorded=recorded):
            if isinstance(dialogue, RecordError):
                yield [skipped_document(dialogue, str(source))]
            else:
                assert dialogue.prompt is not None
                yield [Document.of(dialogue.prompt, np.zeros(len(dialogue.prompt)), **dialogue.about)]
            num_read += 1
        if isinstance(source, ChatSource):  # faults are counted in all records
            for record in islice(source.records(), num_read, None):
                try:
                    if source.holds_out(record):
                        raise RecordError("", HELD_OUT)
                    read_asked(record)
                    yield [Document.of([], [])]
                except RecordError as error:
                    yield [skipped_document(error, str(source))]

    return Prompts(source, count, key, reader.read(str(source), lambda: load_documents(key, documents)))


def open_answers(
    data: Data, seed: int, target: FrozenTarget, reader: Reader, *, quiet: bool = False
) -> "TargetAnswers":
    """Return the answers that `data.regenerate` describes, without generating any. `quiet`: the sources have been
    described already."""
    assert data.regenerate is not None
    prompts = read_prompts(data, seed, data.regenerate, "data.regenerate", reader, quiet=quiet)
    return TargetAnswers(data.regenerate, prompts, seed, target, reader)


def describe_cut(tally: Tally) -> str:
    reasons = ", ".join(f"{count} before {why}" for why, count in sorted(tally.skipped.items()))
    return f"{tally.num_skipped} of {tally.records} conversations end early: {reasons}"


@dataclass(frozen=True)
class TargetAnswers:
    """The target's answers to dialogues from the sources."""

    settings: Regenerate
    prompts: Sequence[Prompts]
    """The first prompts of all dialogues, in order."""
    seed: int
    """Seed with which prompts are cut from texts."""
    target: FrozenTarget
    reader: Reader

    @cached_property
    def made_of(self) -> dict[str, object]:
        """Everything on which the answers depend, besides the target, as plain values."""
        settings, target = self.settings, self.target
        key: dict[str, object] = {"dtype": str(target.dtype)}
        key |= {"new_tokens": settings.new_tokens, "temperature": settings.temperature}
        key["ends"] = sorted(target.eos_token_ids)  # of files that a user may edit
        if settings.temperature > 0:
            key["seed"] = settings.seed
        if settings.server is not None:  # a server has its own kernels and dtype
            key["server"] = settings.server.model or target.name
        key["prompts"] = [prompts.fingerprint for prompts in self.prompts]
        return key

    @cached_property
    def folder(self) -> Path:
        """The folder of the answers to these prompts by this target with these sampling settings."""
        target = {"target": self.target.fingerprint, "settings": self.target.settings}
        return cache_root() / "answers" / fingerprint(self.made_of | target)

    def changed_since(self, record: dict[str, Any]) -> list[str]:
        """Return what differs from the answers of a `made_of.json`, each in a few words."""
        found = changes(record["target"], self.target.identity)
        for name in sorted(record["made_of"].keys() | self.made_of.keys()):
            before, after = record["made_of"].get(name), self.made_of.get(name)
            if before != after:
                found.append(f"other {name}" if isinstance(after, list) else f"{name} was {before}, is {after}")
        return found

    def describe_change(self) -> None:
        """Say why the most similar answers to records of the same sources, if there are any, are not these; note what
        these are made of."""
        file = self.folder / "made_of.json"
        if file.is_file():
            return
        sources = fingerprint({"sources": [prompts.source.content() for prompts in self.prompts]})
        now = {"sources": sources, "target": self.target.identity, "made_of": self.made_of}
        records = (json.loads(path.read_bytes()) for path in self.folder.parent.glob(f"*/{file.name}"))
        found = [self.changed_since(record) for record in records if record["sources"] == sources]
        if found:
            nearest = min(found, key=len)
            self.reader.say(f"data.regenerate: earlier answers are not used: {'; '.join(nearest)}")
        write_json(file, now)

    @property
    def count(self) -> int:
        """Number of dialogues."""
        return sum(len(prompts.corpus) for prompts in self.prompts)

    def dialogues(self) -> Iterator[Dialogue]:
        rendering, max_tokens = self.reader.rendering, self.settings.prompt_tokens
        for prompts in self.prompts:
            for dialogue in prompts.source.dialogues(rendering, max_tokens, prompts.wanted, self.seed):
                if isinstance(dialogue, Dialogue):
                    yield dialogue

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer, and one."""
        return min(self.settings.prompt_tokens + self.settings.new_tokens + 1, self.target.context_length)

    def request(self, prompt: list[int]) -> Request:
        """Return the request for the answer to a prompt. Its noise depends on the prompt."""
        settings = self.settings
        digest = hashlib.sha256(np.array(prompt, dtype="<i4").tobytes()).digest()
        seed = (settings.seed + int.from_bytes(digest[:4])) % 2**31  # the range that servers accept
        return Request(prompt, settings.new_tokens, Sampling(temperature=settings.temperature, seed=seed))

    def corpus(self) -> Corpus:
        """Return the documents of all conversations. Their labels are the answers. Called by every process."""
        trained = self.settings.train_on_prompts
        name = fingerprint({"answers": self.folder.name, "train_on_prompts": trained})

        def documents() -> Iterator[list[Document]]:
            for line in self.lines():
                record = json.loads(line)
                texts = ((len(prompt), [*prompt, *answer]) for prompt, answer in record["exchanges"])
                *before, last = join_texts(texts, train_on_prompts=trained)
                yield [*before, replace(last, reason=record["cut"] or "")]

        if not all(gather_object([has_documents(name)])):
            self.generate()
        return self.reader.read("the answers", lambda: load_documents(name, documents))

    def generate(self) -> None:
        """Generate all answers that are not in the files yet. Called by every process; each generates its share."""
        accelerator = self.reader.accelerator
        process, num_processes = accelerator.process_index, accelerator.num_processes
        paths = [self.folder / f"{number}.jsonl" for number in range(num_processes)]
        with cache_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = paths[process].open("ab+")
        with file:
            if lock(file.fileno()) is False:
                raise UserError(
                    f"{self.folder}: another run generates these answers; begin again when it has finished, and they "
                    "are this run's too"
                )
            with cache_errors(self.folder):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # without what a killed process wrote of its last line
            accelerator.wait_for_everyone()
            if not all(path.is_file() for path in paths):
                raise UserError(
                    f"{self.folder}: the machines of this launch do not share it; name a folder that they share "
                    "with DRAFTSMITH_DATA_CACHE"
                )
            if process == 0:
                self.describe_change()
            missing = set(range(process, self.count, num_processes)).difference(n for n, _ in self.stored_lines())
            self.generate_missing(missing, paths[process])
        accelerator.wait_for_everyone()

    def generate_missing(self, missing: Collection[int], path: Path) -> None:
        """Generate the answers to the conversations with these numbers, and append each to a file when complete."""
        num_tokens = 0
        begin = end = time.perf_counter()
        server, target = self.settings.server, self.target
        dialogues = ((number, dialogue) for number, dialogue in enumerate(self.dialogues()) if number in missing)
        with Progress("data.regenerate: answered conversations", len(missing)) as progress:

            def count(tokens: int) -> None:
                nonlocal num_tokens, end
                num_tokens += tokens
                end = time.perf_counter()
                progress.tell(f"{num_tokens:,} tokens")

            def write(number: int, dialogue: Dialogue) -> None:
                more = {"number": number, "exchanges": dialogue.exchanges, "cut": dialogue.cut}
                line = json.dumps(dialogue.record() | more, default=str).encode() + b"\n"
                with cache_errors(self.folder), path.open("ab") as file:
                    file.write(line)
                progress.advance()

            if server is None:
                self.answer_by_engine(dialogues, write, count)
            else:
                in_flight = max(1, server.in_flight // self.reader.accelerator.num_processes)
                name = server.model or target.name
                with serving(server, target, in_flight, self.longest) as url:
                    begin = time.perf_counter()  # without the start of an engine
                    answering = AnsweringServer(ServerClient(url), name, target, in_flight)
                    answer_by_server(dialogues, self.request, answering, in_flight, write, count)
        whose = " by the first process" if self.reader.accelerator.num_processes > 1 else ""
        rate = f", {num_tokens / (end - begin):,.0f} tokens/s" if num_tokens else ""
        self.reader.say(f"data.regenerate: {len(missing)} conversations answered{whose}, {num_tokens:,} tokens{rate}")

    def stored_lines(self) -> Iterator[tuple[int, tuple[Path, int]]]:
        """Yield the number of each stored conversation, with its file and the place of its line in it."""
        for path in sorted(self.folder.glob("*.jsonl")):
            place = 0
            with path.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):  # else it is being written, or its process was killed
                        with suppress(ValueError, LookupError, TypeError):  # a damaged line is answered again
                            yield json.loads(line)["number"], (path, place)
                    place += len(line)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of all conversations, in order; they may need more memory than there is. UserError if one is
        missing."""
        places = dict(self.stored_lines())
        if missing := self.count - len(places):
            raise UserError(f"{self.folder}: lacks {missing} of {self.count} answers; the same command generates them")
        with ExitStack() as opened:
            files = {path: opened.enter_context(path.open("rb")) for path, _ in places.values()}
            for number in range(self.count):
                path, place = places[number]
                files[path].seek(place)
                yield files[path].readline()

    def answer_by_engine(
        self,
        dialogues: Iterator[tuple[int, Dialogue]],
        write: Callable[[int, Dialogue], None],
        count: Callable[[int], None],
    ) -> None:
        """Answer the numbered dialogues. `write` is called with each that ends, and `count` with numbers of tokens."""
        settings, target, engine = self.settings, self.target, None
        options = EngineOptions(batch_size=settings.batch_size, max_length=self.longest)
        asked: list[tuple[int, Dialogue]] = []
        answers: list[list[int]] = []
        answered: deque[tuple[int, Dialogue]] = deque()  # dialogues with a further prompt

        def requests() -> Iterator[Request]:
            while (pair := answered.popleft() if answered else next(dialogues, None)) is not None:
                asked.append(pair)
                answers.append([])
                assert pair[1].prompt is not None
                yield self.request(pair[1].prompt)

        def keep(index: int, fresh: list[int]) -> None:
            answers[index] += fresh
            count(len(fresh))
            if len(answers[index]) == settings.new_tokens or fresh[-1] in target.eos_token_ids:
                number, dialogue = asked[index]
                dialogue.answer(answers[index])
                if dialogue.prompt is None:
                    write(number, dialogue)
                else:
                    answered.append(asked[index])

        while (first := next(requests(), None)) is not None:
            engine = engine or Engine(target, None, options)
            engine.generate(chain([first], islice(requests(), BATCHES * settings.batch_size)), on_tokens=keep)
            asked.clear()
            answers.clear()
