"""The target's own answers as training data, made by the runtime and kept in a file for resumed runs."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from eval.files import write_text
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from train.data.packing import Document
from train.strict_yaml import Count, Seed, Settings, Share, Temperature

Progress = Callable[[int, int, int], None]
"""(answers so far, answers wanted, tokens so far)."""


class Answers(Settings):
    """Prompts from the sources, and how the runtime has them answered."""

    prompts: Annotated[int, Field(ge=1, le=10**8)]
    """Number of prompts to take from the sources. The sources must hold as many."""
    prompt_tokens: Count = 512
    """Most tokens of a prompt. Prompts cut from text are shortened to it; longer conversations are left out."""
    new_tokens: Count = 256
    """Most tokens of an answer."""
    batch_size: Count = 8
    """Prompts answered together."""
    seed: Seed = 0
    """Seed of the sampling."""
    train_on_prompts: bool = False
    """Take the tokens of the prompts as labels too."""


class Regenerate(Answers):
    """Train on the target's own answers to prompts from the sources: a draft head has to predict the target's text."""

    temperature: Temperature = 0.0
    """Sampling temperature of the answers; 0 is greedy."""
    share: Share = 1.0
    """Share of the training rows that are answers. The rest are the sources as they are."""


def make_answers(
    target: FrozenTarget,
    prompts: Sequence[list[int]],
    settings: Regenerate,
    folder: Path,
    *,
    process: int = 0,
    num_processes: int = 1,
    wait: Callable[[], None] = lambda: None,
    progress: Progress = lambda done, total, tokens: None,
    open_engine: Callable[..., Engine] = Engine,
) -> list[list[int]]:
    """The target's answer to each prompt. Every process answers its share; all of them return all the answers.

    Finished answers are appended to a part file, a line each, and taken up again after an interruption.
    """
    key = answers_key(target, prompts, settings)
    whole = folder / f"answers-{key}.jsonl"
    if not whole.is_file():
        parts = [folder / f"answers-{key}.{n}-of-{num_processes}.part" for n in range(num_processes)]
        share = prompts[process::num_processes]
        seeds = range(settings.seed + process, settings.seed + len(prompts), num_processes)
        if (done := _repair_part(parts[process])) < len(share):
            longest = max(map(len, share)) + settings.new_tokens + 1
            engine = open_engine(target, None, EngineOptions(batch_size=settings.batch_size, max_length=longest))
            _answer_share(engine, share, seeds, settings, parts[process], done, progress)
        wait()
        if process == 0:
            shares = [read_answers(part) for part in parts]
            write_answers(whole, [shares[n % num_processes][n // num_processes] for n in range(len(prompts))])
            for part in parts:
                part.unlink()
        wait()
    answers = read_answers(whole)
    if len(answers) != len(prompts):
        raise UserError(
            f"{whole}: expected {len(prompts)} answers, found {len(answers)}; delete the file to make them again"
        )
    return answers


def answer_documents(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], *, train_on_prompts: bool
) -> list[Document]:
    """Prompt and answer side by side; the answer's tokens are the labels."""
    documents = []
    for prompt, answer in zip(prompts, answers, strict=True):
        labels = np.ones(len(prompt) + len(answer), dtype=np.bool_)
        labels[: len(prompt)] = train_on_prompts
        documents.append(Document(np.array([*prompt, *answer], dtype=np.int32), labels))
    return documents


def answers_key(target: FrozenTarget, prompts: Sequence[list[int]], settings: Regenerate) -> str:
    """A hash of all that the answers depend on: the target, the prompts and the sampling, but not the batch size."""
    drawn: dict[str, Any] = {"new_tokens": settings.new_tokens, "temperature": settings.temperature}
    if settings.temperature > 0:
        drawn["seed"] = settings.seed
    text = json.dumps([target.fingerprint, str(target.dtype), drawn, list(prompts)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _answer_share(
    engine: Engine,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    settings: Regenerate,
    part: Path,
    done: int,
    progress: Progress,
) -> None:
    """Append the answers to the prompts after the first `done`, a few batches at a time."""
    chunk, tokens = 8 * settings.batch_size, 0
    with part.open("a", encoding="utf-8") as file:
        for start in range(done, len(prompts), chunk):
            end = min(start + chunk, len(prompts))
            requests = [
                Request(prompts[n], settings.new_tokens, Sampling(temperature=settings.temperature, seed=seeds[n]))
                for n in range(start, end)
            ]
            for output in engine.generate(requests):
                file.write(json.dumps(output.tokens) + "\n")
                tokens += len(output.tokens)
            file.flush()
            progress(end, len(prompts), tokens)


def _repair_part(part: Path) -> int:
    """Drop a last line cut short by a crash; returns how many answers are whole."""
    if not part.is_file():
        return 0
    data = part.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        part.write_bytes(whole)
    return whole.count(b"\n")


def read_answers(path: Path) -> list[list[int]]:
    """Token ids, a list a line. UserError for a line that is none."""

    def parse() -> Iterator[list[int]]:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield [int(token) for token in json.loads(line)]
                except (ValueError, TypeError):
                    raise UserError(
                        f"{path}:{number}: expected a list of token ids; delete the file to make the answers again"
                    ) from None

    return list(parse())


def write_answers(path: Path, answers: Sequence[list[int]]) -> None:
    """Write a file that `read_answers` reads, whole or not at all."""
    write_text(path, "".join(json.dumps(answer) + "\n" for answer in answers))
