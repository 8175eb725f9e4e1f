"""Turn a results.json into a table in the terminal, plots, one self-contained page, and a model card.

python eval/report.py RUN_OR_RESULTS_JSON        # writes report.html, plots/ and README.md beside results.json anew
"""

import argparse
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.command import exit_status
from eval.page import render_page
from eval.plots import write_plots
from eval.results import Results, read_results, write_text
from eval.wording import (
    audit_line,
    device_text,
    divergence_text,
    is_exact,
    number,
    percent,
    sampling_text,
    short_name,
    speedup_text,
    with_interval,
)

SHOWN_DIVERGENCES = 5


def print_report(results: Results, console: Console) -> None:
    """The table, and the line that says whether the output was the target's own."""
    exact = is_exact(results)
    console.print()
    console.print(f"[bold]{escape(heading(results))}[/bold]", highlight=False)
    console.print(f"[dim]{escape(setting_line(results))}[/dim]", highlight=False)
    console.print(settings_table(results), highlight=False)
    style = "green" if exact else "bold red"
    console.print(f"[{style}]{audit_line(results)}[/{style}]", highlight=False)
    if not exact:
        for divergence in results["exact"]["divergences"][:SHOWN_DIVERGENCES]:
            console.print(f"  {escape(divergence_text(divergence))}", highlight=False)
        console.print("no speedup is stated where an output is not the target's own", highlight=False)


def settings_table(results: Results) -> Table:
    """One column a setting, the headline first."""
    best = next(i for i, m in enumerate(results["measurements"]) if is_headline(results, m))
    ordered = [results["measurements"][best], *(m for i, m in enumerate(results["measurements"]) if i != best)]
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column("")
    for measurement in ordered:
        table.add_column(f"{measurement['tree']}, {sampling_text(measurement['temperature'])}", justify="right")
    deepest = max(len(m["alpha"]) for m in ordered)
    rows = {
        "tau (tokens per target pass)": [with_interval(m["tau"]["mean"], m["tau"]["ci95"]) for m in ordered],
        **{
            f"accepted at depth {k + 1}": [percent(m["alpha"][k], 1) if k < len(m["alpha"]) else "" for m in ordered]
            for k in range(deepest)
        },
        "plain tokens/s": [number(m["baseline"]["tokens_per_second"], 1) for m in ordered],
    }
    if is_exact(results):
        rows |= {
            "speculative tokens/s": [number(m["speculative"]["tokens_per_second"], 1) for m in ordered],
            "speedup": [speedup_text(m) for m in ordered],
            "speedup predicted by costs": [number(m["speedup"]["predicted"]) + "x" for m in ordered],
        }
    rows["outputs that end in a loop"] = [percent(m["loop_share"]) for m in ordered]
    for name, cells in rows.items():
        table.add_row(name, *cells, style="bold" if name in ("tau (tokens per target pass)", "speedup") else None)
    return table


def is_headline(results: Results, measurement: Results) -> bool:
    """Whether the figures at the top level are this setting's."""
    return (measurement["tree"], measurement["temperature"]) == (results["tree"], results["temperature"])


def heading(results: Results) -> str:
    """What was measured."""
    return f"{results['head']['kind']} on {short_name(results['target']['name'])}"


def setting_line(results: Results) -> str:
    """On what, and where."""
    settings = results["settings"]
    names = ", ".join(short_name(name) for name in settings["prompts"].split(","))
    return (
        f"{settings['num_prompts']} prompts of {names}, {settings['max_new_tokens']} new tokens, "
        f"batch {settings['batch_size']}; {device_text(results)}"
    )


def write_report(results: Results, folder: Path) -> None:
    """plots/*.png, report.html and README.md."""
    write_plots(results, folder / "plots")
    write_text(folder / "report.html", render_page(results))
    write_model_card(results, folder / "README.md")


def write_model_card(results: Results, path: Path, *, training: str = "") -> None:
    """The model card: what the Hub reads, what the head is, how it was trained (Markdown, may be empty), its
    figures."""
    name, kind = results["target"]["name"], results["head"]["kind"]
    base = [f"base_model: {name}"] if short_name(name) == name and "/" in name else []
    front = ["---", "library_name: draftsmith", *base, "tags:", "- speculative-decoding", f"- {kind}", "---"]
    intro = (
        f"A draft head (`{kind}`, {results['head']['parameters']:,} parameters) for `{short_name(name)}`. It proposes "
        "tokens that the target verifies, so that text comes faster and is the target's own, token for token."
    )
    parts = ["\n".join(front), f"# {heading(results)}", intro, training.strip(), card_section(results)]
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")


def card_section(results: Results) -> str:
    """The measured figures in Markdown."""
    rows = [
        f"| {m['tree']} | {sampling_text(m['temperature'])} | {with_interval(m['tau']['mean'], m['tau']['ci95'])} | "
        f"{number(m['baseline']['tokens_per_second'], 1)} | {spec_cell(m)} | {speedup_text(m)} |"
        for m in results["measurements"]
    ]
    alpha = ", ".join(percent(value) for value in results["alpha"])
    lines = [
        "## Measured",
        "",
        f"{setting_line(results)}.",
        "",
        "| draft | sampling | tau | plain tok/s | speculative tok/s | speedup |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"{audit_line(results)}.".capitalize(),
        "",
        f"Acceptance by depth ({results['tree']}, {sampling_text(results['temperature'])}): {alpha}.",
        "",
        "tau is tokens emitted per target pass, the bonus token included. Plain decoding is the same runtime's, on the "
        "same prompts, in turns with the speculative runs. Brackets are 95% bootstrap intervals over prompts.",
        "",
        "![Acceptance by depth and tokens per round](plots/acceptance.png)",
    ]
    return "\n".join(lines)


def spec_cell(figures: Results) -> str:
    """Speculative tokens/s, where it may be stated."""
    withheld = figures["speedup"] is None
    return "withheld" if withheld else number(figures["speculative"]["tokens_per_second"], 1)


def report_command(path: Path) -> int:
    """Render the report of a run directory's results.json, or of a results.json, anew."""
    path = path / "results.json" if path.is_dir() else path
    results = read_results(path)
    write_report(results, path.parent)
    print_report(results, Console())
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Render a results.json anew: report.html, plots/ and README.md.")
    parser.add_argument("results", type=Path, help="a run directory or a results.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(exit_status(lambda: report_command(parse_arguments().results)))
