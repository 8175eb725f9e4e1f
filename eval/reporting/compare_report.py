"""The report of a comparison: a table in the terminal and in Markdown, charts, and a page."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Lines

from eval.benchmark.results import Results
from eval.command import AUTO
from eval.files import write_text
from eval.reporting.charts import comparison_charts
from eval.reporting.drawing import Chart, write_charts
from eval.reporting.format import (
    MISSING,
    NOT_RELIABLE,
    as_markdown,
    audit_line,
    count,
    depth_warning,
    doubts,
    exact_cell,
    is_exact,
    number,
    percent,
    plural,
    sampling_text,
    setting_line,
    setting_text,
    speedup_text,
    target_text,
    with_interval,
)
from eval.reporting.html import Page, Table, audit_parts, footer, head_part, measurement_parts, target_part, to_html
from eval.reporting.report import print_audit

WIDE = 160
COLUMNS = (
    "head",
    "kind",
    "parameters",
    "draft",
    "sampling",
    "tau",
    "accepted by depth",
    "speedup",
    "identical",
)
SPEEDUP = COLUMNS.index("speedup")
TURNS = (
    "Plain decoding and all heads took turns on the same prompts. Brackets are 95% bootstrap intervals over prompts."
)


def write_comparison(results: Results, folder: Path) -> None:
    """Write compare.md, compare.html and plots/compare-*."""
    charts = comparison_charts(shown(results))
    write_charts(charts, f"{title(results)}; {setting_line(results)}", folder / "plots")
    write_text(folder / "compare.md", markdown(results))
    write_text(folder / "compare.html", to_html(page(results, charts)))


def shown(results: Results) -> list[Results]:
    """Return the measurements in the table: all of them, or after a search the fastest of each head."""
    if AUTO not in results["settings"]["trees"] or not is_exact(results):
        return list(results["measurements"])
    best: dict[tuple[str, float], Results] = {}
    for m in results["measurements"]:
        key = (m["head"], m["temperature"])
        if key not in best or m["speedup"]["measured"] > best[key]["speedup"]["measured"]:
            best[key] = m
    return list(best.values())


def rows(results: Results) -> list[list[str]]:
    """Return the cells of the table, one row for each measurement."""
    heads = {head["name"]: head for head in results["heads"]}
    return [
        [
            m["head"],
            heads[m["head"]]["kind"],
            count(heads[m["head"]]["parameters"]),
            m["tree"],
            sampling_text(m["temperature"]),
            with_interval(m["tau"]["mean"], m["tau"]["ci95"]),
            accepted_text(m),
            speedup_text(m),
            exact_cell(m),
        ]
        for m in shown(results)
    ]


def accepted_text(figures: Results) -> str:
    """Return acceptance by depth, as in `79% 71% 80%`."""
    return " ".join(percent(alpha) for alpha in figures["alpha"] if alpha is not None) or MISSING


def plain_line(results: Results) -> str:
    """Return a line with the speed of plain decoding, the base of every speedup."""
    plain = {m["temperature"]: m["baseline"]["tokens_per_second"] for m in results["measurements"]}
    return "plain decoding: " + ", ".join(f"{number(v, 1)} tokens/s ({sampling_text(t)})" for t, v in plain.items())


def warnings(results: Results) -> list[str]:
    """Return a warning for each head that was run deeper than it was trained, and those about all figures."""
    found = [
        (head["name"], depth_warning(head, [m for m in results["measurements"] if m["head"] == head["name"]]))
        for head in results["heads"]
    ]
    return [f"head {name}: {line}" for name, line in found if line] + doubts(results)


def print_comparison(results: Results, console: Console) -> None:
    """Print the table and the audit."""
    table = Lines(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for name in COLUMNS:
        left = name in ("head", "kind", "draft", "sampling")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows(results):
        table.add_row(*map(escape, row), style="yellow" if NOT_RELIABLE in row[SPEEDUP] else None)
    console.print(f"[bold]{escape(title(results))}[/bold]", highlight=False)
    console.print(
        f"[dim]{escape(setting_line(results))}; {escape(plain_line(results))}[/dim]", highlight=False, soft_wrap=True
    )
    console.print()
    width, console.width = console.width, max(WIDE, console.width)  # lines may wrap, but no figure is cut short
    console.print(table, highlight=False, crop=False)
    console.width = width
    console.print()
    for line in warnings(results):
        console.print(f"[yellow]{escape(line)}[/yellow]", highlight=False, soft_wrap=True)
    print_audit(results, console)


def markdown(results: Results) -> str:
    """Return the report as Markdown."""
    lines = [
        f"# {as_markdown(title(results))}",
        "",
        f"{as_markdown(setting_line(results))}; {plain_line(results)}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *(f"| {' | '.join([as_markdown(row[0]), *row[1:]])} |" for row in rows(results)),
        "",
        *(f"* {as_markdown(line)}" for line in warnings(results)),
        "",
        f"{audit_line(results)}. {TURNS}",
    ]
    return "\n".join(lines) + "\n"


def page(results: Results, charts: Sequence[Chart]) -> Page:
    """Return the report as a page."""
    return Page(
        heading=title(results),
        setting=f"{setting_line(results)}; {plain_line(results)}.",
        **audit_parts(results),
        warnings=warnings(results),
        charts=charts,
        tables=[table(results)],
        facts=[
            target_part(results),
            *(head_part(head, head["name"]) for head in results["heads"]),
            *measurement_parts(results),
        ],
        footer=footer(results),
    )


def table(results: Results) -> Table:
    """Return the page's table, without the kind and size of heads, which stand below."""
    columns = ["head and draft", "speedup", "tau", "accepted by depth", "identical"]
    cells = [
        [
            f"{m['head']}, {setting_text(m)}",
            speedup_text(m),
            with_interval(m["tau"]["mean"], m["tau"]["ci95"]),
            accepted_text(m),
            exact_cell(m),
        ]
        for m in shown(results)
    ]
    return Table("Heads and drafts", [TURNS], columns, cells)


def title(results: Results) -> str:
    """Return the title: the number of heads and the target."""
    return f"{plural(len(results['heads']), 'head')} on {target_text(results['target'])}"
