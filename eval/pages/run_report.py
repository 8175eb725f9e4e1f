"""Reports in the terminal and as files: of one head (results.json), or a comparison of several (compare.json)."""

from pathlib import Path

from rich import box, table
from rich.console import Console
from rich.markup import escape

from eval.core.progress import Progress
from eval.pages import texts
from eval.pages.card import CARD, PLOTS, model_card
from eval.pages.report_tables import (
    Table,
    comparison_table,
    headline_table,
    roofline_table,
    rows_of,
    settings_table,
)
from eval.pages.texts import NOT_RELIABLE
from eval.pages.verdicts import search_line, serve_command, serve_label, verdicts, warnings, why_no_command
from eval.records.learning_curve import held_out_lines, learning_line
from eval.records.result_folders import BENCH, RESULTS, folders_of, results_in
from eval.records.results import COMPARED, read_curve, read_log, write_results
from eval.records.schema import Results
from heads.core.files import write_text

MAX_DIVERGENCES = 5
MIN_WIDTH = 400
NAMES = ("head", "draft", "")
"""Columns that hold names. All other columns hold figures."""


def print_report(results: Results, console: Console) -> None:
    print_heading(results, texts.subtitle(results), console)
    if results.is_comparison:
        print_table(comparison_table("", rows_of(results, whole=not has_search(results))), console)
    else:
        print_table(headline_table(results), console)
        if len(results.measurements) > 1:
            print_table(settings_table(results), console)
    if left_out := texts.left_out_text(results.headline):
        say(console, left_out, "dim")
    for warning in warnings(results):
        say(console, warning, "yellow")
    if not results.is_comparison:
        for search in results.auto if results.is_exact else ():
            say(console, search_line(search))
        if (learning := learning_line(results.head.curve)) is not None:
            say(console, learning)
    print_audit(results, console)
    lines = (serve_command(results) or "").splitlines()
    command = "\n".join(line for line in lines if not line.startswith("#"))
    for note in (line for line in lines if line.startswith("#")):
        say(console, note.replace("#", "served:", 1), "dim")
    say(console, f"\n{'; '.join(verdicts(results))}", "bold")
    if command:
        say(console, f"{serve_label(results)}: {command}")
    elif why := why_no_command(results):
        say(console, why)
    if results.roofline:
        shown = roofline_table(results.roofline)
        print_table(shown, console)
        for line in shown.notes:
            say(console, line)


def save_and_print(results: Results, folder: Path | None, console: Console) -> None:
    """Write the results and their pages into a folder, if there is one, and print them. Results without timing are an
    audit, which has no pages."""
    if not results.settings.timing:
        print_audit_report(results, console)
        if folder is not None:
            write_results(results, folder / "audit.json")
        return
    try:
        if folder is not None:
            write_results(results, folder / (COMPARED if results.is_comparison else RESULTS))
            with Progress("writing the report", announced=True):
                write_report(results, folder)
    finally:  # of a measurement that cannot be saved, the figures are shown
        print_report(results, console)


def has_search(results: Results) -> bool:
    """Return True if the settings of several heads are those of a search, of which only the fastest are shown."""
    return bool(results.auto) and results.is_exact


def print_audit_report(results: Results, console: Console) -> None:
    print_heading(results, texts.setting_line(results), console)
    rows = [
        [
            f"{m.head} {texts.setting_text(m)}".strip(),
            texts.exact_cell(m.exact),
            texts.number(m.tau.mean),
            texts.percent(m.loop_share),
        ]
        for m in results.measurements
    ]
    print_table(Table("Audit", [], ["draft", "identical", "tau", "loops"], rows), console)
    print_audit(results, console)


def print_heading(results: Results, subtitle: str, console: Console) -> None:
    say(console, f"\n{texts.heading(results)}", "bold")
    say(console, subtitle, "dim")


def say(console: Console, text: str, style: str = "") -> None:
    console.print(escape(text), style=style, highlight=False, soft_wrap=True)


def print_table(shown: Table, console: Console) -> None:
    """Print a table. Lines may be longer than the terminal is wide, but no figure is truncated."""
    grid = table.Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for name in shown.columns:
        grid.add_column(escape(name), justify="left" if name in NAMES else "right", no_wrap=True)
    for n, row in enumerate(shown.rows):
        style = "yellow" if any(NOT_RELIABLE in cell for cell in row[1:]) else "bold" if n in shown.marked else None
        grid.add_row(*map(escape, row), style=style)
    width = console.width
    console.width = max(MIN_WIDTH, width)
    say(console, "")
    console.print(grid, highlight=False, crop=False)
    say(console, "")
    console.width = width


def print_audit(results: Results, console: Console) -> None:
    say(console, texts.audit_line(results), "green" if results.is_exact else "bold red")
    for divergence in results.exact.divergences[:MAX_DIVERGENCES]:
        say(console, f"  {texts.divergence_text(divergence)}")
    if not results.is_exact:
        say(console, "no speedup is stated where an output is not the target's own")


def write_report(results: Results, folder: Path) -> None:
    """Write plots/, report.html and the model card in README.md, with the loss if there is a metrics.jsonl.
    For several heads, write plots/, compare.html and compare.md. If the head's run also has measurements of the other
    kind, here or in a server, the page shows both."""
    from eval.pages.charts import head_charts  # matplotlib takes a second to import
    from eval.pages.drawing import write_charts
    from eval.pages.html import render_page, render_several
    from eval.pages.training_charts import training_charts

    caption = f"{texts.heading(results)}; {texts.setting_line(results)}"
    if results.is_comparison:
        write_charts(training_charts({head.name: head.curve for head in results.heads}), caption, folder / "plots")
        write_text(folder / "compare.html", render_several([results]))
        write_text(folder / "compare.md", markdown(results))
        return
    run = folder.parent.parent if folder.parent.name == BENCH else folder
    others = [other for _, other in results_in(folders_of(run)) if (other.server is None) != (results.server is None)]
    log = read_log(folder / "metrics.jsonl")
    charts = [*head_charts(results.headline), *training_charts({"": results.head.curve}, log)]
    write_charts(charts, caption, folder / "plots")
    serve = serve_command(results)
    write_text(folder / "report.html", render_page(results, charts, serve, others))
    if results.server is None:
        plots = [file for file in PLOTS if (folder / file).is_file()]
        write_text(folder / CARD, model_card(results, serve=serve, plots=plots))


def write_progress(folder: Path, console: Console) -> None:
    """Write report.html of a run that has no final measurement yet, from its metrics.jsonl, and print where it is."""
    from eval.pages.html import render
    from eval.pages.training_charts import training_charts

    log, curve = read_log(folder / "metrics.jsonl"), read_curve(folder / "metrics.jsonl")
    steps = max((record["step"] for record in log if isinstance(record.get("step"), int)), default=0)
    lines = [f"{texts.short_name(str(folder))}: {steps:,} steps, no final measurement yet"]
    if curve:
        tau = texts.with_interval(curve[-1].tau, curve[-1].ci95)
        lines.append(f"tau {tau} after {curve[-1].tokens:,} training tokens")
    lines += [line for line in (learning_line(curve), *held_out_lines(curve)) if line is not None]
    parts = [{"verdicts": [], "charts": training_charts({"": curve}, log), "tables": []}]
    write_text(folder / "report.html", render(heading=lines[0], verdicts=lines, parts=parts))
    for line in lines:
        say(console, line)


def markdown(results: Results) -> str:
    shown = comparison_table("", rows_of(results, whole=not has_search(results)))
    parts = [
        f"# {texts.as_markdown(texts.heading(results))}",
        f"{texts.as_markdown(texts.subtitle(results))}.",
        shown.markdown(),
        "\n".join(f"* {texts.as_markdown(line)}" for line in warnings(results)),
        " ".join([f"{texts.audit_line(results)}.", *shown.notes]).rstrip(),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"
