"""report.html and compare.html: self-contained pages, light and dark, without scripts or external resources."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from eval.benchmark.results import Results
from eval.reporting import format
from eval.reporting.drawing import COLOURS, Chart, inline_svg
from eval.reporting.format import BRACKETS, NOT_RELIABLE, TURNS

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


@dataclass(frozen=True)
class Table:
    """Rows of cells. The first cell of a row is its name. A cell that contains NOT_RELIABLE is highlighted."""

    title: str
    notes: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    """Indices of rows in bold."""


def render_page(
    results: Results, charts: Sequence[Chart], remarks: Sequence[str] = (), serve: str | None = None
) -> str:
    """Return the page of a results.json or of a compare.json. `remarks` stand in the place of charts of few points;
    `serve` is the command that serves the head."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"svg": inline_svg, "sentence": format.sentence, "number": format.number}
    several = "heads" in results
    if several:
        page: dict[str, Any] = {"tiles": [], "tables": [comparison_table(results)], "samples": [], "loops": ""}
        heads = [(head["name"], head_facts(head)) for head in results["heads"]]
    else:
        page = {
            "tiles": tiles(results),
            "tables": [settings_table(results), *suites_table(results)],
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
        is_in_distribution="kind" in results["exact"],
        light=COLOURS,
        dark=DARK,
        not_reliable=NOT_RELIABLE,
    )


def tiles(results: Results) -> list[Tile]:
    """Return the tiles of the headline's figures."""
    speed, plain, tau = results["speedup"], results["baseline"], results["tau"]
    rate = f"tokens/s, {format.number(plain['ms_per_token'])} ms a token"
    own = Tile("plain decoding", format.number(plain["tokens_per_second"], 0), rate)
    note = interval_note(tau["ci95"], "plain decoding has 1")
    length = Tile("tau, tokens per target pass", format.number(tau["mean"]), note)
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
    """Return the ends of a 95% interval, or `otherwise` if there is none."""
    if interval is None or None in interval:
        return otherwise
    return f"95% interval {format.number(interval[0])} to {format.number(interval[1])}"


def settings_table(results: Results) -> Table:
    """Return the table of all measured settings."""
    exact, rows = format.is_exact(results), []
    for m in results["measurements"]:
        speed, plain = m["speedup"], format.number(m["baseline"]["tokens_per_second"], 1)
        last = format.exact_cell(m)
        if exact:
            last = f"{format.number(speed['predicted'])}x" if format.why_unreliable(m) is None else format.MISSING
        cells = [format.setting_text(m), format.speedup_cell(m), format.tau_text(m), plain]
        rows.append([*cells, format.speculative_text(m), last])
    searches = [format.search_line(search) for search in results.get("auto", ()) if exact]
    left_out = format.left_out_text(results)
    turns = f"Plain and speculative decoding took turns on the same prompts. {BRACKETS} {left_out}".rstrip()
    headline = (results["tree"], results["temperature"])
    return Table(
        "Settings measured",
        [*map(format.sentence, searches), turns],
        ["draft", "speedup", "tau", "plain tok/s", "speculative tok/s", "predicted" if exact else "identical"],
        rows,
        frozenset(n for n, m in enumerate(results["measurements"]) if (m["tree"], m["temperature"]) == headline),
    )


def suites_table(results: Results) -> list[Table]:
    """Return the table of suites and their categories, or no table if there is one suite without categories."""
    if len(results["suites"]) < 2:
        return []
    rows = []
    for name, m in results["suites"].items():
        shown = format.short_name(name) if "/" not in name else f"\N{EN SPACE}{name.split('/', 1)[1]}"
        cells = [shown, format.speedup_cell(m), format.tau_text(m)]
        rows.append([*cells, str(m["exact"]["prompts"]), format.percent(m["loop_share"])])
    note = f"{format.setting_text(results)}. Loops: outputs whose end repeats itself, which are easy to draft."
    return [Table("By suite", [note], ["suite", "speedup", "tau", "prompts", "loops"], rows)]


def comparison_table(results: Results) -> Table:
    """Return the table of several heads, without their kinds and sizes, which the page shows below."""
    rows = []
    for m in format.fastest(results):
        name = f"{m['head']}, {format.setting_text(m)}"
        rows.append([name, format.speedup_cell(m), format.tau_text(m), format.accepted_text(m), format.exact_cell(m)])
    columns = ["head and draft", "speedup", "tau", "accepted by depth", "identical"]
    turns = f"{TURNS} {format.left_out_text(results['measurements'][0])}".rstrip()
    return Table("Heads and drafts", [turns], columns, rows)


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
    """Return the facts of the target that are needed to repeat the measurement."""
    facts: Facts = [("name", target["name"])]
    size = f"{format.count(target['parameters'])} parameters, {target['layers']} layers of {target['hidden_size']}"
    facts += [("architecture", target["architecture"]), ("size", size), ("vocabulary", f"{target['vocab_size']:,}")]
    if weights := target.get("weight_bytes"):
        facts.append(("weights", f"{weights / 1e6:,.1f} MB"))
    facts.append(("fingerprint", target["fingerprint"]))
    return facts


def head_facts(head: Results) -> Facts:
    """Return the facts of a head."""
    layers = ", ".join(map(str, head["aux_layer_ids"])) or "none"
    size = f"{format.count(head['parameters'])} parameters"
    form = [("read as", origin["form"])] if (origin := head.get("origin")) else []
    return [("kind", head["kind"]), ("path", head["path"]), *form, ("size", size), ("aux_layer_ids", layers)]


def measurement_facts(results: Results) -> list[tuple[str, Facts]]:
    """Return the facts of the measurement and the machine."""
    settings = results["settings"]
    measurement = [
        ("prompts", f"{settings['num_prompts']} of {settings['prompts']}"),
        ("prompt hash", settings["prompts_hash"]),
        ("new tokens", f"{settings['max_new_tokens']} at most"),
        ("rule", settings.get("rule", "match")),
        ("batch", settings["batch_size"]),
        ("repeats", settings["repeats"]),
        ("seed", settings["seed"]),
    ]
    machine = [("device", format.device_text(results)), *results["versions"].items()]
    return [("Measurement", measurement), ("Machine", machine)]
