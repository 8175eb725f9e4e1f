"""The report of a results.json: a table in the terminal, charts, one self-contained page, and a model card."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.benchmark.measurements import folders_of, newest_results
from eval.benchmark.results import Results, read_results
from eval.files import write_text
from eval.reporting.card_data import LIBRARY_LINE, front_matter
from eval.reporting.format import (
    LOCAL_MODEL,
    NOT_RELIABLE,
    adaptive_line,
    as_markdown,
    audit_line,
    code_span,
    divergence_text,
    exact_cell,
    heading,
    is_adapted,
    is_disturbed,
    is_exact,
    number,
    percent,
    reached,
    sampling_text,
    search_line,
    setting_line,
    setting_text,
    short_name,
    speedup_text,
    warnings,
    with_interval,
)
from heads.errors import UserError

SHOWN_DIVERGENCES = 5
CARD = "README.md"


def print_report(results: Results, console: Console) -> None:
    """Print the headline's table, a line for each other setting, and the audit."""
    exact = is_exact(results)
    console.print()
    console.print(f"[bold]{escape(heading(results))}[/bold]", highlight=False)
    console.print(f"[dim]{escape(setting_line(results))}[/dim]", highlight=False)
    console.print()
    console.print(headline_table(results), highlight=False)
    if len(results["measurements"]) > 1:
        console.print()
        console.print(settings_table(results), highlight=False)
    console.print()
    for warning in warnings(results):
        console.print(f"[yellow]{escape(warning)}[/yellow]", highlight=False, soft_wrap=True)
    for search in results.get("auto", ()) if exact else ():
        console.print(escape(search_line(search)), highlight=False, soft_wrap=True)
    for m in results["measurements"]:
        if "adaptive" in m:
            console.print(escape(adaptive_line(m)), highlight=False, soft_wrap=True)
    print_audit(results, console)


def print_audit(results: Results, console: Console) -> None:
    """Print the result of the audit, and the first divergences."""
    style = "green" if is_exact(results) else "bold red"
    console.print(f"[{style}]{escape(audit_line(results))}[/{style}]", highlight=False, soft_wrap=True)
    for divergence in results["exact"]["divergences"][:SHOWN_DIVERGENCES]:
        console.print(f"  {escape(divergence_text(divergence))}", highlight=False, soft_wrap=True)
    if not is_exact(results):
        console.print("no speedup is stated where an output is not the target's own", highlight=False)


def headline_table(results: Results) -> Table:
    """Return the table of the top-level figures, one a line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column(escape(setting_text(results)), justify="right", no_wrap=True)
    table.add_row(
        "tau, tokens per target pass", with_interval(results["tau"]["mean"], results["tau"]["ci95"]), style="bold"
    )
    for depth, alpha in enumerate(reached(results["alpha"]), start=1):
        table.add_row(f"accepted at depth {depth}", percent(alpha, 1))
    table.add_row("plain tokens/s", number(results["baseline"]["tokens_per_second"], 1))
    if results["speedup"] is not None:
        table.add_row("speculative tokens/s", number(results["speculative"]["tokens_per_second"], 1))
        table.add_row("speedup", speedup_text(results), style=f"bold{' yellow' * is_disturbed(results)}")
        table.add_row("speedup predicted by costs", f"{results['speedup']['predicted']:.2f}x")
    table.add_row("outputs that end in a loop", percent(results["loop_share"]))
    return table


def settings_table(results: Results) -> Table:
    """Return the table of settings, one a line."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column("draft", no_wrap=True)
    table.add_column("sampling", no_wrap=True)
    table.add_column("tau", justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("exact" if "kind" in results["exact"] else "identical", justify="right", no_wrap=True)
    for m in results["measurements"]:
        cells = [escape(m["tree"]), sampling_text(m["temperature"]), with_interval(m["tau"]["mean"], m["tau"]["ci95"])]
        table.add_row(*cells, speedup_text(m), exact_cell(m), style="yellow" if is_disturbed(m) else None)
    return table


def check_card(folder: Path, name: str) -> None:
    """Refuse a folder with a README.md that is not a report: the model card would replace it."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # none; or no path at all, which is said by who writes there
        return
    if LIBRARY_LINE not in text:
        raise UserError(f"{name} {folder}: holds a {CARD} of something else, which is not to be replaced; name another")


def write_report(results: Results, folder: Path) -> None:
    """Write plots/, report.html and README.md, with the training curves if metrics.jsonl is there."""
    from eval.reporting.charts import head_charts  # matplotlib, which reading the arguments is not to wait for
    from eval.reporting.drawing import write_charts
    from eval.reporting.html import render_page

    charts = head_charts(results, read_log(folder / "metrics.jsonl"))
    write_charts(charts, caption(results), folder / "plots")
    write_text(folder / "report.html", render_page(results, charts))
    write_model_card(results, folder / CARD)


def read_log(file: Path) -> list[Results]:
    """Return the records of a metrics.jsonl without truncated lines; none if there is no such file."""
    records = []
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def caption(results: Results) -> str:
    """Return the caption of a chart in a file: the head, the prompts and the device."""
    doubt = f"; {NOT_RELIABLE}: the machine was busy" if is_disturbed(results) else ""
    return f"{heading(results)}; {setting_line(results)}{doubt}"


def write_model_card(results: Results, path: Path) -> None:
    """Write the model card of a results.json to a file."""
    write_text(path, model_card(results))


def model_card(results: Results, *, about: str = "", data: Mapping[str, Any] | None = None) -> str:
    """Return the model card: front matter, the head, `about` it (Markdown, may be empty), and its figures. `data` are
    further arguments of `front_matter`."""
    name, kind = results["target"]["name"], results["head"]["kind"]
    sameness = "in distribution" if "kind" in results["exact"] else "token for token"
    intro = (
        f"A draft head (`{kind}`, {results['head']['parameters']:,} parameters) for {quoted(name)}. It proposes "
        f"tokens that the target verifies, so that text comes faster and is the target's own, {sameness}."
    )
    if is_adapted(results):
        intro += (
            " The target is adapted: `adapter/` beside the head is a LoRA adapter (peft's form) that was trained with "
            "it, the head is for the target with that adapter, and every figure and the audit are of the adapted "
            f"target. Its text is not that of {quoted(name)} as it is."
        )
    matter = front_matter(kind, name, results=results, **(data or {}))
    parts = [matter, f"# {as_markdown(heading(results))}", intro, about.strip(), card_section(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def quoted(target: str) -> str:
    """Return the name of a target in Markdown."""
    return target if target == LOCAL_MODEL else code_span(short_name(target))


def card_section(results: Results) -> str:
    """Return the measured figures in Markdown."""
    rows = [
        f"| {as_markdown(m['tree'])} | {sampling_text(m['temperature'])} | "
        f"{with_interval(m['tau']['mean'], m['tau']['ci95'])} | "
        f"{number(m['baseline']['tokens_per_second'], 1)} | {spec_cell(m)} | {speedup_text(m)} |"
        for m in results["measurements"]
    ]
    alpha = ", ".join(percent(value) for value in reached(results["alpha"]))
    lines = [
        "## Measured",
        "",
        f"{as_markdown(setting_line(results))}.",
        "",
        "| draft | sampling | tau | plain tok/s | speculative tok/s | speedup |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"{audit_line(results)}.".capitalize(),
        "",
        f"Acceptance by depth ({as_markdown(setting_text(results))}): {alpha}.",
        "",
        *(line for warning in warnings(results) for line in (f"Note: {as_markdown(warning)}.", "")),
        "tau is tokens emitted per target pass, the bonus token included. Plain decoding is the same runtime's, on the "
        "same prompts, in turns with the speculative runs. Brackets are 95% bootstrap intervals over prompts.",
        "",
        "![Acceptance by depth](plots/acceptance.png)",
    ]
    return "\n".join(lines)


def spec_cell(figures: Results) -> str:
    """Return speculative tokens/s, or a note that they are withheld."""
    withheld = figures["speedup"] is None
    return "withheld" if withheld else number(figures["speculative"]["tokens_per_second"], 1)


def report_command(path: Path) -> int:
    """Render the report of a results.json again, or of the newest one of a run or of a folder of measurements."""
    if os.path.isdir(path):
        newest = newest_results([*folders_of(path), *sorted(path.glob("*"))])
        if newest is None:
            raise UserError(f"{path}: no results.json in it; measure with eval/bench.py")
        folder, results = newest
    else:
        folder, results = path.parent, read_results(path)
    check_card(folder, "the folder")
    write_report(results, folder)
    print_report(results, Console())
    print(f"written to {folder}", file=sys.stderr)
    return 0
