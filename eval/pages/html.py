"""report.html and compare.html: self-contained pages, light and dark, without scripts or external resources."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from eval.measure.results import Results
from eval.pages import format
from eval.pages.drawing import COLOURS, Chart, inline_svg
from eval.pages.format import NOT_RELIABLE
from eval.pages.tables import Table, comparison_table, first_token_text, settings_table, suites_table

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
    """One large figure."""

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
    """Return the page of a results.json or of a compare.json. `remarks` stand in the place of charts of few points;
    `serve` is the command that serves the head, and `beside` a table of another measurement of it."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"svg": inline_svg, "sentence": format.sentence, "number": format.number}
    several = "heads" in results
    if several:
        page: dict[str, Any] = {"tiles": [], "tables": [comparison_table(results)], "samples": [], "loops": ""}
        heads = [(head["name"], head_facts(head)) for head in results["heads"]]
    else:
        page = {
            "tiles": tiles(results),
            "tables": [settings_table(results), *beside, *suites_table(results)],
            "samples": [sample_rounds(sample) for sample in results["samples"]],
            "loops": format.percent(results["loop_share"]),
        }
        heads = [("Head", head_facts(results["head"]))]
    shown = "" if several else f" Headline setting: {format.setting_text(results)}."
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        **page,
        heading=format.heading(results),
        setting=f"{format.subtitle(results)}.{shown}",
        verdict=format.verdict_line(results),
        serve=serve,
        remarks=remarks,
        command=format.command_text(results),
        date=results["measured_at"][:10],
        exact=format.is_exact(results),
        audit=format.audit_line(results),
        divergences=[format.divergence_text(found) for found in results["exact"]["divergences"][:MOST_DIVERGENCES]],
        warnings=format.warnings(results),
        charts=charts,
        facts=[("Target", target_facts(results["target"])), *heads, *measurement_facts(results)],
        is_served="server" in results,
        is_in_distribution="kind" in results["exact"],
        light=COLOURS,
        dark=DARK,
        not_reliable=NOT_RELIABLE,
    )


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


def sample_rounds(sample: Results) -> Results:
    """Return a sample with its text grouped by round, and adjacent pieces of one kind joined."""
    rounds = []
    for number_, group in groupby(sample["pieces"], key=lambda piece: piece["round"]):
        pieces = list(group)
        runs = [
            {"drafted": drafted, "text": "".join(piece["text"] for piece in run)}
            for drafted, run in groupby(pieces, key=lambda piece: piece["drafted"])
        ]
        drafted = sum(piece["drafted"] for piece in pieces)
        title = f"round {number_}: {drafted} drafted and accepted, {len(pieces) - drafted} from the target"
        rounds.append({"title": title if number_ else "first token, from the prompt's own pass", "runs": runs})
    return {**sample, "rounds_shown": rounds}


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
    return [("kind", head["kind"]), ("path", head["path"]), *form, ("size", size), ("aux_layer_ids", layers)]


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
