"""One page of several results: models, methods and suites, from results.json and compare.json files."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from eval.measure.prompts import suite_name
from eval.measure.results import Results
from eval.measure.speedup_checks import NO_BASELINE
from eval.pages import format
from eval.pages.charts import Dot, row_charts
from eval.pages.drawing import Chart
from eval.pages.tables import Table, comparison_table
from eval.pages.training import training_charts
from heads.registry import untrained_kind

WHOLE = "all prompts"
FEW = 3
"""Number of different settings up to which they stand above the table. All stand at the end of the page."""


@dataclass(frozen=True)
class Row:
    """The fastest setting of one head at one temperature."""

    head: Results
    results: Results
    figures: Results

    @property
    def model(self) -> str:
        target = self.results["target"]
        return str(target.get("fingerprint") or target["name"]).partition("-")[0]

    @property
    def method(self) -> str:
        """The head's kind and name, and the server that drafted with it."""
        name = self.head.get("name") or self.head["path"]
        kind, name = self.head["kind"], format.short_name(name.removesuffix("/head"))
        served = f", in {self.results['server']['name']}" if "server" in self.results else ""
        return f"{name if name.startswith(kind) else f'{kind}, {name}'}{served}"

    @property
    def suites(self) -> dict[str, Results]:
        """The figures of each suite, without categories. Older files have those of the headline setting alone."""
        names = self.results["settings"]["suites"]
        if len(names) == 1:
            return {suite_name(names[0]): self.figures}
        keys = ("tree", "temperature", "batch_size", "context")
        is_headline = all(self.figures.get(key) == self.results.get(key) for key in keys)
        own = self.figures.get("suites") or (self.results["suites"] if is_headline else {})
        return {format.short_name(name): figures for name, figures in own.items() if "/" not in name}


def rows_of(results: Results) -> list[Row]:
    heads = {head["name"]: head for head in results.get("heads", ())}
    return [Row(heads[m["head"]] if heads else results["head"], results, m) for m in format.fastest(results)]


def several_values(given: Sequence[Results]) -> dict[str, Any]:
    """Return the template's values for the page of some results."""
    rows = sorted((row for results in given for row in rows_of(results)), key=lambda row: row.model)
    models = [list(own) for _, own in groupby(rows, key=lambda row: row.model)]
    names = [format.short_name(own[0].results["target"]["name"]) for own in models]
    heading = f"{format.plural(len({row.method for row in rows}), 'draft')} on {', '.join(names)}"
    audit = format.audit_line(given[0])
    if many := len(given) > 1:
        compared = [results["exact"] for results in given if results["exact"]["identical"] is not None]
        same, whole = (sum(exact[name] for exact in compared) for name in ("identical", "prompts"))
        audit = f"output identical to plain decoding: {same} of {whole} outputs, of {len(given)} measurements together"
    return {
        "heading": heading,
        "setting": "" if many else f"{format.subtitle(given[0])}.",
        "verdicts": verdicts(models[0]) if len(models) == 1 else [heading],
        "exact": all(map(format.is_exact, given)),
        "audit": audit,
        "warnings": doubts(models) if many else format.warnings(given[0]),
        "models": [
            {
                "table": matrix(name, own),
                "charts": matrix_charts(own),
                "verdicts": verdicts(own) if len(models) > 1 else [],
            }
            for name, own in zip(names, models, strict=True)
        ],
        "tables": [comparison_table(results) for results in given if "heads" in results],
        "sources": [source(results, with_warnings=many) for results in given],
    }


def source(results: Results, *, with_warnings: bool) -> Results:
    return {
        "name": format.heading(results),
        "date": results["measured_at"][:10],
        "setting": format.setting_line(results),
        "command": format.command_text(results),
        "warnings": format.warnings(results) if with_warnings else [],
    }


def verdicts(rows: Sequence[Row]) -> list[str]:
    exact = [row for row in rows if format.is_exact(row.results)]
    named = [row.figures | {"head": row.method} for row in exact]
    heads = [row.head | {"name": row.method} for row in exact]
    failed = {row.method for row in rows} - {row.method for row in exact}
    return [
        *(format.verdicts({"exact": {"divergences": []}, "measurements": named, "heads": heads}) if named else ()),
        *(f"{method}: the audit failed, no speedup is stated" for method in sorted(failed)),
    ]


def doubts(models: Sequence[Sequence[Row]]) -> list[str]:
    """Return what keeps rows of one model from being compared."""
    heads = [[row.head | {"name": row.method} for row in rows] for rows in models]
    found = [line for own in heads for line in format.training_warning({"heads": own})]
    if any(len({row.results["settings"]["prompts_hash"] for row in rows}) > 1 for rows in models):
        found.append("rows were measured on different prompts: their tau does not compare")
    if any(len({format.device_text(row.results) for row in rows}) > 1 for rows in models):
        found.append("rows were measured on different machines, dtypes or engines: their speedups do not compare")
    return found


def suite_names(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.suites))
    return [WHOLE, *names] if len(names) != 1 else names


def matrix(name: str, rows: Sequence[Row]) -> Table:
    """Return the table of one model: in each suite's column tau above speedup."""
    suites = suite_names(rows)
    cells = [
        [
            f"{row.method}\n{format.setting_text(row.figures)}",
            *(cell(figures_in(row, suite)) for suite in suites),
            format.exact_cell(row.figures),
            size_cell(row.head),
        ]
        for row in rows
    ]
    columns = ["", *suites, "identical", "size, training"]
    note = (
        "Each cell: tau, the tokens per pass of the target, above the speedup over plain decoding in the same run. "
        f"{format.BRACKETS} A row is a head's fastest draft at a temperature."
    )
    settings = dict.fromkeys(f"{format.setting_line(row.results)}." for row in rows)
    return Table(name, [note, *settings] if len(settings) <= FEW else [note], columns, cells)


def size_cell(head: Results) -> str:
    """Return a head's parameters, above the tokens that it was trained on if they are known."""
    if not (parameters := head["parameters"]):
        return "untrained" if untrained_kind(head["path"]) else format.MISSING
    tokens = head.get("trained_tokens")
    return f"{format.count(parameters)} parameters" + (f"\n{format.count(tokens)} tokens" if tokens else "")


def figures_in(row: Row, suite: str) -> Results | None:
    return row.figures if suite == WHOLE else row.suites.get(suite)


def cell(figures: Results | None) -> str:
    if figures is None:
        return format.MISSING
    unserved = format.why_unreliable(figures) == NO_BASELINE
    return f"{format.tau_text(figures)}\n{format.MISSING if unserved else format.short_speedup(figures)}"


def matrix_charts(rows: Sequence[Row]) -> list[Chart]:
    suites = suite_names(rows)
    shown: list[dict[str, list[Dot]]] = [{}, {}]
    for row in rows:
        name = f"{row.method}, {format.setting_text(row.figures)}"
        for suite in suites[len(suites) > 1 :]:
            if (figures := figures_in(row, suite)) is None or figures["tau"]["mean"] is None:
                continue
            shown[0].setdefault(name, []).append((suite, figures["tau"]["mean"], figures["tau"]["ci95"]))
            if format.why_unreliable(figures) is None:
                speedup = figures["speedup"]
                shown[1].setdefault(name, []).append((suite, speedup["measured"], speedup["ci95"]))
    curves = {row.method: row.head.get("curve", ()) for row in rows}
    return [*row_charts(*(list(rows.items()) for rows in shown)), *training_charts(curves)]
