"""The target's own answers as training data: generated once, by our runtime or by a server, and kept for all heads."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from eval.measure.progress import Progress
from eval.measure.records import RecordError
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling_params import Sampling
from heads.core.errors import UserError
from heads.targets.model import FrozenTarget
from train.data.chats import Dialogue, join_texts
from train.data.corpus import (
    AnswerStore,
    Corpus,
    Document,
    Reader,
    Tally,
    cache_root,
    fingerprint,
    has_documents,
    prompt_key,
    stored_documents,
)
from train.data.packing import shares
from train.data.screen import screen
from train.data.server import AnsweringServer, ServerClient, answer_by_server
from train.data.settings import Answers, Data, Regenerate
from train.data.sources import AnySource, describe_skipped, left_out, texts_of, tokens_key

MARGIN = 1.0
"""Largest accepted difference between the highest logit and the logit of a server's greedy token."""
BATCHES = 8
"""Batches per call of the engine. Rows that end early continue with the next prompt."""


@dataclass(frozen=True)
class Prompts:
    """The first prompts of the dialogues that a source gives."""

    source: AnySource
    count: int | None
    """Number of dialogues to take from the source. None: all."""
    documents: Corpus
    """Each prompt as a document without labels."""


def find_prompts(
    data: Data, seed: int, settings: Answers, name: str, reader: Reader, *, recorded: bool = False, quiet: bool
) -> list[Prompts]:
    """Return the prompts of each source, in proportion to its weight, or all. `name`: the key of `settings` in the
    recipe. `recorded`: the prompts of last turns. `quiet`: the sources have been described already. UserError if the
    prompts are too few, or too long to train on."""
    if settings.prompts is not None and settings.prompts < len(data.sources):
        raise UserError(
            f"{name}.prompts: expected at least one for each of {len(data.sources)} sources, got {settings.prompts}"
        )
    wanted: list[int | None] = [None] * len(data.sources)
    if settings.prompts is not None:
        wanted = [*shares([source.weight or 1.0 for source in data.sources], settings.prompts)]
    found = [
        _read_prompts(source, settings.prompt_tokens, count, seed, reader, recorded)
        for source, count in zip(data.sources, wanted, strict=True)
    ]
    for number, prompts in enumerate(found):
        source, count, documents, tally = prompts.source, prompts.count, prompts.documents, prompts.documents.tally
        lines = [*source.unread(), *describe_skipped(source, tally, whole=count is None or len(documents) < count)]
        long = f"; {tally.too_long:,} begin with a prompt of more than {settings.prompt_tokens:,} tokens"
        left = f"{long} ({name}.prompt_tokens) and are left out" if tally.too_long else ""
        sizes = f"{len(documents):,} {texts_of(source)} to answer{left}"
        if not quiet:
            title = f"data.sources.{number}: {source}"
            reader.say(screen(title, f"{name}: {sizes}", documents, reader.rendering.tokenizer, *lines))
        elif count is None:
            reader.say(f"{name}: {source}: {sizes}")
        if len(documents) < (count or 1):
            mend = "raise prompt_tokens" if count is None else "lower prompts or raise prompt_tokens"
            raise UserError(
                f"{name}.prompts: {source} gives {len(documents)} prompts of at most {settings.prompt_tokens} tokens, "
                f"expected {count or 'at least 1'}; {mend}"
            )
        too_long = int(np.diff(documents.ends, prepend=0).max()) + settings.new_tokens
        if too_long > data.context_length:
            raise UserError(
                f"data.context_length: expected at least {too_long}, the longest prompt and answer of {name}, "
                f"got {data.context_length}"
            )
    return found


def _read_prompts(
    source: AnySource, most: int, count: int | None, seed: int, reader: Reader, recorded: bool
) -> Prompts:
    """Return the first prompts, of at most `most` tokens, of `count` dialogues of a source, or of all."""
    rendering = reader.rendering

    def documents() -> Iterator[Document]:
        for found in source.dialogues(rendering, most, count, seed, recorded=recorded):
            if isinstance(found, RecordError):
                yield left_out(found, str(source))
            else:
                assert found.prompt is not None
                yield Document.of(found.prompt, np.zeros(len(found.prompt)), **found.about)

    def read() -> Corpus:
        prompts = {"prompts" if recorded else "first prompts": [most, count, seed]}
        key = source.content() | tokens_key(source, rendering) | prompts
        return stored_documents(fingerprint(key), documents)

    return Prompts(source, count, reader.read(str(source), read))


def read_answering(data: Data, seed: int, target: FrozenTarget, reader: Reader, *, quiet: bool = False) -> "Answering":
    """Return the answering that `data.regenerate` describes, without generating any answer. `quiet`: the sources have
    been described already."""
    settings = data.regenerate
    assert settings is not None
    found = find_prompts(data, seed, settings, "data.regenerate", reader, quiet=quiet)
    return Answering(settings, found, seed, target, reader)


def describe_cut(tally: Tally) -> str:
    reasons = ", ".join(f"{count} before {why}" for why, count in sorted(tally.skipped.items()))
    return f"{sum(tally.skipped.values())} of {tally.records} conversations end early: {reasons}"


@dataclass(frozen=True)
class Answering:
    """The target's answers to dialogues from the sources."""

    settings: Regenerate
    prompts: Sequence[Prompts]
    """The first prompts of all dialogues, in order."""
    seed: int
    """Seed with which prompts are cut from texts."""
    target: FrozenTarget
    reader: Reader

    @property
    def store_name(self) -> str:
        """The name of the folder for answers of this target with these sampling settings."""
        settings, target = self.settings, self.target
        key: dict[str, Any] = {"target": target.fingerprint, "dtype": str(target.dtype)}
        key |= {"new_tokens": settings.new_tokens, "temperature": settings.temperature}
        key["ends"] = sorted(target.eos_token_ids)  # of files that a user may mend
        if settings.temperature > 0:
            key["seed"] = settings.seed
        if settings.server is not None:  # a server has its own kernels and dtype
            key["server"] = self._model
        return fingerprint(key)

    @property
    def folder(self) -> Path:
        return cache_root() / "answers" / self.store_name

    @property
    def _model(self) -> str:
        server = self.settings.server
        return (server.model if server is not None else None) or self.target.name

    def dialogues(self) -> Iterator[Dialogue]:
        rendering, most = self.reader.rendering, self.settings.prompt_tokens
        for prompts in self.prompts:
            found = prompts.source.dialogues(rendering, most, prompts.count, self.seed)
            yield from (dialogue for dialogue in found if isinstance(dialogue, Dialogue))

    def request(self, prompt: list[int]) -> Request:
        """Return the request for the answer to a prompt. Its noise depends on the prompt."""
        settings = self.settings
        seed = (settings.seed + int.from_bytes(prompt_key(prompt)[:4])) % 2**31  # the range that servers accept
        return Request(prompt, settings.new_tokens, Sampling(temperature=settings.temperature, seed=seed))

    def corpus(self) -> Corpus:
        """Return the documents of all dialogues. Their labels are the answers. Called by every process."""
        trained, to = self.settings.train_on_prompts, [prompts.documents.digest for prompts in self.prompts]
        name = fingerprint({"answers": self.store_name, "to": to, "train_on_prompts": trained})

        def documents() -> Iterator[Document]:
            for dialogue in self.answered():
                texts = ((len(prompt), [*prompt, *answer]) for prompt, answer in dialogue.exchanges)
                *before, last = join_texts(texts, train_on_prompts=trained)
                yield from (replace(document, ends_record=False) for document in before)
                yield replace(last, reason=dialogue.cut or "")

        if not all(gather_object([has_documents(name)])):
            self.ask()
        return self.reader.read("the answers", lambda: stored_documents(name, documents))

    def ask(self) -> None:
        """Generate all answers that are not stored yet. Called by every process; each generates its share."""
        accelerator = self.reader.accelerator
        process, num_processes = accelerator.process_index, accelerator.num_processes
        with AnswerStore(self.folder, self.reader.say, process) as store:
            accelerator.wait_for_everyone()
            store.read(num_processes)
            self.answer_share(store, process, num_processes)
        accelerator.wait_for_everyone()

    def answer_share(self, store: AnswerStore, process: int, num_processes: int) -> None:
        """Answer the dialogues of one process. Dialogues with the same first prompt belong to the same process."""

        def is_own(prompt: Sequence[int] | None) -> bool:
            return prompt is not None and int.from_bytes(prompt_key(prompt)[4:8]) % num_processes == process

        firsts = (document.ids.tolist() for prompts in self.prompts for document in prompts.documents)
        total, tokens = sum(map(is_own, firsts)), 0

        def finished(dialogue: Dialogue) -> None:
            nonlocal tokens
            tokens += sum(len(answer) for _, answer in dialogue.exchanges)
            progress.note = f"{tokens:,} tokens"
            progress.advance()

        own = (dialogue for dialogue in self.dialogues() if is_own(dialogue.prompt))
        server, target = self.settings.server, self.target
        with Progress("data.regenerate: answered dialogues", total) as progress:
            if server is None:
                self._answer_by_engine(own, store, finished)
            else:
                client, ends = ServerClient(server.url), target.eos_token_ids
                answering = AnsweringServer(client, self._model, target.vocab_size, ends, self._fault_of)
                in_flight = max(1, server.in_flight // num_processes)
                answer_by_server(own, store, self.request, answering, in_flight, finished)
        whose = " by the first process" if num_processes > 1 else ""
        self.reader.say(f"data.regenerate: {total} dialogues answered{whose}, {tokens:,} tokens")

    def answered(self) -> Iterator[Dialogue]:
        """Yield all dialogues with their stored answers. UserError if an answer is missing."""
        with AnswerStore(self.folder, self.reader.say) as store:
            store.read()
            for dialogue in self.dialogues():
                dialogue.take(store.get)
                if dialogue.prompt is not None:
                    raise UserError(
                        f"{store.folder}: an answer is gone that was there before; the same command makes it again"
                    )
                yield dialogue

    def _answer_by_engine(
        self, dialogues: Iterator[Dialogue], store: AnswerStore, finished: Callable[[Dialogue], None]
    ) -> None:
        settings, target = self.settings, self.target
        longest = min(settings.prompt_tokens + settings.new_tokens + 1, target.context_length)
        options = EngineOptions(batch_size=settings.batch_size, max_length=longest)
        engine: Engine | None = None
        held: list[Dialogue] = []

        def take(dialogue: Dialogue) -> None:
            dialogue.take(store.get)
            if dialogue.prompt is None:
                finished(dialogue)

        def keep(number: int, fresh: list[int]) -> None:
            """Store an answer when it is complete, and let the dialogues that ask for it go on."""
            made[number] += fresh
            if len(made[number]) == settings.new_tokens or fresh[-1] in target.eos_token_ids:
                store.add(prompts[number], made[number])
                for dialogue in asking[prompts[number]]:
                    take(dialogue)

        def begin() -> list[Dialogue]:
            """Return the dialogues that wait for an answer: those held, filled up with new ones."""
            waiting = [dialogue for dialogue in held if dialogue.prompt is not None]
            while len(waiting) < BATCHES * settings.batch_size and (dialogue := next(dialogues, None)) is not None:
                take(dialogue)
                if dialogue.prompt is not None:
                    waiting.append(dialogue)
            return waiting

        while held := begin():
            asking: dict[tuple[int, ...], list[Dialogue]] = {}
            for dialogue in held:
                asking.setdefault(tuple(dialogue.prompt or ()), []).append(dialogue)
            prompts = list(asking)
            made: list[list[int]] = [[] for _ in prompts]
            engine = engine or Engine(target, None, options)
            engine.generate([self.request(list(prompt)) for prompt in prompts], on_tokens=keep)

    def _fault_of(self, prompt: Sequence[int], answer: Sequence[int]) -> str | None:
        """Return what is wrong with a server's greedy answer: a token whose logit is far below the target's highest.
        None if there is no such token, or if the target is not whole in this process."""
        if self.target.placement != "whole":
            return None
        tokens = torch.tensor([[*prompt, *answer]], device=self.target.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        features = self.target.packed_features(tokens, positions, torch.zeros_like(tokens), ())
        logits = self.target.shared.lm_head(features.hidden[:, len(prompt) - 1 : -1])[0].float()
        behind = logits.amax(dim=-1) - logits[torch.arange(len(answer)), tokens[0, len(prompt) :]]
        worst = int(behind.argmax())
        if float(behind[worst]) <= MARGIN:
            return None
        return (
            f"expected the target's greedy answer, got token {answer[worst]} at place {worst}, whose logit is "
            f"{float(behind[worst]):.1f} below that of {int(logits[worst].argmax())}; serve the same weights as "
            "target.path, in the same precision"
        )
