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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import log

import torch

from eval.core.progress import Progress
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.near_ties import FAR, find_mismatches, first_difference
from eval.servers.misread_heads import Cause, Misreadings
from eval.servers.parity_counts import (
    COUNTING,
    Asked,
    EngineAnswer,
    count_distance,
    counted,
    counts_of,
    cut,
    same_text,
    tau,
    totals,
)
from eval.servers.rounded_target import (
    AS_HERE,
    Precision,
    Probe,
    likeliest_gap,
    precisions,
    round_cache,
    size,
    values_of,
)
from eval.servers.unsure_drafts import OTHERWISE, find_bound, note_drafts
from heads.core.contract import Drafter
from heads.core.errors import UserError, first_line
from heads.core.tree import parse_shape
from heads.registry import kind_of
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target

CHECKED = 16
"""Tokens that show whether an engine runs the target."""
ROUNDING = 1e-4
"""Root mean square of differences of log-probabilities that two implementations in float32 have."""
HALF = 5e-3
"""The same of two implementations, one of which computes in 16 bits."""
SIXTEEN = "it computes in 16 bits, as attention does with llama-server's default KV cache (f16)"
SHARED = 0.95
"""A precision is the engine's if it leaves less than this fraction of the differences: any other would add to them. It
takes the place of one tried before by the same fraction."""
ALIKE = 1.5
"""A precision is like the engine's if its differences are as large within this factor. The rounding of a long context's
values cannot be reproduced where queries are rounded, too, as llama.cpp's kernel for quantised keys does."""
REPRODUCED = 0.3
"""A cause is the engine's if it leaves at most this fraction of the differences in counts."""
FITTED = 0.05
"""The same for a cause with a number that was chosen by the counts."""
FOREIGN = 2.0
"""An engine whose choices are less likely than this, in nats, by the median, runs another model."""


@dataclass
class Run:
    """Texts and counts of this runtime, for a head as it may have been read."""

    texts: list[list[int]]
    counts: list[EngineAnswer]


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
    asked: Asked
    precision: Precision = AS_HERE
    """Precision of the engine's target that the second step found."""
    lines: list[str] = field(default_factory=list)
    """What each step found."""

    def run(self, head: Drafter | None = None, depth: int | None = None) -> Run:
        """Decode all prompts here, as the engine counts."""
        depth = depth or self.depth
        engine = Engine(self.precision.target or self.target, head or self.head, self.options(depth))
        round_cache(engine, self.precision)
        requests = [Request(list(ids), self.new_tokens + depth, ignore_eos=True) for ids in self.prompts]
        outputs = engine.generate(requests)
        texts = [cut(output.tokens, self.new_tokens, self.target.eos_token_ids) for output in outputs]
        counting = COUNTING.get(f"{self.engine} {kind_of(self.head)}", COUNTING[self.engine])
        pairs = zip(outputs, texts, strict=True)
        return Run(texts, [counted(output.accepted, text, depth, self.new_tokens, counting) for output, text in pairs])

    @property
    def may_end_drafts(self) -> bool:
        """True if the engine may end drafts by probabilities that can be noted here."""
        on_cpu = self.target.device.type == "cpu"
        return self.engine == "llama.cpp" and on_cpu and kind_of(self.head) not in OTHERWISE

    def run_where_unsure(self, base: Run) -> tuple[str, Run]:
        """Return the name and the run of drafts that end where the head is unsure."""
        head = self.misreadings.variant({})()
        noted = note_drafts(head)
        drafts = []
        for prompt in self.prompts:
            replace(self, prompts=[prompt]).run(head)
            drafts.append(noted.copy())
            noted.clear()
        bound, counts = find_bound(drafts, self.asked.answers, self.new_tokens, COUNTING[self.engine])
        name = f"its drafts end before a token less likely than about {bound:.2g} (--spec-draft-p-min)"
        return name, Run(base.texts, counts)

    def options(self, depth: int = 0) -> EngineOptions:
        longest = max(map(len, self.prompts)) + self.new_tokens + 2 * depth + 2
        shape = parse_shape(f"chain:{depth}") if depth else EngineOptions(max_length=1).shape
        return EngineOptions(shape=shape, max_length=min(longest, self.target.context_length))

    def plain(self) -> Engine:
        return Engine(self.target, None, self.options())

    def plain_texts(self) -> list[list[int]]:
        requests = [Request(list(ids), self.new_tokens) for ids in self.prompts]
        return [output.tokens for output in self.plain().generate(requests)]

    def by_rounding(self, prompt: Sequence[int], text: Sequence[int]) -> bool:
        """Return True if a text parts from the target's only where two tokens are as likely."""
        request = Request(list(prompt), self.new_tokens, ignore_eos=True)
        (mismatches,) = find_mismatches(self.target, [(request, text)])
        return all(mismatch.is_within(FAR) for mismatch in mismatches)

    @property
    def misreadings(self) -> Misreadings:
        return Misreadings(self.target, self.head, self.engine, self.depth, self.asked.depth or 0)

    def other_texts(self, run: Run) -> int:
        """Return how many texts differ from the engine's. No head changes them."""
        return sum(not same_text(text, answer) for text, answer in zip(run.texts, self.asked.answers, strict=True))

    def distance(self, run: Run) -> int:
        """Return by how much the counts of equal texts differ from the engine's."""
        if COUNTING[self.engine].drafts_first:
            return 0
        each = zip(run.texts, run.counts, self.asked.answers, strict=True)
        return sum(count_distance(count, answer) for text, count, answer in each if same_text(text, answer))

    def is_equal(self, run: Run) -> bool:
        return self.distance(run) == self.other_texts(run) == 0

    def agreement(self, run: Run) -> str:
        pairs = list(zip(run.texts, run.counts, self.asked.answers, strict=True))
        texts = sum(same_text(text, answer) for text, _, answer in pairs)
        both = sum(same_text(text, answer) and not count_distance(count, answer) for text, count, answer in pairs)
        return f"{texts} of {len(pairs)} texts are the engine's, {both} with its counts"


def climb(ladder: Ladder, other_ids: str | None = None) -> tuple[Run, str]:
    """Return the run here, and the answer: the head, the template, the conversion or the engine. `other_ids`: how the
    ids that the engine makes of the prompts differ."""
    answers = ladder.asked.answers
    with Progress("decoding here", announced=True):
        own = ladder.run()
    ours = tau(own.counts)
    theirs = tau(answers)
    ladder.lines += [ladder.agreement(own), f"here: {totals(own.counts)}; engine: {totals(answers)}"]
    fault = check_plain(ladder, own)
    if not ladder.is_equal(own):
        if not sum(answer.drafted or answer.accepted or 0 for answer in answers):
            return own, f"the engine: it drafts nothing: its draft does not fit its target; here tau is {ours:.2f}"
        return own, find_cause(ladder, own, fault)
    although = f", although {fault}" if fault else ""
    if other_ids is not None:
        return own, f"the template: {other_ids}; with this runtime's ids tau is {ours:.2f} in both{although}"
    if abs(ours - theirs) < 0.005:
        return own, f"the head: tau {ours:.2f} in both{although}"
    return (
        own,
        f"the head: the same texts, tau {ours:.2f} here and {theirs:.2f} there, where the first token is drafted",
    )


# 2. The engine without a draft


def check_plain(ladder: Ladder, own: Run) -> str | None:
    """Compare the engine without a draft with this runtime. Return what is wrong with its target, if anything is, and
    set the precision that explains it. If texts and counts are equal, a few tokens suffice."""
    asked = ladder.asked
    if asked.steps is None:
        return None if asked.plain is None else compare_plain(ladder, asked.plain)
    texts = [text[:CHECKED] for text in own.texts] if ladder.is_equal(own) else ladder.plain_texts()
    options = ladder.options()
    probes: list[Probe] = []
    with Progress("asking without a draft: text", len(texts)) as progress:
        for prompt, text in zip(ladder.prompts, texts, strict=True):
            probes.append((prompt, text, asked.steps(prompt, text)))
            progress.advance()
            if len(probes) == 1 and likeliest_gap(ladder.target, options, probes[0]) > FOREIGN:
                raise UserError(
                    f"{asked.engine} serves another model than {ladder.target.name}: it chooses unlikely tokens; serve "
                    "the target"
                )
    same = sum([step.choice for step in steps] == list(text) for _, text, steps in probes)
    kind = asked.facts.get("weights", "")
    quantised = kind not in ("", "all F32", "F32")
    each = (step.log_probabilities.values() for _, _, steps in probes for step in steps)
    theirs = torch.tensor([*chain.from_iterable(each)])
    plain = values_of(ladder.target, options, AS_HERE, probes)
    base = least = size(plain - theirs)
    best = AS_HERE
    alike: dict[str, float] = {}
    if base > ROUNDING:
        weights = weights_of(asked, ladder.target) if quantised else None
        with Progress("trying precisions here", announced=True):
            for precision in precisions(kind, weights):
                values = values_of(ladder.target, options, precision, probes)
                distance = size(values - theirs)
                alike[precision.name] = abs(log(max(size(values - plain), 1e-12) / base))
                if distance < SHARED * least:
                    least = distance
                    best = precision
                if least < ROUNDING:
                    break
    ladder.precision = best
    ladder.lines.append(
        f"without a draft: {same} of {len(texts)} texts are this runtime's; log-probabilities differ by {base:.1e} "
        "(root mean square)" + (f", by {least:.1e} where {best.name}" if best.name else "")
    )
    if best.name:
        return best.name
    if quantised:
        return f"its target's weights are {kind}"
    if base > HALF:
        nearest = min(alike, key=lambda name: round(alike[name], 1))  # of equally near ones the first tried
        as_much = f", by as much as where {nearest}" if alike[nearest] < log(ALIKE) else ""
        return f"its target computes less precisely than in float32{as_much}"
    return SIXTEEN if base > ROUNDING else None


def weights_of(asked: Asked, target: FrozenTarget) -> FrozenTarget | None:
    """Return the target with the weights of the engine's GGUF file, if the file is here."""
    file = asked.weights
    if file is None or not file.is_file():
        return None
    try:
        return load_target(str(file.parent), dtype=target.dtype, device=target.device, gguf_file=file.name)
    except Exception as error:
        raise UserError(f"{file}: its weights cannot be read here ({first_line(error)})") from error


def compare_plain(ladder: Ladder, theirs: Sequence[list[int]]) -> str | None:
    """Compare plain texts. Return what is wrong with the engine's, or None: equal, or apart by rounding."""
    near = far = 0
    for prompt, text, other in zip(ladder.prompts, ladder.plain_texts(), theirs, strict=True):
        if other in (text, text[:-1]):
            continue
        by_rounding = ladder.by_rounding(prompt, other)
        near += by_rounding
        far += not by_rounding
    ladder.lines.append(
        f"without a draft: {len(theirs) - near - far} of {len(theirs)} texts are this runtime's"
        + (f", {near} part at a near-tie" if near else "")
    )
    return f"its target writes other texts on {far} prompts, by more than rounding" if far else None


# 3. With the draft


def find_cause(ladder: Ladder, own: Run, fault: str | None) -> str:
    """Return the answer: the cause that reproduces the engine's counts, or what is known of it. `fault`: what is wrong
    with its target."""
    ours = tau(own.counts)
    theirs = tau(ladder.asked.answers)
    first = parting(ladder, own)
    ladder.lines.append(f"with the draft: {first}")
    precision = ladder.precision.name
    base = ladder.run() if precision else own
    if precision:
        ladder.lines.append(f"where {precision}: {ladder.agreement(base)}")
    least = distance = ladder.distance(base)
    named = None
    with Progress("trying what the engine may have read", announced=True):
        for cause in ladder.misreadings.causes() if distance else ():
            try:
                run = ladder.run(cause.head() if cause.head else None, cause.depth)
            except UserError:  # the head cannot be such a one
                continue
            if ladder.distance(run) < min(least, REPRODUCED * distance):
                least = ladder.distance(run)
                named = (cause, run)
            if least == 0:
                break
        if least and ladder.may_end_drafts:
            name, run = ladder.run_where_unsure(base)
            if ladder.distance(run) < min(least, FITTED * distance):
                least = ladder.distance(run)
                named = (Cause(name, "the engine"), run)
    there = "as in the engine" if least == ladder.other_texts(base) == 0 else f"{theirs:.2f} in the engine"
    if named is not None:
        cause, run = named
        ladder.lines.append(f"where {cause.name}: {ladder.agreement(run)}")
        also = f"; besides, {fault}" if fault else ""
        return (
            f"{cause.by}: {cause.name}; as trained this head has tau {tau(base.counts):.2f}, so "
            f"{tau(run.counts):.2f}, {there}{also}"
        )
    if precision:
        return (
            f"the engine: {precision}; so this head has tau {tau(base.counts):.2f} here, {there}, and {ours:.2f} at "
            "this runtime's precision"
        )
    if fault is not None:
        return f"the engine: {fault}; tau {ours:.2f} here, {theirs:.2f} there"
    if near_ties(ladder, own):
        return f"rounding: where texts part, two tokens are as likely; tau {ours:.2f} here, {theirs:.2f} there"
    return f"the engine: no known behaviour reproduces its counts; tau {ours:.2f} here, {theirs:.2f} there; {first}"


def near_ties(ladder: Ladder, own: Run) -> bool:
    """Return True if all texts that differ part where two tokens are as likely, and the counts of the others agree."""
    each = zip(ladder.prompts, own.texts, ladder.asked.answers, strict=True)
    return ladder.distance(own) == 0 and all(
        same_text(text, answer) or ladder.by_rounding(prompt, answer.tokens) for prompt, text, answer in each
    )


def parting(ladder: Ladder, own: Run) -> str:
    """Return where this runtime and the engine first part."""
    for n, (text, count, answer) in enumerate(zip(own.texts, own.counts, ladder.asked.answers, strict=True), start=1):
        if not same_text(text, answer):
            place = first_difference(text, answer.tokens) or 0
            here = text[place : place + 1]
            there = answer.tokens[place : place + 1]
            return f"they first part in prompt {n}, at token {place}: {here} here, {there} there"
        if count_distance(count, answer):
            return f"they first part in prompt {n}, of equal text: {counts_of(count)} here, {counts_of(answer)} there"
    return "they do not part"
