"""Measurement of the settings of a sweep file, each in its own process, with the table, sweep.json and sweep.csv."""

import argparse
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.benchmark.progress import Progress
from eval.benchmark.prompts import split_prompts
from eval.benchmark.results import Results, figures_of, read_results
from eval.benchmark.settings import to_settings
from eval.benchmark.sweep_file import COMMAND, METRICS, Setting, Sweep, folder_name, ranked, read_sweep
from eval.reporting.format import MISSING, busy_warning, exact_cell, is_exact, with_interval
from heads.checkpoint import find_head, read_config, weights_hash
from heads.errors import UserError
from heads.files import check_folder, is_file, write_json, write_text
from heads.published import is_published
from heads.registry import untrained_kind

ROOT = Path(__file__).resolve().parents[2]
TRACKED = "scripts/tracked.py"
Row = dict[str, Any]
Figures = dict[str, float | None]
Run = Callable[..., Any]
Parse = Callable[[Sequence[str]], argparse.Namespace]
"""Function that parses the arguments of the program, eval/bench.py."""


def run_sweep(options: argparse.Namespace, parse: Parse, run: Run = subprocess.run) -> int:
    """Measure the settings, each in a process started with `run`, or let a server choose them. Return the exit
    status."""
    sweep = read_sweep(options.sweep)
    if not is_file(sweep.program):
        raise UserError(f"{sweep.path}: program: no {sweep.program} here; run sweeps from the repository's folder")
    if options.wandb == "online":
        if sweep.command != list(COMMAND):
            raise UserError(f"{sweep.path}: command: expected {json.dumps(COMMAND)}, else wandb hears of nothing")
        limit = [f"--count={options.count}"] if options.count else []
        command = [sys.executable, TRACKED, "--agent", str(sweep.path), *limit]
        return subprocess.run(command, env=environment("online")).returncode
    settings = sweep.settings(options.count, options.seed)
    places = [place_of(sweep, setting, parse) for setting in settings]  # raises for a wrong setting before measuring
    out = options.out or Path("runs") / f"sweep-{sweep.path.stem}"
    check_folder(out, "--out")
    rows: list[Row] = []
    for n, (setting, place) in enumerate(zip(settings, places, strict=True), start=1):
        known = ", measured already" if found(out / place / "results.json") else ""
        print(f"{n}/{len(settings)}  {sweep.text(setting)}{known}", file=sys.stderr, flush=True)
        rows.append(measure(sweep, setting, out / place, options.wandb, run))
        write_record(sweep, rows, out)
    print_table(sweep, ranked(rows, sweep))
    print(best_line(sweep, rows))
    for row in rows:
        if row["error"]:
            print(f"{sweep.text(row['setting'])}: {row['error']}; see {out / row['folder'] / 'log.txt'}")
        if row["busy"]:
            print(f"{sweep.text(row['setting'])}: {row['busy']} (delete {out / row['folder']})")
    print(f"written to {out}", file=sys.stderr)
    if options.wandb == "offline":
        print(f"wandb: offline; upload the runs with: wandb sync {out}/*/wandb/offline-run-*", file=sys.stderr)
    statuses = {row["status"] for row in rows}
    return 1 if 1 in statuses else 2 if 2 in statuses else 0


def place_of(sweep: Sweep, setting: Setting, parse: Parse) -> str:
    """Return the name of a setting's folder. It depends on everything that the figures depend on: arguments, head and
    prompt files. Raise UserError for arguments that eval/bench.py would refuse."""
    try:
        options = parse(sweep.arguments(setting))
        settings = to_settings(options)
        (head,) = options.heads
        weights = None
        if is_published(head):
            weights = weights_hash(head)
        elif not untrained_kind(head):
            read_config(find_head(head))
            weights = weights_hash(find_head(head))
    except UserError as error:
        raise UserError(f"{sweep.path}: {sweep.text(setting)}: {error}") from None
    texts = [Path(name).read_bytes() for name in split_prompts(settings.prompts) if is_file(name)]
    held = [hashlib.sha256(text).hexdigest() for text in texts]
    said = json.dumps([sorted(sweep.arguments(setting)), weights, held])
    return folder_name(sweep.text(setting), hashlib.sha256(said.encode()).hexdigest())


def measure(sweep: Sweep, setting: Setting, folder: Path, wandb: str, run: Run) -> Row:
    """Return the row of a setting, from its results.json if there is one, else from a new measurement."""
    file, log = folder / "results.json", folder / "log.txt"
    status, error = 0, ""
    results = found(file)
    if results is None:
        tracked = [] if wandb == "off" else [TRACKED]
        command = [sys.executable, *tracked, sweep.program, *sweep.arguments(setting), f"--out={folder.resolve()}"]
        folder.mkdir(parents=True, exist_ok=True)
        progress = Progress(f"{sweep.program}, into {log}", announced=True)
        variables = {**environment(wandb), **wandb_names(sweep, setting)}
        with log.open("w", encoding="utf-8") as stream, progress:
            done = run(command, stdout=stream, stderr=subprocess.STDOUT, env=variables)
        status, results = done.returncode, found(file)
        if status == 130:
            raise KeyboardInterrupt
    figures: Figures = {}
    identical = ""
    if results is not None:
        figures, identical = figures_of(results), exact_cell(results)
        if not is_exact(results):
            status, error = 1, "an output was not the target's own"
    elif status:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), f"ended with status {status}")
        error = last.removeprefix("error: ")
        status = 2 if status == 2 else 1
    else:
        status, error = 1, "left no results.json"
    row: Row = {"setting": setting, "figures": figures, "identical": identical, "status": status, "error": error}
    return {**row, "busy": results and busy_warning(results["measurements"]), "folder": folder.name}


def found(file: Path) -> Results | None:
    """Return the results of a measurement, or None if there are no valid ones."""
    try:
        return read_results(file)
    except UserError:
        return None


def environment(wandb: str) -> dict[str, str]:
    """Return the environment of a setting's process or of the agent, with this repository's packages and wandb's
    mode."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "disabled" if wandb == "off" else wandb}


def wandb_names(sweep: Sweep, setting: Setting) -> dict[str, str]:
    """Return the variables with which a setting's process names its wandb run, its group and its project."""
    project = {"WANDB_PROJECT": sweep.project} if sweep.project else {}
    return {"WANDB_NAME": sweep.text(setting), "WANDB_RUN_GROUP": sweep.name, **project}


def write_record(sweep: Sweep, rows: Sequence[Row], out: Path) -> None:
    """Write sweep.json and sweep.csv with the rows measured so far."""
    rows = ranked(rows, sweep)
    metric = {"name": sweep.metric, "goal": "maximize" if sweep.maximize else "minimize"} if sweep.metric else None
    write_json(out / "sweep.json", {"sweep": str(sweep.path), "method": sweep.method, "metric": metric, "rows": rows})
    names = list(dict.fromkeys(name for row in rows for name in [*METRICS, *row["figures"]]))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*sweep.parameters, *names, "identical", "error", "folder"])
    for row in rows:
        given = [row["setting"][name] for name in sweep.parameters]
        table.writerow([*given, *map(row["figures"].get, names), row["identical"], row["error"], row["folder"]])
    write_text(out / "sweep.csv", text.getvalue())


def print_table(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Print a table with a line for each setting: the values that vary, and the figures."""
    varying = [name for name in sweep.parameters if len({repr(row["setting"][name]) for row in rows}) > 1]
    shown = list(dict.fromkeys([*([sweep.metric] if sweep.metric else []), "tau", "speedup", "tokens_per_second"]))
    table = Table(box=box.SIMPLE, show_edge=False)
    for name in varying or ["setting"]:
        table.add_column(name, overflow="fold")
    for name in (*shown, "identical"):
        table.add_column(name.replace("_per_second", "/s").replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        cells = [escape(str(row["setting"][name])) for name in varying] or ["the only one"]
        digits = [figure_text(row["figures"], name) for name in shown]
        table.add_row(*cells, *digits, row["identical"] or (MISSING if not row["error"] else "failed"))
    Console().print(table)


def figure_text(figures: Figures, name: str) -> str:
    """Return a figure with its interval, if it has one."""
    interval = [figures.get(f"{name}_low"), figures.get(f"{name}_high")]
    text = with_interval(
        figures.get(name), interval, digits=1 if "second" in name else 2, unit="x" * (name == "speedup")
    )
    return "not measured" if text == MISSING and name == "speedup" and figures else text


def best_line(sweep: Sweep, rows: Sequence[Row]) -> str:
    """Return a line with the setting that is best by the metric, else by the speedup, and its figures."""
    metric, maximize = sweep.metric or "speedup", sweep.maximize
    known = [row for row in rows if row["figures"].get(metric) is not None]
    if not known:
        return f"best: none, since no setting has a reliable {metric}"
    best = (max if maximize else min)(known, key=lambda row: row["figures"][metric])
    said = [f"{name} {figure_text(best['figures'], name)}" for name in dict.fromkeys([metric, "tau", "speedup"])]
    return f"best: {sweep.text(best['setting'])}: {', '.join(said)}"
