"""Formatting of figures as text: the same in the terminal, on the page and in the model card."""

import math
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from eval.measure.command import AUTO
from eval.measure.folders import short_name as short_name
from eval.measure.results import Results
from eval.measure.speedup_checks import (
    AUDIT_FAILED,
    MACHINE_BUSY,
    NO_BASELINE,
    TOO_FEW_TOKENS,
    is_believable,
    is_uneven,
    most_uneven,
)
from eval.measure.speedup_checks import headline as headline
from eval.measure.speedup_checks import why_unreliable as why_unreliable

MISSING = "–"  # noqa: RUF001
NOT_RELIABLE = "not measured"
"""Text in the place of a speedup that is not reliable. The reason follows it."""
SAME_BUDGET = 0.05
"""Relative difference of training tokens up to which budgets are the same: rows are padded differently."""
FEW = 8
"""Number of prompts below which percentile bootstraps are markedly too narrow."""
LOCAL_MODEL = "a local model"
"""Public name of a target that is a local folder."""
BRACKETS = "Brackets are 95% bootstrap intervals over prompts."
TURNS = f"Plain decoding and all heads took turns on the same prompts. {BRACKETS}"
LEFT_OUT = "The slowest tenth of the turns is left out of the times of both"
"""Start of the note that names what the times leave out."""


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def with_interval(
    value: float | None, interval: Sequence[float | None] | None, *, digits: int = 2, unit: str = ""
) -> str:
    """Return a figure and its interval, as in `2.46 [2.31, 2.60]`."""
    text = number(value, digits)
    if text == MISSING or interval is None or None in interval:
        return text + unit * (text != MISSING)
    return f"{text}{unit} [{number(interval[0], digits)}, {number(interval[1], digits)}]"


def tau_text(figures: Results) -> str:
    return with_interval(figures["tau"]["mean"], figures["tau"]["ci95"])


def speculative_text(figures: Results) -> str:
    if (why := why_unreliable(figures)) not in (None, NO_BASELINE):
        return "withheld" if why == AUDIT_FAILED else NOT_RELIABLE
    return number(figures["speculative"]["tokens_per_second"], 1)


def left_out_text(figures: Results) -> str:
    turns = figures.get("turns", {"timed": 0, "left_out": 0})
    left_out, whole = turns["left_out"], turns["left_out"] + turns["timed"]
    return f"{LEFT_OUT}: {left_out} of {whole}." if left_out else ""


def sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}."


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def percent(share: float | None, digits: int = 0) -> str:
    return MISSING if share is None else f"{100 * share:.{digits}f}%"


def reached(alpha: Sequence[float | None]) -> Sequence[float | None]:
    """Return the acceptance of each depth, up to one depth past the deepest that any round reached. Deeper entries of a
    long draft have no value."""
    deepest = max((depth for depth, share in enumerate(alpha, start=1) if share is not None), default=0)
    return alpha[: deepest + 1]


def count(value: float) -> str:
    """Return a large count in short, as in `1.2k`, `7.3M`, `8.0B`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return str(int(value))


def audit_line(results: Results) -> str:
    """Return the line that states how many outputs were the target's own."""
    exact, settings = results["exact"], len(results.get("measurements", ()))
    if exact.get("against") == "nothing":
        return (
            "texts were not compared: greedy ones are, with the target here (--target) or with a plain server "
            "(--plain-server)"
        )
    if exact.get("against") == "plain server":
        return f"texts equal to the plain server's: {exact['identical']} of {exact['prompts']}"
    if exact.get("kind") == "distribution":
        greedy = exact["greedy"]
        return (
            f"exact in distribution under rule {results['rule']}: sampled text is a draw from the target's "
            "distribution, another than "
            "plain decoding's; at temperature 0 plain decoding's own tokens: "
            f"{greedy['identical']} of {greedy['prompts']} prompts{near_tie_text(exact)}"
        )
    pooled = f" ({exact['prompts'] // settings} prompts x {settings} settings)" if settings > 1 else ""
    counted = f"{exact['identical']} of {exact['prompts']} prompts{pooled}{near_tie_text(exact)}"
    return f"output identical to plain decoding: {counted}"


def near_tie_text(exact: Results) -> str:
    """Return `, 3 of them but for near-ties`, or an empty string. A near-tie is a choice between two tokens whose
    logits differ by no more than the rounding of a sum in a narrow dtype."""
    near = len(exact.get("near_ties", ()))
    return f", {near} of them but for near-ties" if near else ""


def is_exact(results: Results) -> bool:
    return not results["exact"]["divergences"]


def exact_cell(figures: Results) -> str:
    """Return the number of prompts with plain decoding's output, as in `12 of 12`, or `in distribution`."""
    exact = figures["exact"]
    if exact["identical"] is None:
        return "not compared" if "against" in exact else "in distribution"
    return f"{exact['identical']} of {exact['prompts']}{near_tie_text(exact)}"


def speedup_text(figures: Results) -> str:
    """Return `1.62x [1.55, 1.70]`, `not measured: the machine was busy`, or `withheld`."""
    if (why := why_unreliable(figures)) is not None:
        return "withheld" if why == AUDIT_FAILED else f"{NOT_RELIABLE}: {why}"
    return with_interval(figures["speedup"]["measured"], figures["speedup"]["ci95"], unit="x")


def short_speedup(figures: Results) -> str:
    """Return `speedup_text` without the reason, which stands elsewhere."""
    text = speedup_text(figures)
    return NOT_RELIABLE if text.startswith(NOT_RELIABLE) else text


def robust_text(figures: Results) -> str | None:
    """Return `ratio of medians 1.5x`, to be printed beside tau where the machine was busy, or None if that ratio cannot
    be true either or is not known."""
    ratio = (figures["speedup"] or {}).get("ratio_of_medians")
    if ratio is None or why_unreliable(figures) == TOO_FEW_TOKENS or not is_believable(ratio, figures["tau"]["mean"]):
        return None
    return f"ratio of medians {number(ratio)}x"


def speedup_cell(figures: Results) -> str:
    robust = robust_text(figures) if why_unreliable(figures) else None
    return speedup_text(figures) + (f"; {robust}" if robust else "")


def as_markdown(text: str) -> str:
    """Return a text escaped for Markdown. Names of folders may contain any character."""
    return re.sub(r"[\\`*{}\[\]<>|#~&$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def code_span(name: str) -> str:
    """Return a name as a code span in Markdown, with a fence longer than any run of backticks in the name."""
    longest = max(map(len, re.findall("`+", name)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{name}{space}{fence}"


def heading(results: Results) -> str:
    target = short_name(results["target"]["name"])
    if "heads" in results:
        return f"{plural(len(results['heads']), 'head')} on {target}"
    served = f", served by {results['server']['name']}" if "server" in results else ""
    return f"{results['head']['kind']} on {target}{served}"


def sampling_text(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def device_text(results: Results) -> str:
    device = results["device"]
    threads = f", {plural(device['threads'], 'thread')}" if "threads" in device else ""
    return f"{device['name']}{threads}, {results['dtype']}"


def setting_line(results: Results) -> str:
    settings = results["settings"]
    names = ", ".join(map(short_name, settings["suites"]))
    count, conversations = settings["num_prompts"], settings.get("conversations", settings["num_prompts"])
    prompts = plural(count, "prompt")
    if conversations < count:
        prompts = f"{plural(conversations, 'conversation')}, {plural(count, 'turn')}"
    batch = ", ".join(map(str, settings.get("batch_sizes") or [settings["batch_size"]]))
    batch = f"{batch} in flight" if "server" in results else f"batch {batch}"
    rule = "" if results.get("rule", "match") == "match" else f", rule {results['rule']}"
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0}
    kept = {name: value for name in neutral if (value := settings.get(name, neutral[name])) != neutral[name]}
    filters = [f"{name.replace('_', '-')} {value:g}" for name, value in kept.items()]
    new = f"{settings['max_new_tokens']} new tokens"
    return f"{prompts} of {names}, {', '.join([new, *filters])}, {batch}{rule}; {device_text(results)}"


def subtitle(results: Results) -> str:
    if "heads" not in results:
        return setting_line(results)
    plain = {
        f"{sampling_text(m['temperature'])}{point_text(m)}": m["baseline"]["tokens_per_second"]
        for m in results["measurements"]
    }
    speeds = ", ".join(f"{number(speed, 1)} tokens/s ({setting})" for setting, speed in plain.items())
    return f"{setting_line(results)}; plain decoding: {speeds}"


def listed(results: Results) -> list[Results]:
    """Return the measurements of several heads to list: all of them, or, after a search, the fastest."""
    return fastest(results) if AUTO in results["settings"]["trees"] and is_exact(results) else results["measurements"]


def fastest(results: Results) -> list[Results]:
    """Return the headline setting of each head at each temperature, batch size and context."""
    groups: dict[tuple[Any, ...], list[Results]] = {}
    for m in results["measurements"]:
        groups.setdefault((m.get("head"), m["temperature"], point_text(m)), []).append(m)
    return [group[headline(group)] for group in groups.values()]


def divergence_text(divergence: Results) -> str:
    tokens = [f"{MISSING} (it ended)" if t is None else repr(t) for t in (divergence["plain_text"], divergence["text"])]
    reference = "plain" if divergence.get("against", "plain") == "plain" else "its first run"
    return (
        f"{divergence['suite']} {divergence['prompt']}, {divergence['tree']}, "
        f"{sampling_text(divergence['temperature'])}, token {divergence['position']}: "
        f"{reference} {tokens[0]}, here {tokens[1]}; "
        f"top-two margin {divergence['top_two_margin']:.2e}"
    )


def busy_warning(measurements: Sequence[Results]) -> str | None:
    """Return a warning that something else used the machine, or None."""
    disturbed = [m for m in measurements if why_unreliable(m) == MACHINE_BUSY]
    if not disturbed:
        return None
    seen = "a measured or predicted speedup exceeded tau, which no draft can do"
    if uneven := [most_uneven(m) for m in disturbed if is_uneven(m)]:
        kind, mean, median = max(uneven, key=lambda found: found[1] / found[2])
        seen = f"{kind} took {number(mean)} ms on average and {number(median)} in the median"
    without = no_speedup(disturbed, measurements)
    return f"{seen}: something else used this machine; {without}; measure again while the machine is idle"


def no_speedup(unreliable: Sequence[Results], measurements: Sequence[Results]) -> str:
    which = "" if len(unreliable) == len(measurements) else f" for {len(unreliable)} of {len(measurements)} settings"
    return f"no speedup is stated{which}"


def few_warning(measurements: Sequence[Results]) -> str | None:
    """Return a warning that the figures are of few prompts, or None. An output that ends with its first token is in no
    figure."""
    least = max(measurements, key=lambda m: m.get("undecoded", 0))
    prompts, undecoded = least["exact"]["prompts"], least.get("undecoded", 0)
    decoded = prompts - undecoded
    parts = []
    if undecoded:
        which = f"{undecoded} of {plural(prompts, 'output')} ({sampling_text(least['temperature'])})"
        parts.append(f"{which} ended with the first token and are in no figure")
    if decoded < FEW:
        few = plural(decoded, "prompt")
        parts.append(f"figures of {few} say little of other prompts, and intervals over so few are too narrow")
    return "; ".join(parts) or None


def head_warnings(head: Results, measurements: Sequence[Results]) -> list[str]:
    """Return the warnings about one head: differences between an engine's reading of a published head and ours, or
    drafts that are deeper than the training of one of our heads."""
    if origin := head.get("origin"):
        return [f"read as {origin['form']}: {line}" for line in origin["differs"]]
    trained = head["config"].get("depth")
    deep = [m for m in measurements if trained is not None and len(m["alpha"]) > trained]
    if not deep:
        return []
    deepest = max(deep, key=lambda m: len(m["alpha"]))
    beyond = [(depth, alpha) for depth, alpha in enumerate(deepest["alpha"], start=1) if depth > trained]
    rates = ", ".join(f"{percent(alpha)} at depth {depth}" for depth, alpha in beyond if alpha is not None)
    return [
        f"drafted {len(deepest['alpha'])} deep, trained for {trained}: beyond that, {deepest['tree']} "
        f"({sampling_text(deepest['temperature'])}) accepted {rates or 'nothing, as no round came so deep'}"
    ]


def trained_otherwise(results: Results) -> dict[str, list[str]]:
    """Return what differs in the training of each head from that of the first trained one: its data, its budget of
    tokens. Heads without a difference, or of which nothing is known, are left out."""
    known = [head for head in results["heads"] if head.get("data_sha256") and head.get("budget_tokens")]
    found = {}
    for head in known[1:]:
        data = head["data_sha256"] != known[0]["data_sha256"]
        budget = abs(head["budget_tokens"] / known[0]["budget_tokens"] - 1) > SAME_BUDGET
        if what := ["other data"] * data + ["other budget"] * budget:
            found[head["name"]] = what
    return found


def training_warning(results: Results) -> list[str]:
    which = "; ".join(f"{name}: {' and '.join(what)}" for name, what in trained_otherwise(results).items())
    return [f"heads trained otherwise than the first ({which}): figures compare heads, not methods"] if which else []


def warnings(results: Results) -> list[str]:
    measurements = results["measurements"]
    if "heads" in results:
        own = [(head, [m for m in measurements if m["head"] == head["name"]]) for head in results["heads"]]
        found = [f"head {head['name']}: {line}" for head, ms in own for line in head_warnings(head, ms)]
        found += training_warning(results)
    else:
        found = head_warnings(results["head"], measurements)
    found += [
        f"{head.get('name') or 'this head'}: {head['unserved']}" for head in heads_of(results) if head.get("unserved")
    ]
    slow = []
    for temperature, own_figures in by_temperature(measurements).items():
        known = [m for m in own_figures if why_unreliable(m) is None]
        if len(known) == len(own_figures) and all(m["speedup"]["measured"] < 1 for m in known):
            slow.append(sampling_text(temperature))
    if slow:
        found.append(f"plain decoding is faster than every draft measured ({', '.join(slow)})")
    if few := few_warning(measurements):
        found.append(few)
    prompts = results["settings"]["num_prompts"]
    if (distinct := results["settings"].get("distinct_prompts", prompts)) != prompts:
        different = f"{distinct} of {prompts} prompts are different"
        found.append(f"{different}: the intervals, which take each for another, are too narrow")
    if results["target"].get("two_tables"):
        found.append(
            "the target's config.json ties its embeddings and its output head, and its checkpoint holds two tables "
            "that differ: both were used, and an engine that ties them serves another model"
        )
    exact = results["exact"]
    if exact.get("against") == "plain server" and exact["identical"] < exact["prompts"]:
        found.append("some texts are not the plain server's; only the target here could tell rounding from an error")
    if short := [m for m in measurements if why_unreliable(m) == TOO_FEW_TOKENS]:
        without = no_speedup(short, measurements)
        found.append(f"{TOO_FEW_TOKENS} were timed: {without}; allow more new tokens, or take more prompts")
    return found + [busy for busy in [busy_warning(measurements)] if busy]


def by_temperature(measurements: Sequence[Results]) -> dict[float, list[Results]]:
    groups: dict[float, list[Results]] = {}
    for m in measurements:
        groups.setdefault(m["temperature"], []).append(m)
    return groups


def search_line(search: Results) -> str:
    """Return a line with the result of a search for the best draft. Speedups that are not reliable are no part of
    it."""
    measured, chosen, left_out = search["measured"], search["chosen"], search.get("unreliable", ())
    looked = f"looked at {len(search['curve'])} drafts, " if search["curve"] else ""
    sampling = sampling_text(search["temperature"])
    line = f"auto{point_text(search)}, {sampling}: {looked}measured {', '.join(search['proposed'])}"
    if chosen is None:
        return f"{line}; no speedup of those measured is reliable, so none of them is chosen"
    named = f"{len(measured)} measured" + (f" reliably and {len(left_out)} not" if left_out else "")
    if measured[chosen] < 1 and not left_out:
        return f"{line}; plain decoding is faster than all {named}, {chosen} is next ({measured[chosen]:.2f}x)"
    return f"{line}; of {named}, {chosen} is the fastest ({measured[chosen]:.2f}x)"


def setting_text(figures: Results) -> str:
    return f"{figures['tree']}{point_text(figures)}, {sampling_text(figures['temperature'])}"


def point_text(figures: Results) -> str:
    names = {"batch_size": "batch", "context": "context"}
    return "".join(f", {word} {figures[name]}" for name, word in names.items() if figures.get(name))


def point_of(results: Results, figures: Results, name: str) -> int | None:
    """Return the depth, batch size or context of a setting. Prompts that were not cut or filled have no context."""
    value: int | None = figures.get(name, results["settings"]["batch_size"] if name == "batch_size" else None)
    return value


def where_text(results: Results) -> str:
    return results["server"]["name"] if "server" in results else "here"


def verdicts(results: Results) -> list[str]:
    """Return the answer to whether a draft pays at each temperature, as in `chain:5 pays: 1.36x [1.24, 1.49] greedy`
    and `no draft pays at T = 1`."""
    if not is_exact(results):
        wrong = plural(len(results["exact"]["divergences"]), "output")
        return [f"{wrong} differed from plain decoding: no speedup is stated"]
    measurements = results["measurements"]
    alone = [head.get("name") for head in heads_of(results) if head.get("unserved")]
    parts = [verdict_at(own_figures, alone) for own_figures in by_temperature(measurements).values()]
    if all(map(why_unreliable, measurements)):
        parts.insert(0, f"speedup {speedup_text(measurements[0])}")
    return parts


def verdict_at(measurements: Sequence[Results], alone: Collection[str | None]) -> str:
    """Return the verdict on the settings of one temperature, by the fastest reliable one at each batch size and
    context: where a draft gains most, and where none pays or nothing is known, or where it gains least. `alone`:
    heads that no engine serves."""
    sampling = sampling_text(measurements[0]["temperature"])
    reliable = [m for m in measurements if why_unreliable(m) is None]
    if not reliable:
        longest = max(measurements, key=lambda m: m["tau"]["mean"])
        return f"tau {tau_text(longest)} with {draft_name(longest)}, {sampling}"
    fastest: dict[str, Results] = {}
    for m in sorted(reliable, key=lambda m: m["speedup"]["measured"]):
        fastest[point_text(m)] = m
    ranked = sorted(fastest.values(), key=lambda m: m["speedup"]["measured"], reverse=True)
    paying = [m for m in ranked if m["speedup"]["measured"] > 1]
    failing = ranked[len(paying) :]
    said = []
    for m in [*paying[:1], *([] if failing else paying[1:][-1:])]:
        ends = m["speedup"]["ci95"]
        pays = "pays" if ends is not None and None not in ends and ends[0] > 1 else "may pay"
        pays += ", in this runtime only" if m.get("head") in alone else ""
        at = sampling if sampling == "greedy" else f"at {sampling}"
        said.append(f"{tree_name(m)} {pays}: {speedup_text(m)} {at}{point_text(m)}")
    points = list(dict.fromkeys(map(point_text, measurements)))
    at = "at greedy decoding" if sampling == "greedy" else f"at {sampling}"
    if failing:
        of = "" if len(reliable) == len(measurements) else f" of the {len(reliable)} measured"
        where, best = point_text(failing[0]), f"{tree_name(failing[0])}: {speedup_text(failing[0])}"
        if len(failing) > 1:
            where = joined_points(map(point_text, failing))
            best = f"best: {draft_name(failing[0])}: {speedup_text(failing[0])}"
        if 1 < len(failing) == len(points):
            names = {"batch_size": "batch size", "context": "context"}
            where = f" at any {' or '.join(word for name, word in names.items() if failing[0].get(name))}"
        said.append(f"no draft{of} pays {at}{where} ({best})")
    if unknown := [point for point in points if point not in fastest]:
        said.append(f"speedup not measured {at}{joined_points(unknown)}")
    return "; ".join(said)


def joined_points(points: Iterable[str]) -> str:
    """Return several batch sizes and contexts, as in `, batch 4 and batch 16`."""
    return f", {' and '.join(point.removeprefix(', ') for point in points)}"


def pays(results: Results) -> bool:
    """Return True if a reliable speedup above 1 was measured."""
    return any(m["speedup"]["measured"] > 1 for m in results["measurements"] if why_unreliable(m) is None)


def serve_label(results: Results) -> str:
    """Return the words before the command that serves the head."""
    return "serve it" if pays(results) else "to measure it there"


def heads_of(results: Results) -> list[Results]:
    return results["heads"] if "heads" in results else [results["head"]] if "head" in results else []


def tree_name(figures: Results) -> str:
    return f"{figures['head'] if isinstance(figures.get('head'), str) else ''} {figures['tree']}".strip()


def draft_name(figures: Results) -> str:
    return tree_name(figures) + point_text(figures)


def command_text(results: Results) -> str | None:
    return shlex.join(results["command"]) if results.get("command") else None
