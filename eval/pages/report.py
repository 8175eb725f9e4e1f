"""Reports in the terminal and as files: of one head (results.json), or a comparison of several (compare.json)."""

from collections.abc import Sequence
from pathlib import Path

from rich import box, table
from rich.console import Console
from rich.markup import escape

from eval.measure.curve import held_out_lines, learning_line
from eval.measure.folders import BENCH, folders_of, results_in
from eval.measure.results import Results, read_curve, read_log
from eval.pages import format
from eval.pages.card import CARD, PLOTS, model_card
from eval.pages.format import NOT_RELIABLE
from eval.pages.publish import serve_command
from eval.pages.tables import Table, audit_table, beside_table, comparison_table, headline_table, settings_table
from heads.core.files import write_text

SHOWN_DIVERGENCES = 5
WIDE = 180
NAMES = ("head", "kind", "draft", "")
"""Columns that hold names. All other columns hold figures."""


def print_report(results: Results, console: Console) -> None:
    several = "heads" in results
    tables = [comparison_table(results)] if several else [headline_table(results)]
    if not several and len(results["measurements"]) > 1:
        tables.append(settings_table(results))
    print_tables(results, format.subtitle(results), tables, console)
    if left_out := format.left_out_text(results["measurements"][0]):
        say(console, left_out, "dim")
    for m in results["measurements"]:
        if format.why_unreliable(m) and (robust := format.robust_text(m)):
            say(console, f"{format.draft_name(m)}, {format.sampling_text(m['temperature'])}: {robust}")
    for warning in format.warnings(results):
        say(console, warning, "yellow")
    if not several:
        for search in results.get("auto", ()) if format.is_exact(results) else ():
            say(console, format.search_line(search))
    if not several and (learning := learning_line(results["head"].get("curve", ()))) is not None:
        say(console, learning)
    print_audit(results, console)
    if not format.is_exact(results):
        console.print("no speedup is stated where an output is not the target's own", highlight=False)
    command, _, notes = (serve_command(results) or "").partition("\n")
    for note in notes.splitlines():
        say(console, note.replace("#", "served:", 1), "dim")
    say(console, f"\n{'; '.join(format.verdicts(results))}", "bold")
    if command:
        say(console, f"{format.serve_label(results)}: {command}")


def print_audit_report(results: Results, console: Console) -> None:
    print_tables(results, format.setting_line(results), [audit_table(results)], console)
    print_audit(results, console)


def say(console: Console, text: str, style: str = "") -> None:
    console.print(escape(text), style=style, highlight=False, soft_wrap=True)


def print_tables(results: Results, subtitle: str, tables: list[Table], console: Console) -> None:
    """Print the heading and tables. Lines may be longer than the terminal is wide, but no figure is truncated."""
    say(console, f"\n{format.heading(results)}", "bold")
    say(console, subtitle, "dim")
    width = console.width
    for shown in tables:
        grid = table.Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
        for name in shown.columns:
            grid.add_column(escape(name), justify="left" if name in NAMES else "right", no_wrap=True)
        for n, row in enumerate(shown.rows):
            style = "yellow" if any(NOT_RELIABLE in cell for cell in row[1:]) else "bold" if n in shown.marked else None
            grid.add_row(*map(escape, row), style=style)
        say(console, "")
        console.width = max(WIDE, width)
        console.print(grid, highlight=False, crop=False)
        console.width = width
    say(console, "")


def print_audit(results: Results, console: Console) -> None:
    say(console, format.audit_line(results), "green" if format.is_exact(results) else "bold red")
    for divergence in results["exact"]["divergences"][:SHOWN_DIVERGENCES]:
        say(console, f"  {format.divergence_text(divergence)}")


def write_report(results: Results, folder: Path) -> None:
    """Write plots/, report.html and the model card in README.md, with the loss if there is a metrics.jsonl.
    For several heads, write plots/, compare.html and compare.md. If the head's run also has measurements of the other
    kind, here or in a server, the page shows both."""
    from eval.pages.charts import head_charts, remarks  # matplotlib takes a second to import
    from eval.pages.drawing import write_charts
    from eval.pages.html import render_page, render_several
    from eval.pages.several import matrix_charts, rows_of
    from eval.pages.training import training_charts

    caption = f"{format.heading(results)}; {format.setting_line(results)}"
    if "heads" in results:
        write_charts(matrix_charts(rows_of(results)), caption, folder / "plots")
        write_text(folder / "compare.html", render_several([results]))
        write_text(folder / "compare.md", markdown(results))
        return
    log, serve = read_log(folder / "metrics.jsonl"), serve_command(results)
    run = folder.parent.parent if folder.parent.name == BENCH else folder
    others = [other for _, other in results_in(folders_of(run)) if ("server" in other) != ("server" in results)]
    charts = [*head_charts(results, others), *training_charts({"": results["head"].get("curve", ())}, log)]
    write_charts(charts, caption, folder / "plots")
    page = render_page(results, charts, remarks(results), serve, beside_table(results, others))
    write_text(folder / "report.html", page)
    if "server" not in results:
        plots = [file for file in PLOTS if (folder / file).is_file()]
        write_text(folder / CARD, model_card(results, serve=serve, plots=plots))


def write_progress(folder: Path, console: Console) -> None:
    """Write report.html of a run that has no final measurement yet, from its metrics.jsonl, and print where it is."""
    from eval.pages.html import render_progress
    from eval.pages.training import training_charts

    log, curve = read_log(folder / "metrics.jsonl"), read_curve(folder / "metrics.jsonl")
    steps = max((record["step"] for record in log if isinstance(record.get("step"), int)), default=0)
    lines = [f"{format.short_name(str(folder))}: {steps:,} steps, no final measurement yet"]
    if curve:
        newest = curve[-1]
        tau = format.with_interval(newest["tau"], newest["ci95"])
        lines.append(f"tau {tau} after {newest['tokens']:,} training tokens")
    lines += [line for line in (learning_line(curve), *held_out_lines(curve)) if line is not None]
    write_text(folder / "report.html", render_progress(lines, training_charts({"": curve}, log)))
    for line in lines:
        say(console, line)


def write_page(given: Sequence[Results], folder: Path) -> Path:
    from eval.pages.html import render_several

    write_text(folder / "report.html", render_several(given))
    return folder / "report.html"


def markdown(results: Results) -> str:
    shown = comparison_table(results)
    parts = [
        f"# {format.as_markdown(format.heading(results))}",
        f"{format.as_markdown(format.subtitle(results))}.",
        shown.markdown(),
        "\n".join(f"* {format.as_markdown(line)}" for line in format.warnings(results)),
        f"{format.audit_line(results)}. {' '.join(shown.notes)}",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"
