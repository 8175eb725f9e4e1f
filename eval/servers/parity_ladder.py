"""Is it the head, the conversion or the engine? The same token ids through this runtime and an engine, and a ladder of
questions where the two differ.

1. The folder: what the engine's reader ignores, refuses or misreads of the head, and whether its own template makes the
   same ids of a prompt.
2. The engine without a draft, along this runtime's plain text: if its log-probabilities differ by more than rounding,
   the target is tried here with caches of fewer bits and with the weights of the engine's own file.
3. With the draft: the head is tried here as the engine may have read it, on the target of the second step: without
   norms, with other layers, with fewer draft tokens. What reproduces the engine's counts is named.

Only greedy texts are compared. Engines count differently; `Counting` says how.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from eval.runtime.engine import Engine, EngineOptions, Output, Request
from eval.servers.engine_process import EngineAnswer
from eval.servers.llamacpp import Step
from eval.servers.rounded_target import CACHES, log_probabilities, round_cache
from heads.core.contract import Drafter
from heads.core.tree import parse_shape
from heads.parts.head_shape import low_middle_high
from heads.registry import HEADS, kind_of
from heads.targets.frozen_target import FrozenTarget

DROPPED = {
    "norm_output": (),
    "fc_norm": ("fc_norm.",),
    "norm_before_fc": ("input_norm.",),
    "norm_before_residual": (),
    "sliding_window": (),
}
"""Settings of EAGLE-3 heads that a reader may drop without a word, with the beginnings of their tensors' names."""


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
    "openvino": Counting(counts_last=False, by_position=False, drafted=False),
    "mlx": Counting(clips=True, by_position=False, drafted=False, drafts_first=True),
}


@dataclass
class Run:
    """Texts and counts of this runtime, for a head as it may have been read."""

    texts: list[list[int]]
    counts: list[EngineAnswer]


@dataclass(frozen=True)
class Cause:
    """A way in which an engine may run another head or target than this runtime, and how it is tried here."""

    name: str
    """In a sentence: `norm_output was dropped`."""
    by: str
    """The conversion or the engine."""
    head: Callable[[], Drafter] | None = None
    depth: int | None = None


@dataclass
class Ladder:
    """A comparison, step by step."""

    target: FrozenTarget
    head: Drafter
    depth: int
    engine: str
    """Name in options."""
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    answers: Sequence[EngineAnswer]
    engine_depth: int | None = None
    """Draft tokens in a round, if the engine says."""
    rounded: "Precision | None" = None
    """Precision of the engine's target that the second step found."""
    lines: list[str] = field(default_factory=list)
    """What each step found."""

    def run(self, head: Drafter | None = None, depth: int | None = None) -> Run:
        """Decode all prompts here, as the engine counts."""
        head = head or self.head
        depth = depth or self.depth
        rounded = self.rounded or Precision("")
        engine = Engine(rounded.target or self.target, head, self.options(depth))
        if rounded.cache:
            round_cache(engine, rounded.cache)
        requests = [Request(list(ids), self.new_tokens + depth, ignore_eos=True) for ids in self.prompts]
        outputs = engine.generate(requests)
        texts = [cut(output.tokens, self.new_tokens, self.target.eos_token_ids) for output in outputs]
        counting = COUNTING[self.engine]
        if self.engine == "openvino" and kind_of(self.head) != "eagle3":
            counting = replace(counting, counts_last=True)
        pairs = zip(outputs, texts, strict=True)
        return Run(texts, [counted(output, text, depth, self.new_tokens, counting) for output, text in pairs])

    def options(self, depth: int) -> EngineOptions:
        longest = max(map(len, self.prompts)) + self.new_tokens + 2 * depth + 2
        shape = parse_shape(f"chain:{depth}") if depth else EngineOptions(max_length=1).shape
        return EngineOptions(shape=shape, max_length=min(longest, self.target.context_length))

    def plain_texts(self) -> list[list[int]]:
        requests = [Request(list(ids), self.new_tokens) for ids in self.prompts]
        return [output.tokens for output in Engine(self.target, None, self.options(0)).generate(requests)]

    # The third step

    def causes(self) -> Iterator[Cause]:
        """Yield what the engine may have made of the head."""
        config, kind = self.head.config, kind_of(self.head)  # type: ignore[attr-defined]
        drops: dict[str, Any] = {}
        names: list[str] = []
        for name, prefixes in DROPPED.items() if kind == "eagle3" else ():
            if getattr(config, name, None):
                value = None if name == "sliding_window" else False
                drops[name] = value
                names += prefixes
                yield Cause(f"{name} was dropped", "the conversion", self.variant({name: value}, prefixes))
        if len(drops) > 1:
            yield Cause(f"{' and '.join(drops)} were dropped", "the conversion", self.variant(drops, tuple(names)))
        ids = list(self.head.aux_layer_ids)
        layers = self.target.num_layers
        others = {
            "its layers are one too deep": [k + 1 for k in ids],
            "its layers are one too shallow": [k - 1 for k in ids],
            "the default layers took the place of its own": list(low_middle_high(layers)),
        }
        for name, other in others.items() if ids else ():
            if other != ids and len(other) == len(ids) and min(other) >= 0 and max(other) <= layers:
                for dropped, prefixes in [({}, ()), *([(drops, tuple(names))] if drops else [])]:
                    also = f", and {' and '.join(drops)} dropped" if dropped else ""
                    change = {"aux_layer_ids": other, **dropped}
                    yield Cause(f"{name}, {other} for {ids}{also}", "the engine", self.variant(change, prefixes))
        if getattr(config, "causal", None) is not None:
            yield Cause("causal was misread", "the conversion", self.variant({"causal": not config.causal}, ()))
        for depth in [self.engine_depth] if self.engine_depth else range(1, self.depth):
            if depth != self.depth:
                yield Cause(f"it drafts {depth} tokens a round, not {self.depth}", "the engine", depth=depth)

    def variant(self, changes: dict[str, Any], dropped: tuple[str, ...]) -> Callable[[], Drafter]:
        """Return a function that makes the head with other settings, without some tensors."""

        def make() -> Drafter:
            head: Any = self.head
            weights = {
                name: value for name, value in head.to_checkpoint().items() if not name.startswith(dropped or ("\0",))
            }
            config = head.config.model_dump(mode="json") | changes
            made: Any = HEADS[kind_of(head)].head.from_checkpoint(config, weights)
            return made.to(device=self.target.device, dtype=self.target.dtype).eval()  # type: ignore[no-any-return]

        return make

    def other_texts(self, run: Run) -> int:
        """Return how many texts differ from the engine's. No head changes them."""
        return sum(not same_text(text, answer) for text, answer in zip(run.texts, self.answers, strict=True))

    def distance(self, run: Run) -> int:
        """Return by how much the counts of equal texts differ from the engine's."""
        if COUNTING[self.engine].drafts_first:
            return 0
        each = zip(run.texts, run.counts, self.answers, strict=True)
        return sum(count_distance(count, answer) for text, count, answer in each if same_text(text, answer))


def same_text(text: Sequence[int], answer: EngineAnswer) -> bool:
    """Return True for equal texts. Some engines leave out the token that ended a text."""
    return list(text) == answer.tokens or (answer.ended and list(text[:-1]) == answer.tokens)


def count_distance(ours: EngineAnswer, theirs: EngineAnswer) -> int:
    """Return by how much two counts of an answer differ, in what both count."""
    distance = 0
    for name in ("rounds", "drafted", "accepted"):
        one = getattr(ours, name)
        other = getattr(theirs, name)
        if one is not None and other is not None:
            distance += abs(one - other)
    if ours.by_position is not None and theirs.by_position is not None:
        width = max(len(ours.by_position), len(theirs.by_position))
        padded = [[*counts, *[0] * (width - len(counts))] for counts in (ours.by_position, theirs.by_position)]
        distance += sum(abs(one - other) for one, other in zip(*padded, strict=True))
    return distance


def cut(tokens: Sequence[int], new_tokens: int, ends: Sequence[int]) -> list[int]:
    """Return a text up to its first end token, or to its limit."""
    end = next((n for n, token in enumerate(tokens[:new_tokens]) if token in ends), new_tokens - 1)
    return list(tokens[: end + 1])


def counted(output: Output, text: Sequence[int], depth: int, new_tokens: int, counting: Counting) -> EngineAnswer:
    """Return the counts of a text as an engine counts them. `output` goes on beyond the text's end, so that the last
    round is whole."""
    start = 1  # tokens before a round
    rounds = drafted = total = 0
    by_position = [0] * depth
    for accepted in output.accepted:
        if start >= len(text):
            break
        drafts = min(depth, new_tokens - start - 1) if counting.clips else depth
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
    return EngineAnswer(
        list(text),
        rounds,
        drafted if counting.drafted else None,
        total,
        by_position if counting.by_position else None,
    )


def tau(answers: Sequence[EngineAnswer]) -> float:
    """Return tokens per pass: each token that is not an accepted draft token costs one."""
    decoded = sum(len(answer.tokens) - 1 for answer in answers)
    accepted = sum(answer.accepted or 0 for answer in answers)
    return decoded / max(decoded - accepted, 1)


# The second step


@dataclass(frozen=True)
class Precision:
    """A way in which an engine's target may be less precise than this runtime's."""

    name: str
    """In a sentence: `its KV cache is in 8 bits (q8_0)`."""
    cache: str | None = None
    target: FrozenTarget | None = None


def precisions(ftype: str, weights: FrozenTarget | None) -> Iterator[Precision]:
    """Yield what may be wrong with an engine's target. `ftype`: the types of its weights, in llama.cpp's words;
    `weights`: these weights, if they can be read here."""
    bits = {"f16": "16 bits (f16)", "q8_0": "8 bits (q8_0)", "q4_0": "4 bits (q4_0)"}
    for cache in CACHES:
        yield Precision(f"its KV cache is in {bits[cache]}", cache)
    if weights is not None:
        yield Precision(f"its target's weights are {ftype}", None, weights)
        for cache in CACHES:
            name = f"its target's weights are {ftype}, and its KV cache is in {bits[cache]}"
            yield Precision(name, cache, weights)


def distance_of(
    target: FrozenTarget, options: EngineOptions, precision: Precision, probes: Sequence[tuple[Any, Any, list[Step]]]
) -> float:
    """Return the root mean square of the differences of log-probabilities between an engine, of which `probes` has
    prompt, text and steps, and the target here with such a precision."""
    engine = Engine(precision.target or target, None, options)
    if precision.cache:
        round_cache(engine, precision.cache)
    total = 0.0
    number = 0
    for prompt, text, steps in probes:
        ours = log_probabilities(engine, prompt, text)
        for row, step in zip(ours, steps, strict=True):
            for token, value in step.log_probabilities.items():
                total += float(row[token] - value) ** 2
                number += 1
    return float((total / max(number, 1)) ** 0.5)


def likeliest_gap(target: FrozenTarget, options: EngineOptions, prompt: Any, text: Any, steps: Sequence[Step]) -> float:
    """Return the median, over a text's tokens, of how much likelier the target's own choice is than the engine's, in
    nats."""
    ours: Tensor = log_probabilities(Engine(target, None, options), prompt, text)
    gaps = sorted(float(row.max() - row[step.choice]) for row, step in zip(ours, steps, strict=True))
    return gaps[len(gaps) // 2]
