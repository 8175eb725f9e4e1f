"""The target's own answers as training data: generated once, by our runtime or by a server, and kept for all heads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from eval.benchmark.progress import Progress
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.model import FrozenTarget
from train.data.answer_server import Client, answer_by_server
from train.data.answer_store import AnswerStore, prompt_key
from train.data.corpus import Corpus, Document, Tally, cache_root, entry_name, open_entry
from train.data.dialogues import Dialogue
from train.data.reader import Reader
from train.data.settings import Regenerate
from train.http_client import HTTPClient

Exchange = tuple[Sequence[int], Sequence[int]]
"""A prompt and its answer."""

MARGIN = 1.0
"""Largest accepted difference between the highest logit and the logit of a server's greedy token."""
BATCHES = 8
"""Batches per call of the engine. Rows that end early continue with the next prompt."""


@dataclass(frozen=True)
class Answering:
    """The target's answers to dialogues from the sources."""

    settings: Regenerate
    dialogues: Callable[[], Iterator[Dialogue]]
    """Iterates over all dialogues, from their beginning."""
    first_prompts: Sequence[str]
    """Entries of the token cache with the first prompts of all dialogues, in order."""
    target: FrozenTarget
    reader: Reader
    open_engine: Callable[..., Engine] = Engine

    @property
    def store_name(self) -> str:
        """The name of the folder for answers of this target with these sampling settings."""
        settings, target = self.settings, self.target
        key: dict[str, Any] = {"target": target.fingerprint, "dtype": str(target.dtype)}
        key |= {"new_tokens": settings.new_tokens, "temperature": settings.temperature}
        if settings.temperature > 0:
            key["seed"] = settings.seed
        if settings.server is not None:  # a server has its own kernels and dtype
            key["server"] = self._model
        return entry_name(key)

    @property
    def folder(self) -> Path:
        return cache_root() / "answers" / self.store_name

    @property
    def _model(self) -> str:
        server = self.settings.server
        return (server.model if server is not None else None) or self.target.name

    def request(self, prompt: list[int]) -> Request:
        """Return the request for the answer to a prompt. Its noise depends on the prompt."""
        settings = self.settings
        seed = (settings.seed + int.from_bytes(prompt_key(prompt)[:4])) % 2**31  # the range that servers accept
        return Request(prompt, settings.new_tokens, Sampling(temperature=settings.temperature, seed=seed))

    def corpus(self) -> Corpus:
        """Return the documents of all dialogues. Their labels are the answers. Called by every process."""
        trained = self.settings.train_on_prompts
        name = entry_name({"answers": self.store_name, "to": list(self.first_prompts), "train_on_prompts": trained})
        if self.reader.has(name):
            return open_entry(name)
        self.ask()

        def documents(tally: Tally) -> Iterable[Document]:
            for dialogue in self.answered():
                tally.records += 1
                if dialogue.cut is not None:
                    tally.skipped[dialogue.cut] = tally.skipped.get(dialogue.cut, 0) + 1
                yield from answer_documents(dialogue.exchanges, train_on_prompts=trained)

        return self.reader.write(name, documents)

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

        firsts = (document.ids.tolist() for entry in self.first_prompts for document in open_entry(entry))
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
                http = HTTPClient(server.url, self.reader.say)
                client = Client(http, self._model, target.vocab_size, target.eos_token_ids, self._fault_of)
                in_flight = max(1, server.in_flight // num_processes)
                answer_by_server(own, store, self.request, client, in_flight, finished)
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
        begun: list[Dialogue] = []

        def take(dialogue: Dialogue) -> bool:
            """Add the stored answers to a dialogue, and return True if it goes on."""
            before = dialogue.prompt
            dialogue.take(store.get)
            if dialogue.prompt is None and before is not None:
                finished(dialogue)
            return dialogue.prompt is not None

        while held := [*begun, *islice(dialogues, max(0, BATCHES * settings.batch_size - len(begun)))]:
            begun = [dialogue for dialogue in held if take(dialogue)]
            if begun:
                engine = engine or self.open_engine(target, None, options)
                self._generate(engine, begun, store, take)

    def _generate(
        self, engine: Engine, dialogues: Sequence[Dialogue], store: AnswerStore, take: Callable[[Dialogue], bool]
    ) -> None:
        """Generate the next answer of each dialogue. When it is complete, store it, and let the dialogue `take` it."""
        asking: dict[tuple[int, ...], list[Dialogue]] = {}
        for dialogue in dialogues:
            asking.setdefault(tuple(dialogue.prompt or ()), []).append(dialogue)
        prompts = [list(prompt) for prompt in asking]
        made: list[list[int]] = [[] for _ in prompts]

        def keep(number: int, fresh: list[int]) -> None:
            made[number] += fresh
            if len(made[number]) == self.settings.new_tokens or fresh[-1] in self.target.eos_token_ids:
                store.add(prompts[number], made[number])
                for dialogue in asking[tuple(prompts[number])]:
                    take(dialogue)

        engine.generate([self.request(prompt) for prompt in prompts], on_tokens=keep)

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


def answer_documents(exchanges: Iterable[Exchange], *, train_on_prompts: bool) -> list[Document]:
    """Return prompts and answers as documents. The labels are the answers' tokens. A prompt that begins with the whole
    document before it continues that document; another prompt begins a new one."""
    documents: list[Document] = []
    ids: list[int] = []
    labels: list[bool] = []
    for prompt, answer in exchanges:
        if list(prompt[: len(ids)]) != ids:
            documents.append(Document.of(ids, labels))
            ids, labels = [], []
        labels += [train_on_prompts] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids = [*prompt, *answer]
    return [*documents, Document.of(ids, labels)] if ids else documents
