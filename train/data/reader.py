"""Reading of sources, once per node by its first process. The other processes wait, then memory-map the result."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from eval.benchmark.progress import Progress
from heads.errors import UserError
from train.data.corpus import Corpus, Document, Tally, cache_root, entry_name, is_sound, open_entry, write_once
from train.data.sources import AnySource, Say
from train.data.templates import ChatTemplate, tokenizer_key
from train.interrupts import Interrupted

T = TypeVar("T")


@dataclass(frozen=True)
class Reader:
    """The reader of all sources of a run."""

    rendering: ChatTemplate
    accelerator: Accelerator
    say: Say

    def documents(self, source: AnySource) -> Corpus:
        """Return the documents of a source. Called by every process."""
        return open_entry(self._write(source, {}, lambda tally: source.documents(self.rendering, tally)))

    def prompts(self, source: AnySource, most: int, wanted: int | None, seed: int, *, recorded: bool = False) -> str:
        """Return the entry with the first prompts of at most `wanted` dialogues of a source (None: of all), as
        documents without labels. Each prompt has at most `most` tokens. Called by every process."""

        def read(tally: Tally) -> Iterable[Document]:
            for dialogue in source.dialogues(self.rendering, tally, most, wanted, seed, recorded=recorded):
                assert dialogue.prompt is not None
                yield Document.of(dialogue.prompt, np.zeros(len(dialogue.prompt)))

        return self._write(source, {"prompts" if recorded else "first prompts": [most, wanted, seed]}, read)

    def has(self, name: str) -> bool:
        """Return True if every node has the entry and it is intact. Called by every process."""
        return all(on_each_node(self.accelerator, lambda: is_sound(cache_root() / name)))

    def write(self, name: str, documents: Callable[[Tally], Iterable[Document]]) -> Corpus:
        """Write an entry on each node that lacks it, and return its documents. Called by every process."""
        on_each_node(self.accelerator, lambda: write_once(name, documents))
        return open_entry(name)

    def _write(
        self, source: AnySource, form: dict[str, list[int | None]], read: Callable[[Tally], Iterable[Document]]
    ) -> str:
        def write() -> str:
            key = {"tokenizer": tokenizer_key(self.rendering.tokenizer), **source.key(self.rendering), **form}
            name = entry_name(key)

            def begin(tally: Tally) -> Iterable[Document]:
                self.say(f"{source}: tokenised once, into {cache_root() / name}")
                return read(tally)

            with Progress(f"{source}: tokenising", announced=True):
                write_once(name, begin)
            return name

        names = on_each_node(self.accelerator, write)
        if len(set(names)) > 1:
            raise UserError(f"{source}: the machines of this launch read different data; give all of them the same")
        return names[0]


def on_each_node(accelerator: Accelerator, action: Callable[[], T]) -> list[T]:
    """Run `action` on the first process of each node, and return all results on every process. The first UserError or
    interruption is raised on all of them, so that none is left waiting."""
    results: list[T] = []
    faults: list[UserError | Interrupted] = []
    if accelerator.is_local_main_process:
        try:
            results = [action()]
        except (UserError, Interrupted) as error:
            faults = [error]
    if accelerator.num_processes > 1:
        results, faults = gather_object(results), gather_object(faults)
    if faults:
        raise faults[0]
    return results
