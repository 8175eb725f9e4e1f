"""Measure a head in every setting of a wandb sweep file for eval/bench.py, without a wandb server.

    python eval/sweep.py recipes/sweeps/quickstart-drafts.yaml --wandb offline    # --wandb: also as wandb runs

All combinations of the values are measured. The table and sweep.json are sorted by the file's metric. Rerun an
interrupted sweep to resume it. Other methods than grid need `wandb sweep FILE` and `wandb agent`.
"""

import io
import itertools
import math
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval import bench
from eval.core.command_line import Parser, add_wandb_option, exit_status, print_line, typed
from eval.pages import texts
from eval.records.result_folders import RESULTS, plain_name
from eval.records.results import named_figures, read_results
from heads.core.errors import UserError
from heads.core.files import read_given, write_json
from heads.core.strict_settings import Count

COLUMNS = ("speedup", "tau", "tokens_per_second", "identical")
"""Columns of the table, beside the metric."""


class Metric(BaseModel):
    name: str = Field(
        "speedup", pattern=r"^(tau|speedup|(plain_)?tokens_per_second|ms_per_round|loop_share|alpha_\d+)$"
    )
    goal: Literal["maximize", "minimize"] = "maximize"


class Sweep(BaseModel):
    """The keys of a wandb sweep file that are read here. `parameters` are options of eval/bench.py and `head`."""

    name: str = "sweep"
    project: str = "draftsmith"
    program: Literal["eval/bench.py"]
    method: Literal["grid"]
    metric: Metric = Metric(name="speedup")
    parameters: dict[str, dict[Literal["value", "values"], Any]]
    run_cap: Count | None = None


def parse_arguments(arguments: Sequence[str] | None = None) -> Namespace:
    parser = Parser("Measure a head in every setting of a wandb sweep file.")
    parser.add_argument("sweep", type=Path, help="a sweep file, such as recipes/sweeps/quickstart-drafts.yaml")
    parser.add_argument("--out", type=Path, help="folder for the results; default: runs/sweep-NAME, after the file")
    parser.add_argument("--count", type=typed(Count), help="most settings to measure; default: run_cap of the file")
    add_wandb_option(parser, "log each setting as a wandb run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from rich.console import Console

    from eval.pages.report_tables import Table
    from eval.pages.run_report import print_table

    try:
        sweep = Sweep.model_validate(yaml.safe_load(read_given(options.sweep, "a sweep file")))
    except (yaml.YAMLError, ValidationError) as error:
        raise UserError(f"{options.sweep}: expected a sweep file: {' '.join(str(error).split())}") from None
    values = itertools.product(*(each.get("values", [each.get("value")]) for each in sweep.parameters.values()))
    settings = [dict(zip(sweep.parameters, chosen, strict=True)) for chosen in values][: options.count or sweep.run_cap]
    parsed = [bench.parse_arguments(bench_arguments(setting)) for setting in settings]  # raises for a wrong one
    out = options.out or Path("runs", plain_name(f"sweep-{sweep.name}"))
    sign = -1 if sweep.metric.goal == "maximize" else 1
    rows: list[dict[str, Any]] = []
    for number, (setting, measurement) in enumerate(zip(settings, parsed, strict=True), start=1):
        text = " ".join(f"{name}={setting[name]}" for name, each in sweep.parameters.items() if "values" in each)
        print(f"{number}/{len(settings)}  {text}", file=sys.stderr, flush=True)
        os.environ.update(WANDB_PROJECT=sweep.project, WANDB_NAME=text, WANDB_RUN_GROUP=sweep.name)
        folder = out / f"{plain_name(text)[:80]}-{bench.identity(measurement)}"
        rows.append({"setting": setting, "text": text, **measure(setting, folder, options.wandb)})
        cells = rows[-1]["cells"]
        print_line("  " + ", ".join(f"{name} {cell}" for name, cell in cells.items()) if cells else "  failed")
        rows.sort(key=lambda row: math.inf if (n := row["figures"].get(sweep.metric.name)) is None else sign * n)
        write_json(out / "sweep.json", {"sweep": str(options.sweep), "metric": sweep.metric.model_dump(), "rows": rows})
    metric = sweep.metric.name
    names = [*([] if metric in COLUMNS else [metric]), *COLUMNS]
    for row in rows:
        row["cells"].setdefault(metric, texts.number(row["figures"].get(metric)))
    lines = []
    for row in rows:
        lines.append([row["text"], *(row["cells"].get(name, "failed") for name in names)])
    print_table(Table("", [], ["", *names], lines), Console())
    return 1 if any(row["status"] == 1 for row in rows) else max(row["status"] for row in rows)


def bench_arguments(setting: dict[str, object]) -> list[str]:
    """Return the program's arguments in the form of wandb's agent, which drops a switch that is False."""
    given = {name: value for name, value in setting.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


def measure(setting: dict[str, object], folder: Path, wandb: str) -> dict[str, object]:
    """Return the figures of a setting, from its results.json if there is one, else from a new measurement."""
    status = 0
    if not (folder / RESULTS).is_file():
        arguments = [*bench_arguments(setting), f"--out={folder}", f"--wandb={wandb}"]
        with redirect_stdout(io.StringIO()):  # its report is in the folder
            status = exit_status(lambda: bench.main(arguments))
        if status == 130:
            raise KeyboardInterrupt
    row = {"folder": folder.name, "status": status or 1, "figures": {}, "identical": "failed", "cells": {}}
    if (folder / RESULTS).is_file():
        results = read_results(folder / RESULTS)
        m = results.headline
        figures = (texts.speedup_cell(m), texts.tau_text(m), texts.speculative_text(m), texts.exact_cell(results.exact))
        row |= {"status": int(not results.is_exact), "identical": figures[-1]}
        row |= {"figures": named_figures(m), "cells": dict(zip(COLUMNS, figures, strict=True))}
    return row


if __name__ == "__main__":
    sys.exit(exit_status(main))
