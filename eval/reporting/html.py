"""report.html: one self-contained page, light and dark, without scripts and external resources."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from eval.benchmark.results import Results
from eval.reporting.drawing import COLOURS, Chart, inline_svg
from eval.reporting.format import (
    NOT_RELIABLE,
    adaptive_line,
    audit_line,
    count,
    device_text,
    divergence_text,
    exact_cell,
    heading,
    is_disturbed,
    is_exact,
    number,
    percent,
    sampling_text,
    search_line,
    setting_line,
    short_name,
    speedup_text,
    warnings,
    with_interval,
)

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
Facts = list[tuple[str, list[tuple[str, Any]]]]


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
    """Rows of cells, each with a name first. A cell that contains NOT_RELIABLE is highlighted."""

    title: str
    notes: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    """Indices of rows in bold."""


@dataclass(frozen=True)
class Page:
    """Parts of a page, from top to bottom."""

    heading: str
    setting: str
    exact: bool
    audit: str
    divergences: Sequence[str]
    warnings: Sequence[str]
    tables: Sequence[Table]
    facts: Facts
    footer: str
    tiles: Sequence[Tile] = ()
    samples: Sequence[Results] = ()
    samples_note: str = ""
    charts: Sequence[Chart] = field(default=(), repr=False)


def to_html(page: Page) -> str:
    """Return a page as HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"svg": inline_svg, "sentence": sentence, "number": number}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(page=page, light=COLOURS, dark=DARK, not_reliable=NOT_RELIABLE)


def sentence(line: str) -> str:
    """Return a line as a sentence."""
    return f"{line[:1].upper()}{line[1:]}."


def render_page(results: Results, charts: Sequence[Chart]) -> str:
    """Return the page of a results.json."""
    loops = f"{percent(results['loop_share'])} of all outputs end in a loop."
    return to_html(
        Page(
            heading=heading(results),
            setting=f"{setting_line(results)}. Headline setting: {results['tree']}, "
            f"{sampling_text(results['temperature'])}.",
            **audit_parts(results),
            warnings=warnings(results),
            tiles=tiles(results),
            charts=charts,
            tables=[settings_table(results), *suites_table(results)],
            samples=[sample_rounds(sample) for sample in results["samples"]],
            samples_note="Tinted and underlined text was drafted by the head and accepted; plain text is the target's "
            f"own token that ends each round. Point at a word for its round. {loops}",
            facts=[target_part(results), head_part(results["head"]), *measurement_parts(results)],
            footer=footer(results),
        )
    )


def audit_parts(results: Results) -> dict[str, Any]:
    """Return the fields of a page that state the result of the audit."""
    differing = results["exact"]["divergences"]
    return {
        "exact": is_exact(results),
        "audit": audit_line(results),
        "divergences": [divergence_text(divergence) for divergence in differing[:MOST_DIVERGENCES]],
    }


def tiles(results: Results) -> list[Tile]:
    """Return the tiles of the headline's figures."""
    speed, plain, tau = results["speedup"], results["baseline"], results["tau"]
    own = Tile(
        "plain decoding",
        number(plain["tokens_per_second"], 0),
        f"tokens/s, {number(plain['ms_per_token'])} ms a token",
    )
    length = Tile(
        "tau, tokens per target pass", number(tau["mean"]), interval_note(tau["ci95"], "plain decoding has 1")
    )
    if speed is None:
        withheld = "withheld", "the audit failed"
        return [Tile("speedup", *withheld), length, own, Tile("speculative decoding", *withheld)]
    fast = results["speculative"]
    rate = f"tokens/s, {number(fast['ms_per_round'])} ms a round"
    caution = f"{NOT_RELIABLE}: the machine was busy" if is_disturbed(results) else ""
    note = "" if caution else interval_note(speed["ci95"], "over plain decoding")
    slow = "plain decoding is faster" if speed["measured"] < 1 else ""
    return [
        Tile("speedup", f"{number(speed['measured'])}×", note, caution or slow),  # noqa: RUF001
        length,
        own,
        Tile("speculative decoding", number(fast["tokens_per_second"], 0), rate),
    ]


def interval_note(interval: Sequence[float | None] | None, otherwise: str) -> str:
    """Return the ends of a 95% interval, or `otherwise` if there is none."""
    if interval is None or None in interval:
        return otherwise
    return f"95% interval {number(interval[0])} to {number(interval[1])}"


def settings_table(results: Results) -> Table:
    """Return the table of all measured settings."""
    exact, rows = is_exact(results), []
    for m in results["measurements"]:
        speed = m["speedup"]
        rows.append(
            [
                f"{m['tree']}, {sampling_text(m['temperature'])}",
                speedup_text(m),
                with_interval(m["tau"]["mean"], m["tau"]["ci95"]),
                number(m["baseline"]["tokens_per_second"], 1),
                number(m["speculative"]["tokens_per_second"], 1) if speed else "withheld",
                f"{number(speed['predicted'])}x" if speed and exact else exact_cell(m),
            ]
        )
    searches = [search_line(search) for search in results.get("auto", ()) if search["chosen"]]
    adaptive = [adaptive_line(m) for m in results["measurements"] if "adaptive" in m]
    headline = (results["tree"], results["temperature"])
    return Table(
        "Settings measured",
        [
            *map(sentence, [*searches, *adaptive]),
            "Plain and speculative decoding took turns on the same prompts. Brackets are 95% bootstrap intervals over "
            "prompts.",
        ],
        ["draft", "speedup", "tau", "plain tok/s", "speculative tok/s", "predicted" if exact else "identical"],
        rows,
        frozenset(n for n, m in enumerate(results["measurements"]) if (m["tree"], m["temperature"]) == headline),
    )


def suites_table(results: Results) -> list[Table]:
    """Return the table of suites and their categories, or none if there is one suite without categories."""
    if len(results["suites"]) < 2:
        return []
    rows = [
        [
            short_name(name) if "/" not in name else f"\N{EN SPACE}{name.split('/', 1)[1]}",
            speedup_text(m),
            with_interval(m["tau"]["mean"], m["tau"]["ci95"]),
            str(m["exact"]["prompts"]),
            percent(m["loop_share"]),
        ]
        for name, m in results["suites"].items()
    ]
    note = (
        f"{results['tree']}, {sampling_text(results['temperature'])}. Loops: outputs whose end repeats itself, which "
        "are easy to draft."
    )
    return [Table("By suite", [note], ["suite", "speedup", "tau", "prompts", "loops"], rows)]


def sample_rounds(sample: Results) -> Results:
    """Return a sample with its text grouped by round, and neighbours of one kind joined."""
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


def adapter_facts(adapter: Results | None) -> list[tuple[str, Any]]:
    """Return the line about the target's adapter, if it has one."""
    if not adapter:
        return []
    size = count(adapter["parameters"])
    return [("adapter", f"LoRA of rank {adapter['rank']}, {size} parameters; the audit is of the adapted target")]


def target_part(results: Results) -> tuple[str, list[tuple[str, Any]]]:
    """Return the facts of the target that are needed to repeat the measurement."""
    target = results["target"]
    return (
        "Target",
        [
            ("name", target["name"]),
            *([("grown from", grown)] if (grown := target.get("grown_from")) else []),
            ("architecture", target["architecture"]),
            (
                "size",
                f"{count(target['parameters'])} parameters, {target['layers']} layers of {target['hidden_size']}",
            ),
            ("vocabulary", f"{target['vocab_size']:,}"),
            *([("weights", f"{size / 1e6:,.1f} MB")] if (size := target.get("weight_bytes")) else []),
            ("fingerprint", target["fingerprint"]),
            *adapter_facts(target.get("adapter")),
        ],
    )


def head_part(head: Results, title: str = "Head") -> tuple[str, list[tuple[str, Any]]]:
    """Return the facts of a head."""
    return (
        title,
        [
            ("kind", head["kind"]),
            ("path", head["path"]),
            ("size", f"{count(head['parameters'])} parameters"),
            ("aux_layer_ids", ", ".join(map(str, head["aux_layer_ids"])) or "none"),
        ],
    )


def measurement_parts(results: Results) -> Facts:
    """Return the facts of the measurement and the machine."""
    settings = results["settings"]
    return [
        (
            "Measurement",
            [
                ("prompts", f"{settings['num_prompts']} of {settings['prompts']}"),
                ("prompt hash", settings["prompts_hash"]),
                ("new tokens", f"{settings['max_new_tokens']} at most"),
                ("rule", settings.get("rule", "match")),
                ("batch", settings["batch_size"]),
                ("repeats", settings["repeats"]),
                ("seed", settings["seed"]),
            ],
        ),
        ("Machine", [("device", device_text(results)), *results["versions"].items()]),
    ]


def footer(results: Results) -> str:
    """Return the definitions of the figures."""
    defined = (
        "tau counts tokens after the prefill over target passes after the prefill. Speedup is the ratio of total "
        "decode seconds, prefill left out, against plain decoding in the same runtime, on the same prompts, in the "
        "same run."
    )
    if "kind" in results["exact"]:
        return (
            f"{defined} Sampled texts differ from those of plain decoding, so the two rates are compared; no speedup "
            "is stated unless every greedy output was that of plain decoding."
        )
    return f"{defined} No speedup is stated unless every output was identical."
