"""report.html and compare.html: self-contained pages, light and dark, which ask for nothing from the net. The replay of
texts needs a script, and nothing else does."""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from eval.measure.results import Results
from eval.measure.roofline import lines
from eval.pages import format
from eval.pages.drawing import COLOURS, Chart, inline_svg
from eval.pages.format import NOT_RELIABLE
from eval.pages.several import several_values
from eval.pages.tables import Table, first_token_text, latency_table, settings_table, suites_table

TEMPLATE = Path(__file__).with_name("report.html.j2")
DARK = {
    "card": "#181c23",
    "ink": "#e8eaee",
    "soft": "#9aa3b2",
    "line": "#2a303a",
    "draft": "#58aef0",
    "verify": "#f0924a",
    "accept": "#5cc396",
    "commit": "#8b94a3",
    "plain": "#454d5b",
    "faded": "#9aa3b2",
}
"""The colours of charts on a dark page."""
MOST_DIVERGENCES = 20
Facts = list[tuple[str, Any]]


@dataclass(frozen=True)
class Tile:
    name: str
    value: str
    note: str
    caution: str = ""
    """Reason not to trust the figure."""


def render_page(
    results: Results,
    charts: Sequence[Chart],
    remarks: Sequence[str] = (),
    serve: str | None = None,
    beside: Sequence[Table] = (),
) -> str:
    """Return the page of a results.json. `remarks` stand in the place of charts of few points; `serve` is the command
    that serves the head, and `beside` tables of other measurements of it."""
    return render(
        heading=format.heading(results),
        setting=f"{format.subtitle(results)}.",
        verdicts=format.verdicts(results),
        serve=serve,
        serve_label=format.serve_label(results),
        tiles=tiles(results),
        exact=format.is_exact(results),
        audit=format.audit_line(results),
        divergences=places(results["exact"]["divergences"]),
        near_ties=places(results["exact"].get("near_ties", ())),
        warnings=format.warnings(results),
        replays=[replay(results, sample) for sample in typical_first(results)],
        draft=format.setting_text(results),
        device=format.device_text(results),
        charts=[chart for chart in charts if not chart.folded],
        tables=[settings_table(results), *beside, *suites_table(results)],
        diagnosis=[chart for chart in charts if chart.folded],
        folded_tables=latency_table(results),
        remarks=remarks,
        roofline="\n".join(lines(results["roofline"])) if "roofline" in results else None,
        loops=format.percent(results["loop_share"]),
        command=format.command_text(results),
        date=results["measured_at"][:10],
        facts=[
            ("Target", target_facts(results["target"])),
            ("Head", head_facts(results["head"])),
            *measurement_facts(results),
        ],
        is_served="server" in results,
        is_in_distribution="kind" in results["exact"],
    )


def render_several(given: Sequence[Results]) -> str:
    """Return the page of several results.json and compare.json."""
    found = [divergence for results in given for divergence in results["exact"]["divergences"]]
    kinds = {"is_served": False, "is_in_distribution": any("kind" in results["exact"] for results in given)}
    return render(**several_values(given), divergences=places(found), serve=None, tiles=[], replays=[], **kinds)


def render_progress(lines: Sequence[str], charts: Sequence[Chart]) -> str:
    """Return the page of a run without a measurement of its head: where it is, and its charts."""
    models = [{"table": None, "charts": charts, "verdicts": []}]
    kinds = {"is_served": False, "is_in_distribution": False}
    nothing: dict[str, Any] = dict.fromkeys(("divergences", "warnings", "tables", "sources", "tiles", "replays"), ())
    page = {"heading": lines[0], "verdicts": lines, "exact": True, "audit": None, "serve": None, "models": models}
    return render(**page, **nothing, **kinds)


def render(**values: Any) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"svg": inline_svg, "sentence": format.sentence, "number": format.number, "sha256": sha256}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(**values, light=COLOURS, dark=DARK, not_reliable=NOT_RELIABLE)


def sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def places(divergences: Sequence[Results]) -> list[str]:
    return [format.divergence_text(found) for found in divergences[:MOST_DIVERGENCES]]


def tiles(results: Results) -> list[Tile]:
    """Return the tiles of the headline's figures."""
    speed, plain, tau = results["speedup"], results["baseline"], results["tau"]
    note = interval_note(tau["ci95"], "plain decoding has 1")
    length = Tile("tau, tokens per target pass", format.number(tau["mean"]), note)
    if plain is None:
        speed_tile = Tile("tokens per second", format.speculative_text(results), results["server"]["name"])
        return [length, speed_tile, Tile("time to first token", first_token_text(results), "median")]
    rate = f"tokens/s, {format.number(plain['ms_per_token'])} ms a token"
    own = Tile("plain decoding", format.number(plain["tokens_per_second"], 0), rate)
    if speed is None:
        withheld = "withheld", "the audit failed"
        return [Tile("speedup", *withheld), length, own, Tile("speculative decoding", *withheld)]
    fast = results["speculative"]
    rate = f"tokens/s, {format.number(fast['ms_per_round'])} ms a round"
    if (why := format.why_unreliable(results)) is not None:
        note = format.robust_text(results) or "over plain decoding"
        return [Tile("speedup", format.MISSING, note, f"{NOT_RELIABLE}: {why}"), length, own]
    note = interval_note(speed["ci95"], "over plain decoding")
    slow = "plain decoding is faster" if speed["measured"] < 1 else ""
    return [
        Tile("speedup", f"{format.number(speed['measured'])}×", note, slow),  # noqa: RUF001
        length,
        own,
        Tile("speculative decoding", format.number(fast["tokens_per_second"], 0), rate),
    ]


def interval_note(interval: Sequence[float | None] | None, otherwise: str) -> str:
    if interval is None or None in interval:
        return otherwise
    return f"95% interval {format.number(interval[0])} to {format.number(interval[1])}"


def typical_first(results: Results) -> list[Results]:
    """Return the samples, the one whose tau is nearest to that of all prompts first."""
    mean = results["tau"]["mean"]
    return sorted(results["samples"], key=lambda sample: abs((sample["tau"] or 0) - mean))


def replay(results: Results, sample: Results) -> Results:
    """Return a sample as the template shows it: `sides`, each with its name, its parts (rounds) and how long it took.
    It has times, and the side of plain decoding, only if the speedup is reliable."""
    plain, is_timed = sample.get("plain"), format.why_unreliable(results) is None and bool(sample.get("round_ms"))
    both = [("Plain", plain), ("Drafted", sample)] if is_timed and plain else [("Drafted", sample)]
    sides = []
    for name, decoded in both:
        times = [0.0, *accumulate(decoded["round_ms"])] if is_timed else None
        count = len(decoded["pieces"])
        took = f"{count} tokens, {times[-1] / 1e3:.2f} s" if times else ""
        sides.append({"name": name, "parts": list(parts_of(decoded["pieces"], times)), "took": took})
    return {**sample, "sides": sides, "is_timed": len(both) == 2}


def parts_of(pieces: Sequence[Results], times: Sequence[float] | None) -> Iterator[Results]:
    """Yield the rounds of a text, round 0 being the prompt's own pass: when each ended in ms, its number of tokens, and
    its text in runs, drafted or not."""
    for number, group in groupby(pieces, key=lambda piece: piece["round"]):
        own = list(group)
        runs = [
            {"drafted": drafted, "text": "".join(piece["text"] for piece in run)}
            for drafted, run in groupby(own, key=lambda piece: piece["drafted"])
        ]
        drafted = sum(piece["drafted"] for piece in own)
        title = f"round {number}: {drafted} drafted and accepted, {len(own) - drafted} from the target"
        yield {
            "ends": times and round(times[number], 1),
            "tokens": len(own),
            "title": title if number else "first token, from the prompt's own pass",
            "runs": runs,
        }


def target_facts(target: Results) -> Facts:
    if target.get("parameters") is None:  # a server's, which is not here
        return [("name", target["name"])]
    size = f"{format.count(target['parameters'])} parameters, {target['layers']} layers of {target['hidden_size']}"
    return [
        ("name", target["name"]),
        ("architecture", target["architecture"]),
        ("size", size),
        ("vocabulary", f"{target['vocab_size']:,}"),
        ("weights", f"{target['weight_bytes'] / 1e6:,.1f} MB"),
        ("fingerprint", target["fingerprint"]),
    ]


def head_facts(head: Results) -> Facts:
    form = [("read as", origin["form"])] if (origin := head.get("origin")) else []
    layers = ", ".join(map(str, head["aux_layer_ids"])) or "none"
    size = f"{format.count(head['parameters'])} parameters"
    tokens = [("trained on", f"{head['trained_tokens']:,} tokens")] if head.get("trained_tokens") else []
    return [("kind", head["kind"]), ("path", head["path"]), *form, ("size", size), *tokens, ("aux_layer_ids", layers)]


def measurement_facts(results: Results) -> list[tuple[str, Facts]]:
    settings = results["settings"]
    measurement: Facts = [
        ("prompts", f"{settings['num_prompts']} of {settings['prompts']}"),
        ("prompt hash", settings["prompts_hash"]),
        ("new tokens", f"{settings['max_new_tokens']} at most"),
        ("rule", settings.get("rule", "match")),
        ("batch", ", ".join(map(str, settings.get("batch_sizes") or [settings["batch_size"]]))),
        ("repeats", settings["repeats"]),
        ("seed", settings["seed"]),
    ]
    machine: Facts = [("device", format.device_text(results)), *results["versions"].items()]
    return [("Measurement", measurement), ("Machine", machine)]
