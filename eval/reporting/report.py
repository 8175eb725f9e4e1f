"""Reports in the terminal and as files: of one head (results.json), or a comparison of several (compare.json)."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.benchmark.results import Results, folders_of, newest_results, read_log, read_results
from eval.reporting import format
from eval.reporting.card import CARD, check_card, fenced, model_card
from eval.reporting.format import NOT_RELIABLE, TURNS
from eval.reporting.publication import serve_command
from heads.errors import UserError
from heads.files import write_text

SHOWN_DIVERGENCES = 5
WIDE = 160
NAMES = ("head", "kind", "draft", "sampling", "rule")
"""Columns that hold names. All other columns hold figures."""
COLUMNS = ("head", "kind", "parameters", "draft", "sampling", "tau", "accepted by depth", "speedup", "identical")


def report_command(path: Path) -> int:
    """Write and print the report of a results.json again, or of the newest one in a run or a folder of measurements."""
    if os.path.isdir(path):
        newest = newest_results([*folders_of(path), *sorted(path.glob("*"))])
        if newest is None:
            check_comparison(path / "compare.json")
            raise UserError(f"{path}: no results.json in it; measure with eval/bench.py")
        folder, results = newest
    else:
        check_comparison(path)
        folder, results = path.parent, read_results(path)
    check_card(folder, "the folder")
    write_report(results, folder)
    print_report(results, Console())
    print(f"written to {folder}", file=sys.stderr)
    return 0


def check_comparison(file: Path) -> None:
    """Raise UserError for the file of a comparison."""
    if file.name == "compare.json" and file.is_file():
        raise UserError(
            f"{file}: a comparison of several heads, whose compare.html and compare.md eval/compare.py wrote beside "
            "it; to render it anew, compare again"
        )


def print_report(results: Results, console: Console) -> None:
    """Print the figures, with a line for each setting, the warnings and the audit."""

    def say(text: str, style: str = "") -> None:
        console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    say("")
    say(format.heading(results), "bold")
    say(format.subtitle(results), "dim")
    tables = [comparison_table(results)] if "heads" in results else [headline_table(results)]
    if "heads" not in results and len(results["measurements"]) > 1:
        tables.append(settings_table(results))
    width = console.width
    for table in tables:
        say("")
        console.width = max(WIDE, width)  # lines may wrap, but no figure is truncated
        console.print(table, highlight=False, crop=False)
        console.width = width
    say("")
    if left_out := format.left_out_text(results["measurements"][0]):
        say(left_out, "dim")
    for m in results["measurements"]:
        if format.why_unreliable(m) and (robust := format.robust_text(m)):
            say(f"{format.draft_name(m)}, {format.sampling_text(m['temperature'])}: {robust}")
    for warning in format.warnings(results):
        say(warning, "yellow")
    if "heads" not in results:
        for search in results.get("auto", ()) if format.is_exact(results) else ():
            say(format.search_line(search))
    print_audit(results, console)
    say("")
    say(format.verdict_line(results), "bold")
    if (serve := serve_command(results)) is not None:
        say(f"serve it: {serve}")


def print_audit(results: Results, console: Console) -> None:
    """Print the result of the audit, and the first divergences."""
    style = "green" if format.is_exact(results) else "bold red"
    console.print(escape(format.audit_line(results)), style=style, highlight=False, soft_wrap=True)
    for divergence in results["exact"]["divergences"][:SHOWN_DIVERGENCES]:
        console.print(f"  {escape(format.divergence_text(divergence))}", highlight=False, soft_wrap=True)
    if not format.is_exact(results):
        console.print("no speedup is stated where an output is not the target's own", highlight=False)


def figure_table(columns: Sequence[str]) -> Table:
    """Return a table without rows. Names are left-justified, figures right-justified."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in NAMES else "right", no_wrap=True)
    return table


def headline_table(results: Results) -> Table:
    """Return the table of the top-level figures, one per line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column(escape(format.setting_text(results)), justify="right", no_wrap=True)
    table.add_row("tau, tokens per target pass", format.tau_text(results), style="bold")
    for depth, alpha in enumerate(format.reached(results["alpha"]), start=1):
        table.add_row(f"accepted at depth {depth}", format.percent(alpha, 1))
    table.add_row("plain tokens/s", format.number(results["baseline"]["tokens_per_second"], 1))
    if results["speedup"] is not None:
        table.add_row("speculative tokens/s", format.speculative_text(results))
        why = format.why_unreliable(results)
        table.add_row("speedup", short_speedup(results), style=f"bold{' yellow' * (why is not None)}")
        if why is None:
            table.add_row("speedup predicted by costs", f"{results['speedup']['predicted']:.2f}x")
    table.add_row("outputs that end in a loop", format.percent(results["loop_share"]))
    return table


def settings_table(results: Results) -> Table:
    """Return the table of one head's settings, one per line."""
    table = figure_table(
        ["draft", "sampling", "tau", "speedup", "exact" if "kind" in results["exact"] else "identical"]
    )
    for m in results["measurements"]:
        cells = [m["tree"], format.sampling_text(m["temperature"]), format.tau_text(m)]
        cells += [short_speedup(m), format.exact_cell(m)]
        table.add_row(*map(escape, cells), style="yellow" if NOT_RELIABLE in cells[3] else None)
    return table


def short_speedup(figures: Results) -> str:
    """Return the speedup for a column of a table. A warning below the table has the reason why there is none."""
    text = format.speedup_text(figures)
    return NOT_RELIABLE if text.startswith(NOT_RELIABLE) else text


def comparison_table(results: Results) -> Table:
    """Return the table of several heads, a line for each setting."""
    table = figure_table(COLUMNS)
    for row in comparison_rows(results):
        table.add_row(*map(escape, row), style="yellow" if any(NOT_RELIABLE in cell for cell in row[1:]) else None)
    return table


def comparison_rows(results: Results) -> list[list[str]]:
    """Return the cells below COLUMNS, one row for each measurement."""
    heads = {head["name"]: head for head in results["heads"]}
    rows = []
    for m in format.fastest(results):
        head = heads[m["head"]]
        names = [m["head"], head["kind"], format.count(head["parameters"])]
        names += [m["tree"], format.sampling_text(m["temperature"])]
        rows.append([*names, format.tau_text(m), format.accepted_text(m), short_speedup(m), format.exact_cell(m)])
    return rows


def write_report(results: Results, folder: Path) -> None:
    """Write plots/, report.html and the model card in README.md, with the training curves if there is a metrics.jsonl.
    For several heads, write plots/, compare.html and compare.md."""
    from eval.reporting.charts import comparison_charts, head_charts, remarks  # matplotlib takes a second to import
    from eval.reporting.drawing import write_charts
    from eval.reporting.html import render_page

    log = read_log(folder / "metrics.jsonl")
    several, caption = "heads" in results, f"{format.heading(results)}; {format.setting_line(results)}"
    charts = comparison_charts(format.fastest(results)) if several else head_charts(results, log)
    write_charts(charts, caption, folder / "plots")
    said, serve = [] if several else remarks(results, log), serve_command(results)
    write_text(folder / ("compare.html" if several else "report.html"), render_page(results, charts, said, serve))
    if several:
        write_text(folder / "compare.md", markdown(results))
    else:
        write_text(folder / CARD, model_card(results, serve=fenced(serve)))


def markdown(results: Results) -> str:
    """Return the report of several heads as Markdown."""
    lines = [
        f"# {format.as_markdown(format.heading(results))}",
        "",
        f"{format.as_markdown(format.subtitle(results))}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *(f"| {' | '.join([format.as_markdown(row[0]), *row[1:]])} |" for row in comparison_rows(results)),
        "",
        *(f"* {format.as_markdown(line)}" for line in format.warnings(results)),
        "",
        f"{format.audit_line(results)}. {TURNS} {format.left_out_text(results['measurements'][0])}".rstrip(),
    ]
    return "\n".join(lines) + "\n"
