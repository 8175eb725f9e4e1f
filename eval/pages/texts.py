"""Figures as text: the same in the terminal, on the page and in the model card."""

import json
import math
import re
import shlex
from collections.abc import Sequence

from eval.records.figures_schema import Divergence, Exact, Measurement
from eval.records.result_folders import short_name as short_name
from eval.records.schema import Results
from eval.records.speedup_checks import (
    AUDIT_FAILED,
    NO_BASELINE,
    TOO_FEW_TOKENS,
    contradicts,
    is_believable,
    why_unreliable,
)
from eval.runtime.sampling_params import PENALTIES, Sampling

MISSING = "–"  # noqa: RUF001
NOT_RELIABLE = "not measured"
"""Text in the place of a speedup that is not reliable. The reason follows it."""
LOCAL_MODEL = "a local model"
"""Public name of a target that is a local folder."""
BRACKETS = "Brackets are 95% bootstrap intervals over prompts."
ENOUGH_DRAWS = 2000
"""Sampled tokens that tell a probability of 0.90 from 0.85."""


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def with_interval(value: float, interval: Sequence[float] | None, *, unit: str = "") -> str:
    """Return a figure and its interval, as in `2.46 [2.31, 2.60]`."""
    text = number(value)
    if text == MISSING:
        return text
    return text + unit + (f" [{number(interval[0])}, {number(interval[1])}]" if interval else "")


def sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}."


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def percent(share: float | None, digits: int = 0) -> str:
    return MISSING if share is None else f"{100 * share:.{digits}f}%"


def count(value: float) -> str:
    """Return a large count in short, as in `1.2k`, `7.3M`, `8.0B`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return str(int(value))


def as_markdown(text: str) -> str:
    """Return a text escaped for Markdown. Names of folders may contain any character."""
    return re.sub(r"[\\`*{}\[\]<>|#~&$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def code_span(name: str) -> str:
    """Return a name as a code span in Markdown, with a fence longer than any run of backticks in the name."""
    longest = max(map(len, re.findall("`+", name)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{name}{space}{fence}"


# Figures of a setting


def tau_text(m: Measurement) -> str:
    return with_interval(m.tau.mean, m.tau.ci95)


def draft_uses(m: Measurement) -> dict[str, str]:
    """Return `412 of 1,020, 3.10 tokens each` for the lookup and for the head of a draft that has both."""
    if m.lookup is None:
        return {}
    rounds, accepted = sum(m.accepted_histogram), sum(n * count for n, count in enumerate(m.accepted_histogram))
    parts = {
        f"the lookup, after matches of {m.least_match}": (m.lookup.rounds, m.lookup.accepted),
        "the head": (rounds - m.lookup.rounds, accepted - m.lookup.accepted),
    }
    return {
        name: f"{count:,} of {rounds:,}" + (f", {number(1 + gain / count)} tokens each" if count else "")
        for name, (count, gain) in parts.items()
    }


def lookup_cell(m: Measurement) -> str:
    """Return the share of rounds that a lookup drafted before a head, and their tokens, as in `40%, 3.10 each`."""
    if m.lookup is None:
        return MISSING
    rounds = m.lookup.rounds
    each = f", {number(1 + m.lookup.accepted / rounds)} each" if rounds else ""
    return f"{percent(rounds / max(sum(m.accepted_histogram), 1))}{each}"


def speedup_text(m: Measurement) -> str:
    """Return `1.62x [1.55, 1.70]`, `not measured: the machine was busy`, or `withheld`."""
    if (why := why_unreliable(m)) is not None:
        return "withheld" if why == AUDIT_FAILED else f"{NOT_RELIABLE}: {why}"
    assert m.speedup is not None
    return with_interval(m.speedup.measured, m.speedup.ci95, unit="x")


def robust_text(m: Measurement) -> str | None:
    """Return `ratio of medians 1.5x`, to be printed beside tau where the machine was busy, or None if that ratio cannot
    be true either or is not known."""
    ratio = m.speedup.ratio_of_medians if m.speedup else math.nan
    if math.isnan(ratio) or why_unreliable(m) in (None, TOO_FEW_TOKENS) or not is_believable(ratio, m.tau.mean):
        return None
    return f"ratio of medians {number(ratio)}x"


def speedup_cell(m: Measurement) -> str:
    return "; ".join(filter(None, (speedup_text(m), robust_text(m))))


def predicted_text(m: Measurement) -> str:
    """Return the predicted speedup, or nothing if it may not be printed or contradicts the measured one."""
    if m.speedup is None or why_unreliable(m) is not None or contradicts(m):
        return MISSING
    predicted = number(m.speedup.predicted)
    return predicted if predicted == MISSING else f"{predicted}x"


def speculative_text(m: Measurement) -> str:
    if (why := why_unreliable(m)) not in (None, NO_BASELINE):
        return "withheld" if why == AUDIT_FAILED else NOT_RELIABLE
    return number(m.speculative.tokens_per_second, 1)


def first_token_text(m: Measurement) -> str:
    text = number(m.first_token_ms.p50, 1)
    return text if text == MISSING else f"{text} ms"


def reached(alpha: Sequence[float | None]) -> Sequence[float | None]:
    """Return the acceptance of each depth, up to one depth past the deepest that any round reached. Deeper entries of a
    long draft have no value."""
    deepest = max((depth for depth, share in enumerate(alpha, start=1) if share is not None), default=0)
    return alpha[: deepest + 1]


def exact_cell(exact: Exact) -> str:
    """Return the number of prompts with plain decoding's output, as in `12 of 12`, or `in distribution`."""
    if exact.identical is None:
        return "in distribution" if exact.against in (None, "distribution") else "not compared"
    return f"{exact.identical} of {exact.prompts}{near_tie_text(exact)}"


def near_tie_text(exact: Exact) -> str:
    """Return `, 3 of them but for near-ties`, or an empty string. A near-tie is a choice between two tokens whose
    logits differ by no more than the rounding of a sum in a narrow dtype."""
    return f", {len(exact.near_ties)} of them but for near-ties" if exact.near_ties else ""


def left_out_text(m: Measurement) -> str:
    if not m.turns.left_out:
        return ""
    whole = m.turns.left_out + m.turns.timed
    return f"The slowest tenth of the turns is left out of the times of both: {m.turns.left_out} of {whole}."


def divergence_text(divergence: Divergence) -> str:
    plain, here = (
        f"{MISSING} (it ended)" if text is None else repr(text) for text in (divergence.plain_text, divergence.text)
    )
    reference = "plain" if divergence.against == "plain" else "its first run"
    return (
        f"{divergence.suite} {divergence.prompt}, {divergence.tree}, {sampling_text(divergence.temperature)}, "
        f"token {divergence.position}: {reference} {plain}, here {here}; "
        f"top-two margin {divergence.top_two_margin:.2e}"
    )


# Names of settings


def sampling_text(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"


def point_text(batch_size: int | None, context: int | None) -> str:
    """Return `, batch 4, context 512`, with those of the two that were measured at several values."""
    return (f", batch {batch_size}" if batch_size else "") + (f", context {context}" if context else "")


def point_of(m: Measurement) -> str:
    return point_text(m.batch_size, m.context)


def draft_name(m: Measurement) -> str:
    return f"{m.head} {m.tree}".strip() + point_of(m)


def setting_text(m: Measurement) -> str:
    return f"{m.tree}{point_of(m)}, {sampling_text(m.temperature)}"


# A whole measurement


def heading(results: Results) -> str:
    target = short_name(results.target.name)
    if results.is_comparison:
        return f"{plural(len(results.heads), 'head')} on {target}"
    served = f", served by {results.server.name}" if results.server else ""
    return f"{results.head.kind} on {target}{served}"


def where_text(results: Results) -> str:
    return results.server.name if results.server else "here"


def device_text(results: Results) -> str:
    threads = f", {plural(results.device.threads, 'thread')}" if results.device.threads else ""
    return f"{results.device.name}{threads}, {results.dtype}"


def setting_line(results: Results) -> str:
    settings, rule = results.settings, results.headline.rule
    prompts = plural(settings.num_prompts, "prompt")
    if settings.conversations not in (None, settings.num_prompts):
        prompts = f"{plural(settings.conversations, 'conversation')}, {plural(settings.num_prompts, 'turn')}"
    words = [f"{settings.max_new_tokens} new tokens"]
    words += [f"top-k {settings.top_k}"] * (settings.top_k != 0)
    words += [f"top-p {settings.top_p:g}"] * (settings.top_p != 1)
    words += [f"min-p {settings.min_p:g}"] * (settings.min_p != 0)
    for name, value, none in zip(PENALTIES, settings.penalties, Sampling().penalties, strict=True):
        words += [f"{name.replace('_', ' ')} {value:g}"] * (value != none)
    words += [f"template {name}={json.dumps(value)}" for name, value in results.target.template.items()]
    words.append(f"{batch_text(results)} in flight" if results.server else f"batch {batch_text(results)}")
    words += [f"rule {rule}"] * (rule != "match" and not results.is_comparison)
    return f"{prompts} of {', '.join([*map(short_name, settings.suites), *words])}; {device_text(results)}"


def batch_text(results: Results) -> str:
    return ", ".join(map(str, results.settings.batch_sizes or [results.settings.batch_size]))


def subtitle(results: Results) -> str:
    if not results.is_comparison:
        return setting_line(results)
    plain = {
        f"{sampling_text(m.temperature)}{point_of(m)}": m.baseline.tokens_per_second
        for m in results.measurements
        if m.baseline is not None
    }
    speeds = ", ".join(f"{number(speed, 1)} tokens/s ({setting})" for setting, speed in plain.items())
    return f"{setting_line(results)}; plain decoding: {speeds}"


def audit_line(results: Results) -> str:
    """Return the line that states how many outputs were the target's own."""
    exact = results.exact
    drawn = [m for m in results.measurements if m.exact.draws is not None]
    sampled = "; ".join(f"at T = {m.temperature:g}{point_of(m)}, {m.exact.draws}{few_draws(m)}" for m in drawn)
    if exact.against == "distribution":
        return sampled
    if exact.against == "nothing":
        return (
            "texts were not compared: with the target here (--target) greedy ones are compared with plain decoding's, "
            "and sampled ones with its distribution; a plain server (--plain-server) is compared at temperature 0"
        )
    more = f"; {sampled}" if sampled else ""
    if exact.against == "plain server":
        return f"texts equal to the plain server's: {exact.identical} of {exact.prompts}{more}"
    if exact.greedy is not None:
        return (
            f"exact in distribution under rule {results.headline.rule}: sampled text is a draw from the target's "
            "distribution, another than plain decoding's; at temperature 0 plain decoding's own tokens: "
            f"{exact.greedy.identical} of {exact.greedy.prompts} prompts{near_tie_text(exact)}"
        )
    compared = sum(m.exact.identical is not None for m in results.measurements)
    pooled = f" ({exact.prompts // compared} prompts x {compared} settings)" if compared > 1 else ""
    counted = f"{exact.identical} of {exact.prompts} prompts{pooled}{near_tie_text(exact)}"
    return f"output identical to plain decoding: {counted}{more}"


def few_draws(m: Measurement) -> str:
    assert m.exact.draws is not None
    return ", too few to tell a small difference" if m.exact.draws.tokens < ENOUGH_DRAWS else ""


def command_text(results: Results) -> str | None:
    return shlex.join(results.command) if results.command else None
