"""The target's own answers as training data, made by the runtime and kept in a file for resumed runs."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from eval.files import write_text
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from train.data.corpus import Document
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
    temperature: Temperature = 0.0
    """Sampling temperature of the answers; 0 is greedy."""

    def request(self, prompt: list[int], number: int) -> Request:
        """Ask for answer `number`, with noise of its own."""
        return Request(prompt, self.new_tokens, Sampling(temperature=self.temperature, seed=self.seed + number))


class Regenerate(Answers):
    """Train on the target's own answers to prompts from the sources: a draft head has to predict the target's text."""

    share: Share = 1.0
    """Share of the training rows that are answers. The rest are the sources as they are."""


def make_answers(
    target: FrozenTarget,
    requests: Sequence[Request],
    batch_size: int,
    folder: Path,
    *,
    process: int = 0,
    num_processes: int = 1,
    wait: Callable[[], None] = lambda: None,
    progress: Progress = lambda done, total, tokens: None,
    open_engine: Callable[..., Engine] = Engine,
) -> list[list[int]]:
    """The target's answer to each request. Every process answers its share; all of them return all the answers.

    Finished answers are appended to a part file, a line each, and taken up again after an interruption.
    """
    key = answers_key(target, requests)
    whole = folder / f"answers-{key}.jsonl"
    if not whole.is_file():
        parts = [folder / f"answers-{key}.{n}-of-{num_processes}.part" for n in range(num_processes)]
        share = requests[process::num_processes]
        done, tokens = _repair_part(parts[process]), 0
        longest = max((len(request.prompt) + request.max_new_tokens + 1 for request in share), default=0)
        engine = open_engine(target, None, EngineOptions(batch_size=batch_size, max_length=longest)) if share else None
        with parts[process].open("a", encoding="utf-8") as file:
            while engine is not None and done < len(share):
                for output in engine.generate(share[done : done + 8 * batch_size]):
                    file.write(json.dumps(output.tokens) + "\n")
                    tokens += len(output.tokens)
                file.flush()
                done = min(done + 8 * batch_size, len(share))
                progress(done, len(share), tokens)
        wait()
        if process == 0:
            in_turn = zip_longest(*(read_answers(part) for part in parts))
            write_answers(whole, [answer for turn in in_turn for answer in turn if answer is not None])
            for part in parts:
                part.unlink()
        wait()
    answers = read_answers(whole)
    if len(answers) != len(requests):
        raise UserError(
            f"{whole}: expected {len(requests)} answers, found {len(answers)}; delete the file to make them again"
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


def answers_key(target: FrozenTarget, requests: Sequence[Request]) -> str:
    """A hash of all that the answers depend on: the target, the prompts and the sampling, but not the batch size."""
    sampling = requests[0].sampling
    drawn: dict[str, Any] = {"new_tokens": requests[0].max_new_tokens, "temperature": sampling.temperature}
    if sampling.temperature > 0:
        drawn["seed"] = sampling.seed
    text = json.dumps([target.fingerprint, str(target.dtype), drawn, [request.prompt for request in requests]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
