"""What a measurement says: whether a draft pays, and warnings about its figures."""

import json
import math
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from eval.pages.texts import (
    draft_name,
    number,
    percent,
    plural,
    point_of,
    point_text,
    sampling_text,
    setting_text,
    speedup_text,
    tau_text,
)
from eval.records.draft_schedule import adapts, draft_schedule
from eval.records.figures_schema import Measurement
from eval.records.head_schema import Head
from eval.records.schema import HEAD, TARGET, Results, Search, Target
from eval.records.speedup_checks import (
    HIDDEN,
    MACHINE_BUSY,
    TOO_FEW_TOKENS,
    best_index,
    contradicts,
    headline_index,
    is_uneven,
    most_uneven,
    served_index,
    verdict_of,
    why_unreliable,
)
from heads.core.contract import split_draft
from heads.targets.hub import absolute, is_hub_id, repo_and_revision

SAME_BUDGET = 0.05
"""Relative difference of training tokens up to which budgets are the same: rows are padded differently."""
NOTABLE = 0.02
"""Share of tokens outside of a draft vocabulary from which it is said."""
FEW_PROMPTS = 8
"""Number of prompts below which percentile bootstraps are markedly too narrow."""


def reliable_speedup(m: Measurement) -> float:
    """Return the speedup of a setting, or NaN if it may not be printed."""
    return m.speedup.measured if m.speedup is not None and why_unreliable(m) is None else math.nan


def pays(results: Results) -> bool:
    """Return True if a reliable speedup above 1 was measured."""
    return any(reliable_speedup(m) > 1 for m in results.measurements)


def serve_label(results: Results) -> str:
    """Return the words before the command that serves the head."""
    return "serve it" if pays(results) else "to measure it there"


def serve_command(results: Results) -> str | None:
    """Return the command with which an engine serves the draft that the verdict names, from any folder of this machine.
    None if no engine serves it, its files are not here, no draft pays, or an audit failed."""
    is_known = results.server is not None or not all(map(why_unreliable, results.measurements))
    if is_known and not pays(results):
        return None
    return command_of(results, served_head(results))


def command_of(results: Results, head: Head) -> str | None:
    """Return the command that serves a head as it was best, or None if there is none or its files are not here."""
    if not head.serve or not results.is_exact:
        return None
    _, path = split_draft(head.path)
    name = os.path.abspath(path)
    if os.path.isdir(inner := os.path.join(name, "head")):  # of a run
        name = inner
    if not os.path.isdir(name):
        name = path
        if HEAD in head.serve and not is_hub_id(name):
            return None
    return typed(head.serve, {HEAD: name, TARGET: absolute(results.target.name)})


def why_no_command(results: Results) -> str | None:
    """Return why there is no command for a draft that pays, or None."""
    why = served_head(results).why_not
    return f"no engine serves it as measured: {why}" if why and results.is_exact and pays(results) else None


def served_head(results: Results) -> Head:
    return results.head_of(results.measurements[served_index(results.measurements)])


def typed(serve: str, names: Mapping[str, str]) -> str:
    """Return recorded commands, one a line, with their notes, and with names in the place of the words HEAD and TARGET.
    Names may hold any character; of a Hub id with a revision, the revision is an option."""
    lines = serve.split("\n")
    return "\n".join(line if line.startswith("#") else typed_line(line, names) for line in lines)


def typed_line(command: str, names: Mapping[str, str]) -> str:
    words = list[str]()
    for word in shlex.split(command):
        first, slash, rest = word.partition("/")
        if word in names:
            repo, revision = repo_and_revision(names[word])
            option = "--speculative-draft-model-revision" if word == HEAD else "--revision"
            words += [repo, option, revision] if revision else [repo]
        elif first in names:
            words.append(f"{names[first]}{slash}{rest}")
        elif word.startswith("{") and (draft := json.loads(word)).get("model") in names:
            repo, revision = repo_and_revision(names[draft["model"]])
            words.append(json.dumps({**draft, "model": repo, **({"revision": revision} if revision else {})}))
        else:
            words.append(word)
    return shlex.join(words)


def fastest(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the headline setting of each head at each temperature, batch size and context."""
    groups: dict[tuple[str, float, str], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.head, m.temperature, point_of(m)), []).append(m)
    return [group[headline_index(group)] for group in groups.values()]


def by_temperature(measurements: Sequence[Measurement]) -> list[list[Measurement]]:
    groups: dict[float, list[Measurement]] = {}
    for m in measurements:
        groups.setdefault(m.temperature, []).append(m)
    return list(groups.values())


# Verdicts


def verdicts(results: Results) -> list[str]:
    if not results.is_exact:
        wrong = plural(len(results.exact.divergences), "output")
        return [f"{wrong} differed from plain decoding: no speedup is stated"]
    by_load = [] if results.is_comparison else load_lines(results)
    return [*verdicts_on(results.measurements, results.heads), *by_load]


def verdicts_on(measurements: Sequence[Measurement], heads: Sequence[Head]) -> list[str]:
    """Return whether a draft pays, a line for each temperature, as in `chain:5 pays: 1.36x [1.24, 1.49] on 16 prompts,
    greedy`."""
    unserved = [head.name for head in heads if head.unserved or head.why_not]
    lines = [verdict_at(group, unserved) for group in by_temperature(measurements)]
    if all(map(why_unreliable, measurements)):
        lines.insert(0, f"speedup {speedup_text(measurements[0])}")
    return lines


def verdict_at(measurements: Sequence[Measurement], unserved: Collection[str]) -> str:
    """Return the verdict on the settings of one temperature: the best draft, and at which batch sizes and contexts none
    pays, or it is not decided whether one does. `unserved`: names of heads that no engine serves."""
    at = sampling_text(measurements[0].temperature)
    reliable = [m for m in measurements if verdict_of(m) is not None]
    if not reliable:
        longest = max(measurements, key=lambda m: m.tau.mean)
        return f"tau {tau_text(longest)} with {draft_name(longest)}, {at}"
    parts = []
    first = reliable[best_index(reliable) or 0]
    if (verdict := verdict_of(first)) in ("pays", "may pay"):
        only_here = ", in this runtime only" if first.head in unserved else ""
        name = f"{first.head} {first.tree}".strip()
        parts.append(f"{name} {verdict}{only_here}: {speedup_on(first)}, {at}{point_of(first)}")
    points: dict[str, list[Measurement]] = {}
    for m in reliable:
        points.setdefault(point_of(m), []).append(m)
    undecided, failing = list[Measurement](), list[Measurement]()
    for group in points.values():
        group.sort(key=reliable_speedup, reverse=True)
        said = [verdict_of(m) for m in group]
        if not {"pays", "may pay"}.intersection(said):
            open_one = said.index("not decided") if "not decided" in said else None
            (failing if open_one is None else undecided).append(group[open_one or 0])
    of = "" if len(reliable) == len(measurements) else f" of the {len(reliable)} measured"
    for words, group in ((f"whether a draft{of} pays is not decided", undecided), (f"no draft{of} pays", failing)):
        if group:
            best = max(group, key=reliable_speedup)
            where = " and ".join(point_of(m).removeprefix(", ") for m in group)
            best_of = "best: " if len(group) > 1 else ""
            where = f"{at}, {where}" if where else at
            parts.append(f"{words}, {where} ({best_of}{draft_name(best)}: {speedup_on(best)})")
    return "; ".join(parts)


def speedup_on(m: Measurement) -> str:
    return f"{speedup_text(m)} on {plural(m.exact.prompts - m.undecoded, 'prompt')}"


def load_lines(results: Results) -> list[str]:
    """Return the draft tokens by load, each with the smallest speedup that supports it, as in `draft tokens by load,
    greedy: 5 up to 4 requests (1.30x [1.20, 1.40] at 4), none above`. Empty for a single batch size."""
    steps, parts = draft_schedule(results.measurements, results.headline), list[str]()
    if not steps:
        here = [m for m in results.measurements if m.temperature == results.headline.temperature]
        needs = "a chain that pays, and reliable speedups with intervals at two batch sizes"
        may_pay = len({m.batch_size for m in here}) > 1 and any(reliable_speedup(m) > 1 for m in here)
        return [f"draft tokens by load: no schedule, which needs {needs}"] * may_pay
    for step in steps[:-1]:
        load = str(step.last) if parts else plural(step.last, "request")
        least = f" ({speedup_text(step.least)} at {step.least.batch_size})" if step.least else ""
        parts.append(f"{step.drafts or 'none'} up to {load}{least}")
    at = f"{sampling_text(results.headline.temperature)}{point_text(None, results.headline.context)}"
    return [f"draft tokens by load, {at}: {', '.join([*parts, 'none above'])}"]


def search_line(search: Search) -> str:
    """Return a line with the result of a search for the best draft. Speedups that are not reliable are no part of
    it."""
    looked = f"looked at {len(search.curve)} drafts, " if search.curve else ""
    point = f"{point_text(search.batch_size, search.context)}, {sampling_text(search.temperature)}"
    if search.matches:
        lengths = ", ".join(str(look.least_match) for look in search.matches)
        looked += f"at a lookup after matches of {lengths} tokens, of which {search.least_match} was the fastest, "
    line = f"auto{point}: {looked}measured {', '.join(search.proposed)}"
    if search.chosen is None:
        return f"{line}; no speedup of those measured is reliable, so none of them is chosen"
    speedup, unreliable = search.measured[search.chosen], len(search.unreliable)
    measured = f"{len(search.measured)} measured" + (f" reliably and {unreliable} not" if unreliable else "")
    if speedup < 1 and not unreliable:
        return f"{line}; none of {measured} was faster than plain decoding, {search.chosen} is next ({speedup:.2f}x)"
    return f"{line}; of {measured}, {search.chosen} is chosen ({speedup:.2f}x)"


# Warnings


def warnings(results: Results) -> list[str]:
    return [*warnings_about_heads(results), *warnings_about_figures(results)]


def warnings_about_heads(results: Results) -> Iterator[str]:
    for head in results.heads:
        name = f"head {head.name}: " if head.name else ""
        own = [m for m in results.measurements if m.head == head.name]
        for line in (*position_warnings(head, results.target, own), *head_warnings(head, own)):
            yield f"{name}{line}"
        if head.unserved:
            yield f"{head.name or 'this head'}: {head.unserved}"
    if (warning := training_warning(results.heads)) is not None:
        yield warning
    if results.target.two_tables:
        yield (
            "the target's config.json ties its embeddings and its output head, and its checkpoint holds two tables "
            "that differ: both were used, and an engine that ties them serves another model"
        )


def head_warnings(head: Head, measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yield how an engine's reading of a published head differs from ours, and what was accepted in drafts that are
    deeper than the training of one of our heads."""
    if head.origin is not None:
        yield from (f"read as {head.origin.form}: {line}" for line in head.origin.differs)
        return
    missed = max(measurements, key=lambda m: m.undraftable or 0.0)
    if (missed.undraftable or 0.0) >= NOTABLE:
        yield (
            f"{percent(missed.undraftable, 1)} of the texts' tokens are none that it can draft "
            f"({setting_text(missed)}), whatever its training; a larger head.draft_vocab_size, or labels from such "
            "texts, mends it"
        )
    deepest, trained = max(measurements, key=lambda m: m.depth), head.config.depth
    if trained is None or deepest.depth <= trained:
        return
    beyond = list(enumerate(deepest.alpha, start=1))[trained : deepest.depth]
    rates = ", ".join(f"{percent(alpha)} at depth {depth}" for depth, alpha in beyond if alpha is not None)
    yield (
        f"drafted {deepest.depth} deep, trained for {trained}: beyond that, {deepest.tree} "
        f"({sampling_text(deepest.temperature)}) accepted {rates or 'nothing, as no round came so deep'}"
    )


def position_warnings(head: Head, target: Target, measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yield that a head was made for fewer positions than its target, or that texts are longer than the rows of its
    training, with tau within and beyond, of the bins that are wholly on one side."""
    m = max(measurements, key=lambda m: m.longest)

    def sides(limit: int) -> str:
        parts = []
        for where in ("within", "beyond"):
            bins = [b for b in m.tau_by_position if (b.to <= limit if where == "within" else b.start >= limit)]
            if rounds := sum(b.rounds for b in bins):
                parts.append(f"{number(sum(b.mean * b.rounds for b in bins) / rounds)} {where}")
        return f": tau {', '.join(parts)} ({setting_text(m)})" if m.longest > limit and parts else ""

    made, row = head.positions, head.context_length
    if made is not None and made < target.context_length:
        whole = f"the target's {target.context_length:,} positions"
        yield f"made for {made:,} of {whole}, beyond which engines may stop drafting or fail{sides(made)}"
    if row is not None and m.longest > row:
        yield f"trained on rows of {row:,} tokens, and a text has {m.longest:,}{sides(row)}"


def training_differences(heads: Sequence[Head]) -> dict[str, list[str]]:
    """Return what differs in the training of each head from that of the first trained one: its data, its budget of
    tokens. Heads without a difference, or of which nothing is known, are left out."""
    known = [(head, head.budget_tokens) for head in heads if head.data_sha256 and head.budget_tokens]
    differences = {}
    for head, tokens in known[1:]:
        first, budget = known[0]
        parts = ["other data"] * (head.data_sha256 != first.data_sha256)
        parts += ["other budget"] * (abs(tokens / budget - 1) > SAME_BUDGET)
        if parts:
            differences[head.name] = parts
    return differences


def training_warning(heads: Sequence[Head]) -> str | None:
    which = "; ".join(f"{name}: {' and '.join(parts)}" for name, parts in training_differences(heads).items())
    if not which:
        return None
    return f"heads trained on different data or budgets ({which}): figures compare heads, not methods"


def warnings_about_figures(results: Results) -> Iterator[str]:
    measurements, settings, exact = results.measurements, results.settings, results.exact
    slow = [group for group in by_temperature(measurements) if {*map(verdict_of, group)} == {"does not pay"}]
    if slow:
        temperatures = ", ".join(sampling_text(group[0].temperature) for group in slow)
        yield f"plain decoding is faster than every draft measured ({temperatures})"
    least = max(measurements, key=lambda m: m.undecoded)
    if least.undecoded:
        which = f"{least.undecoded} of {plural(least.exact.prompts, 'output')} ({sampling_text(least.temperature)})"
        yield f"{which} ended with the first token and are in no figure"
    if (decoded := least.exact.prompts - least.undecoded) < FEW_PROMPTS:
        yield f"figures of {plural(decoded, 'prompt')} say little of other prompts, and their intervals are too narrow"
    timed = [m for m in measurements if m.batch_size and m.batch_size > 1 and m.speedup and m.speedup.ci95]
    if few := sorted({m.batch_size or 0 for m in timed if m.exact.prompts < FEW_PROMPTS * (m.batch_size or 0)}):
        at = ", ".join(map(str, few))
        yield f"at batch {at}, fewer than {FEW_PROMPTS} batches were timed: intervals of speedups are too narrow"
    if any(m.temperature > 0 and m.rule == "match" for m in measurements):
        yield (
            "sampled figures are of rule match, whose draws no engine has: --rule likeliest accepts as vLLM does by "
            "default, and SGLang; --rule ratio as vLLM with draft_sample_method probabilistic"
        )
    if settings.distinct_prompts != settings.num_prompts:
        yield (
            f"{settings.distinct_prompts} of {settings.num_prompts} prompts are different: the intervals, which take "
            "each for another, are too narrow"
        )
    if exact.against == "plain server" and (exact.identical or 0) < exact.prompts:
        yield "some texts are not the plain server's; only the target here could tell rounding from an error"
    if fewer := [f"{number(m.drafted)}{point_of(m)}" for m in measurements if adapts(m)]:
        yield f"by a rule of its own the server drafted fewer than {measurements[0].depth} tokens: {'; '.join(fewer)}"
    if any(why_unreliable(m) == HIDDEN for m in measurements):
        yield "the pieces of the server's answers cannot be all their tokens, such as reasoning: no speed is stated"
    if short := [m for m in measurements if why_unreliable(m) == TOO_FEW_TOKENS]:
        without = without_speedup(short, measurements)
        yield f"{TOO_FEW_TOKENS} were timed: {without}; allow more new tokens, or take more prompts"
    if odd := [m for m in measurements if why_unreliable(m) is None and contradicts(m)]:
        yield contradiction(odd)
    if (busy := busy_warning(measurements)) is not None:
        yield busy


def contradiction(odd: Sequence[Measurement]) -> str:
    """Return why the predicted speedups of some settings are withheld, by the example of the largest."""
    m = max(odd, key=lambda m: m.speedup.predicted if m.speedup else 0.0)
    assert m.speedup is not None
    bound = f", and tau, {number(m.tau.mean)}, is the most" if m.speedup.predicted > m.tau.mean else ""
    return (
        f"no prediction is stated for {plural(len(odd), 'setting')}: by the costs of a round, {setting_text(m)} would "
        f"reach {number(m.speedup.predicted)}x, measured was {speedup_text(m)}{bound}; a round's parts are timed once, "
        "after the first prompts, and a speedup over all texts: where they disagree, the times had noise"
    )


def busy_warning(measurements: Sequence[Measurement]) -> str | None:
    """Return a warning that something else used the machine, or None."""
    disturbed = [m for m in measurements if why_unreliable(m) == MACHINE_BUSY]
    if not disturbed:
        return None
    cause = "a measured or predicted speedup exceeded tau, which no draft can do"
    if uneven := [most_uneven(m) for m in disturbed if is_uneven(m)]:
        kind, mean, median = max(uneven, key=lambda step: step[1] / step[2])
        cause = f"{kind} took {number(mean)} ms on average and {number(median)} in the median"
    if others := [m.busy_cores for m in disturbed if m.busy_cores is not None]:
        cause = f"other processes used {max(others):.1f} of the cores when a measurement began, and left too few"
    without = without_speedup(disturbed, measurements)
    return f"{cause}: something else used this machine; {without}; measure again while the machine is idle"


def without_speedup(unreliable: Sequence[Measurement], measurements: Sequence[Measurement]) -> str:
    which = "" if len(unreliable) == len(measurements) else f" for {len(unreliable)} of {len(measurements)} settings"
    return f"no speedup is stated{which}"
