"""report.html and compare.html: self-contained pages, light and dark, which ask for nothing from the net. The replay of
texts needs a script, and nothing else does."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from eval.pages import texts
from eval.pages.drawing import COLOURS, Chart, inline_svg
from eval.pages.report_tables import (
    Row,
    beside_table,
    comparison_table,
    headline_table,
    latency_table,
    roofline_table,
    rows_of,
    settings_table,
    suites_table,
)
from eval.pages.training_charts import training_charts
from eval.pages.verdicts import (
    command_of,
    serve_label,
    training_warning,
    verdicts,
    verdicts_on,
    warnings,
    why_no_command,
)
from eval.records.learning_curve import held_out_lines
from eval.records.results import plain
from eval.records.schema import Decoded, Results, Sample
from eval.records.speedup_checks import served_index, verdict_of, why_unreliable

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
OPTIONAL = (
    *(
        "setting",
        "serve",
        "serve_label",
        "why_not",
        "tiles",
        "audit",
        "is_exact",
        "divergences",
        "warnings",
        "replays",
        "is_served",
    ),
    *("is_in_distribution", "diagnosis", "all_settings", "sources", "facts"),
)
"""Names of the template that not every page has."""
MAX_DIVERGENCES = 20


def render_page(results: Results, charts: Sequence[Chart], serve: str | None, others: Sequence[Results] = ()) -> str:
    """Return the page of a measurement of one head. `serve`: command that serves the head. `others`: measurements of
    the head in servers, or here if this one is of a server, the newest first."""
    headline = headline_table(results)
    tables = [settings_table(results), beside_table(results, others), suites_table(results)]
    tau = results.headline.tau.mean
    typical_first = sorted(results.samples, key=lambda sample: abs(sample.tau - tau))
    return render(
        heading=texts.heading(results),
        setting=f"{texts.subtitle(results)}.",
        verdicts=verdicts(results),
        why_not=None if serve else why_no_command(results),
        serve=serve,
        serve_label=serve_label(results),
        draft=texts.setting_text(results.headline),
        device=texts.device_text(results),
        loops=texts.percent(results.headline.loop_share),
        is_served=results.server is not None,
        is_in_distribution=results.exact.kind is not None,
        tiles=[headline.rows[n] for n in headline.marked],
        audit=texts.audit_line(results),
        is_exact=results.is_exact,
        divergences=divergence_lines(results),
        warnings=warnings(results),
        replays=[replay(results, sample) for sample in typical_first],
        parts=[
            {
                "verdicts": [],
                "charts": [chart for chart in charts if not chart.folded],
                "tables": [table for table in tables if table.rows],
            }
        ],
        diagnosis={
            "charts": [chart for chart in charts if chart.folded],
            "tables": [
                table
                for table in (headline, latency_table(results), *map(roofline_table, filter(None, [results.roofline])))
                if table.rows
            ],
            "remarks": list(held_out_lines(results.head.curve)),
            "near_ties": [texts.divergence_text(tie) for tie in results.exact.near_ties[:MAX_DIVERGENCES]],
        },
        sources=[source(results, with_warnings=False)],
        facts={
            "Target": facts(plain(results.target)),
            "Head": facts(plain(results.head)),
            "Measurement": facts(plain(results.settings)),
            "Machine": {"device": texts.device_text(results), **results.versions},
        },
    )


def render_several(measurements: Sequence[Results]) -> str:
    """Return the page of several measurements, or of one of several heads: a table of each model."""
    rows = sorted((row for results in measurements for row in rows_of(results)), key=lambda row: row.model)
    models = [list(part) for _, part in groupby(rows, key=lambda row: row.model)]
    names = [texts.short_name(group[0].results.target.name) for group in models]
    heading = f"{texts.plural(len({row.method for row in rows}), 'draft')} on {', '.join(names)}"
    parts = []
    for name, group in zip(names, models, strict=True):
        part = {
            "title": name,
            "verdicts": [(line, tone(line)) for line in verdicts_of_rows(group)] if len(models) > 1 else [],
            "serve": serve_row(group) if len(models) > 1 else None,
            "charts": training_charts({row.method: row.head.curve for row in group}),
            "tables": [comparison_table(name if len(models) == 1 else "Heads", group, with_suites=True)],
        }
        parts.append(part)
    audit = texts.audit_line(measurements[0])
    if several := len(measurements) > 1:
        compared = [results.exact for results in measurements if results.exact.identical is not None]
        identical = sum(exact.identical or 0 for exact in compared)
        prompts = sum(exact.prompts for exact in compared)
        audit = f"output identical to plain decoding: {identical} of {prompts} outputs"
        audit = f"{audit}, of {len(measurements)} measurements together"
    return render(
        heading=heading,
        setting="" if several else f"{texts.subtitle(measurements[0])}.",
        verdicts=verdicts_of_rows(models[0]) if len(models) == 1 else [heading],
        serve=serve_row(models[0]) if len(models) == 1 else None,
        serve_label="serve it",
        is_in_distribution=any(results.exact.kind for results in measurements),
        audit=audit,
        is_exact=all(results.is_exact for results in measurements),
        divergences=[line for results in measurements for line in divergence_lines(results)],
        warnings=list(why_incomparable(models)) if several else warnings(measurements[0]),
        parts=parts,
        all_settings=[
            comparison_table(texts.heading(results), rows_of(results, whole=True))
            for results in measurements
            if results.is_comparison
        ],
        sources=[source(results, with_warnings=several) for results in measurements],
    )


def render(**values: object) -> str:
    """Return the page with these values of the template's names; all others have none."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "svg": inline_svg,
        "sentence": texts.sentence,
        "number": texts.number,
        "intervals": intervals,
        "sha256": sha256,
    }
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render({**dict.fromkeys(OPTIONAL, ()), "light": COLOURS, "dark": DARK, **values})


def intervals(cell: str) -> Markup:
    """Return a cell of a table, with its intervals apart, which go below their figures where a page is narrow."""
    return Markup(re.sub(r" (\[[\d., -]+\])", r" <span>\1</span>", str(escape(cell))))


def sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def divergence_lines(results: Results) -> list[str]:
    return [texts.divergence_text(divergence) for divergence in results.exact.divergences[:MAX_DIVERGENCES]]


# Replays


def replay(results: Results, sample: Sample) -> dict[str, object]:
    """Return a sample as the template shows it: `sides`, each with its name, its rounds and how long it took. It has
    times, and the side of plain decoding, only if the speedup is reliable."""
    sides: dict[str, Decoded] = {"Drafted": sample}
    if is_timed := why_unreliable(results.headline) is None and bool(sample.round_ms) and sample.plain is not None:
        assert sample.plain is not None
        sides = {"Plain": sample.plain, "Drafted": sample}
    shown = []
    for name, decoded in sides.items():
        ends = [0.0, *accumulate(decoded.round_ms)] if is_timed else []
        took = f"{len(decoded.pieces)} tokens, {ends[-1] / 1e3:.2f} s" if ends else ""
        shown.append({"name": name, "took": took, "rounds": list(rounds_of(decoded, ends))})
    return {"sample": sample, "sides": shown, "is_timed": is_timed}


def rounds_of(decoded: Decoded, ends: Sequence[float]) -> Iterator[dict[str, object]]:
    """Yield the rounds of a text, round 0 being the prompt's own pass: when each ended in ms, its number of tokens, and
    its text in runs, drafted or not."""
    for number, group in groupby(decoded.pieces, key=lambda piece: piece.round):
        pieces = list(group)
        drafted = sum(piece.drafted for piece in pieces)
        title = f"round {number}: {drafted} drafted and accepted, {len(pieces) - drafted} from the target"
        runs = []
        for is_drafted, run in groupby(pieces, key=lambda piece: piece.drafted):
            runs.append({"drafted": is_drafted, "text": "".join(piece.text for piece in run)})
        yield {
            "ends": round(ends[number], 1) if ends else None,
            "tokens": len(pieces),
            "title": title if number else "first token, from the prompt's own pass",
            "runs": runs,
        }


# To measure it again


def facts(values: Mapping[str, object]) -> dict[str, str]:
    """Return the texts and numbers of a part of a results.json."""
    return {
        name: f"{value:,}" if isinstance(value, int) else str(value)
        for name, value in values.items()
        if value is not None and not isinstance(value, list | dict | tuple)
    }


def source(results: Results, *, with_warnings: bool) -> dict[str, object]:
    """Return what one needs to measure it again."""
    return {
        "name": texts.heading(results),
        "date": results.measured_at[:10],
        "setting": texts.setting_line(results),
        "command": texts.command_text(results),
        "warnings": warnings(results) if with_warnings else [],
    }


# Several measurements


def verdicts_of_rows(rows: Sequence[Row]) -> list[str]:
    exact = [row for row in rows if row.results.is_exact]
    failed = sorted({row.method for row in rows} - {row.method for row in exact})
    lines = [f"{method}: the audit failed, no speedup is stated" for method in failed]
    if not exact:
        return lines
    named = [row.figures.model_copy(update={"head": row.method}) for row in exact]
    return [*verdicts_on(named, [row.head.model_copy(update={"name": row.method}) for row in exact]), *lines]


def serve_row(rows: Sequence[Row]) -> str | None:
    """Return the command of the best of some rows, if a draft pays and the row is the one that the command was made
    for."""
    rows = [row for row in rows if row.results.is_exact]
    if not rows:
        return None
    best = rows[served_index([row.figures for row in rows])]
    own = [m for m in best.results.measurements if m.head == best.head.name]
    if verdict_of(best.figures) not in ("pays", "may pay") or own[served_index(own)] is not best.figures:
        return None
    return command_of(best.results, best.head)


def tone(verdict: str) -> str:
    """Return the class of a verdict's box: `good` if a draft pays, `warn` if it may or nothing is decided, else
    `plain`."""
    if re.search(r" pays(, in this runtime only)?: ", verdict):
        return "good"
    return "warn" if " may pay" in verdict or "not decided" in verdict else "plain"


def why_incomparable(models: Sequence[Sequence[Row]]) -> Iterator[str]:
    """Yield what keeps rows of one model from being compared."""
    for rows in models:
        named = {row.method: row.head.model_copy(update={"name": row.method}) for row in rows}
        if (line := training_warning(list(named.values()))) is not None:
            yield line

    def any_differ(of: Callable[[Results], str]) -> bool:
        return any(of(row.results) != of(rows[0].results) for rows in models for row in rows)

    if any_differ(lambda results: results.settings.prompts_hash):
        yield "rows were measured on different prompts: their tau does not compare"
    if any_differ(texts.device_text):
        yield "rows were measured on different machines, dtypes or engines: their speedups do not compare"
