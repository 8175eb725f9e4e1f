"""Answers of an engine, how engines count the rounds of an answer, and how two counts differ."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.data.prompts import Prompt

COUNTS = ("rounds", "drafted", "accepted")


@dataclass
class EngineAnswer:
    """An engine's answer to one prompt, and what the engine counted of it. What it does not count is None."""

    tokens: list[int]
    rounds: int | None = None
    """Passes that verified drafts."""
    drafted: int | None = None
    accepted: int | None = None
    by_position: list[int] | None = None
    """By position: rounds that accepted a draft token there."""
    ended: bool = False
    """True if the engine leaves out the token that ended the answer."""


@dataclass(frozen=True)
class Step:
    """What an engine's target, without a draft, makes of a text so far."""

    choice: int
    log_probabilities: dict[int, float]
    """Of the likeliest tokens."""


@dataclass
class Asked:
    """An engine with its answers, and what else it can say."""

    engine: str
    """Name and version."""
    facts: dict[str, str] = field(default_factory=dict)
    """What the engine says of its target and of its settings."""
    answers: list[EngineAnswer] = field(default_factory=list)
    depth: int | None = None
    """Draft tokens in a round, if the engine says."""
    plain: list[list[int]] | None = None
    """Texts without a draft."""
    steps: Callable[[Sequence[int], Sequence[int]], list[Step]] | None = None
    """(prompt, text) -> what the target alone makes of the text before each of its tokens."""
    ids_of: Callable[[Prompt], list[int]] | None = None
    """Token ids that the engine makes of a prompt: of a chat by its own template."""
    weights: Path | None = None
    """File of the target's weights."""


@dataclass(frozen=True)
class Counting:
    """How an engine counts the rounds of an answer."""

    clips: bool = False
    """Drafts are cut to what the answer may still hold beside the bonus token; a pass without a draft is no round."""
    counts_last: bool = True
    """False: accepted tokens of an answer's last round are not counted."""
    by_position: bool = True
    drafted: bool = True
    drafts_first: bool = False
    """The answer's first token is drafted, too, so that rounds begin elsewhere."""


COUNTING = {
    "llama.cpp": Counting(clips=True),
    "vllm": Counting(),
    "openvino": Counting(by_position=False, drafted=False),
    "openvino eagle3": Counting(counts_last=False, by_position=False, drafted=False),
    "mlx": Counting(clips=True, by_position=False, drafted=False, drafts_first=True),
}
"""By the engine's name in options; by the kind of head, too, where it counts some kind otherwise."""


def counted(
    rounds_accepted: Sequence[int],
    text: Sequence[int],
    depth: int,
    new_tokens: int,
    counting: Counting,
    lengths: Sequence[int] | None = None,
) -> EngineAnswer:
    """Return the counts of a text as an engine counts them. `rounds_accepted`: the tokens accepted in each round; they
    go on beyond the text's end, so that the last round is whole. `lengths`: the tokens drafted, None: `depth`."""
    start = 1  # tokens before a round
    rounds = drafted = total = 0
    by_position = [0] * depth
    for n, accepted in enumerate(rounds_accepted):
        if start >= len(text):
            break
        drafts = depth if lengths is None else lengths[n]
        if counting.clips:
            drafts = min(drafts, new_tokens - start - 1)
        kept = min(accepted, drafts)
        is_last = start + accepted + 1 >= len(text)
        if drafts > 0:
            rounds += 1
            drafted += drafts
        if counting.counts_last or not is_last:
            total += kept
            for position in range(kept):
                by_position[position] += 1
        start += accepted + 1
    by_depth = by_position if counting.by_position else None
    return EngineAnswer(list(text), rounds, drafted if counting.drafted else None, total, by_depth)


def cut(tokens: Sequence[int], new_tokens: int, ends: Sequence[int]) -> list[int]:
    """Return a text up to its first end token, or to its limit."""
    end = next((n for n, token in enumerate(tokens[:new_tokens]) if token in ends), new_tokens - 1)
    return list(tokens[: end + 1])


def same_text(text: Sequence[int], answer: EngineAnswer) -> bool:
    return list(text) == answer.tokens or (answer.ended and list(text[:-1]) == answer.tokens)


def count_distance(ours: EngineAnswer, theirs: EngineAnswer) -> int:
    """Return by how much two counts of an answer differ, in what both count."""
    one, other = counts_of(ours), counts_of(theirs)
    distance = sum(abs(one[name] - other[name]) for name in COUNTS if name in one and name in other)
    if "by_position" in one and "by_position" in other:
        by_position = Counter(dict(enumerate(one["by_position"])))
        by_position.subtract(dict(enumerate(other["by_position"])))
        distance += sum(map(abs, by_position.values()))
    return int(distance)


def counts_of(answer: EngineAnswer) -> dict[str, Any]:
    return {name: value for name in (*COUNTS, "by_position") if (value := getattr(answer, name)) is not None}


def tau(answers: Sequence[EngineAnswer]) -> float:
    """Return tokens per pass: each token that is not an accepted draft token costs one."""
    decoded = sum(len(answer.tokens) - 1 for answer in answers)
    accepted = sum(answer.accepted or 0 for answer in answers)
    return decoded / max(decoded - accepted, 1)


def totals(answers: Sequence[EngineAnswer]) -> str:
    """Return the counts over all answers in words."""
    counts = [counts_of(answer) for answer in answers]
    words = [f"{name} {sum(each[name] for each in counts)}" for name in COUNTS if all(name in each for each in counts)]
    columns: Counter[int] = Counter()
    for answer in answers:
        columns.update(dict(enumerate(answer.by_position or ())))
    words += [f"by position {' '.join(str(columns[k]) for k in sorted(columns))}"] * bool(columns)
    return ", ".join([*words, f"tau {tau(answers):.2f}"])
