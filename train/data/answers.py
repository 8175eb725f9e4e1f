"""The target's own answers as training data, made by the runtime and kept in a file for resumed runs."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.files import write_text
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from train.data.packing import Document
from train.recipe import Regenerate

Progress = Callable[[int, int, int], None]
"""(answers so far, answers wanted, tokens so far)."""


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
) -> list[list[int]]:
    """The target's answer to each prompt. Every process answers its share; all of them return all the answers.

    Finished answers are appended to a part file, a line each, and taken up again after an interruption.
    """
    key = answers_key(target, prompts, settings)
    whole = folder / f"answers-{key}.jsonl"
    if not whole.is_file():
        parts = [folder / f"answers-{key}.{n}-of-{num_processes}.part" for n in range(num_processes)]
        _answer_share(
            target, prompts[process::num_processes], settings, parts[process], process, num_processes, progress
        )
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
    target: FrozenTarget,
    prompts: Sequence[list[int]],
    settings: Regenerate,
    part: Path,
    process: int,
    num_processes: int,
    progress: Progress,
) -> None:
    done = _repair_part(part)
    if done >= len(prompts):
        return
    engine = Engine(
        target,
        None,
        EngineOptions(batch_size=settings.batch_size, max_length=max(map(len, prompts)) + settings.new_tokens + 1),
    )
    chunk = 8 * settings.batch_size
    tokens = 0
    with part.open("a", encoding="utf-8") as file:
        for start in range(done, len(prompts), chunk):
            requests = [
                Request(
                    prompt=prompts[n],
                    max_new_tokens=settings.new_tokens,
                    sampling=Sampling(
                        temperature=settings.temperature, seed=settings.seed + n * num_processes + process
                    ),
                )
                for n in range(start, min(start + chunk, len(prompts)))
            ]
            for output in engine.generate(requests):
                file.write(json.dumps(output.tokens) + "\n")
                tokens += len(output.tokens)
            file.flush()
            progress(min(start + chunk, len(prompts)), len(prompts), tokens)


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
