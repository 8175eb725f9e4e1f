"""Measure a head in many settings: run a wandb sweep file for eval/bench.py, with or without a wandb server.

    python eval/sweep.py recipes/sweeps/quickstart-drafts.yaml
    python eval/sweep.py FILE --wandb offline    # also record each setting as a wandb run, for `wandb sync` later
    python eval/sweep.py FILE --wandb online     # the server chooses, as with `wandb sweep FILE` and `wandb agent`

Every setting runs in its own process, so that a failure does not affect the other settings. The table, sweep.json and
sweep.csv are sorted by the file's metric. An interrupted sweep continues with the same command, because settings that
were already measured are not measured again.

Exit status: 0; 1 if an output was not the target's own or a measurement failed; 2 for an error that the user can fix.
"""

import argparse
import csv
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.bench import parse_arguments as parse_bench
from eval.measure.command import OFF, Parser, add_wandb_option, exit_status, typed
from eval.measure.folders import plain_name
from eval.measure.progress import Progress
from eval.measure.prompts import split_prompts
from eval.measure.results import Results, figures_of, read_results
from eval.measure.settings import Count, Seed, to_settings
from eval.pages.format import busy_warning, exact_cell
from heads.core.errors import UserError, first_line
from heads.core.files import check_folder, is_file, read_given, write_json, write_text

ROOT = Path(__file__).resolve().parents[1]
METRICS = ("tau", "speedup", "tokens_per_second", "plain_tokens_per_second", "ms_per_round", "loop_share")
"""Names that a sweep can rank by, in addition to alpha_1, alpha_2, ..."""
Setting = dict[str, Any]
Row = dict[str, Any]
Run = Callable[..., Any]


class Metric(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=rf"^({'|'.join(METRICS)}|alpha_[1-9]\d*)$")]
    goal: Literal["maximize", "minimize"]


class Sweep(BaseModel):
    """A sweep file in wandb's format. `parameters` are options of eval/bench.py and `head`, each with `value` or
    `values`; other forms, and the method bayes, need wandb's server. `command` is for wandb's agent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = None
    description: str | None = None
    project: str = "draftsmith"
    entity: str | None = None
    program: Annotated[str, Field(pattern=r"(^|/)eval/bench\.py$")]
    method: Literal["grid", "random", "bayes"]
    metric: Metric = Metric(name="speedup", goal="maximize")
    parameters: Annotated[dict[str, Annotated[dict[str, Any], Field(min_length=1)]], Field(min_length=1)]
    command: list[str] | None = None
    run_cap: Annotated[int, Field(ge=1)] | None = None

    def text(self, setting: Setting) -> str:
        varying = [name for name, given in self.parameters.items() if len(given.get("values", ())) > 1]
        return " ".join(f"{name}={setting[name]}" for name in varying or self.parameters)

    def settings(self, most: int | None, seed: int) -> list[Setting]:
        """Return the settings to measure without a server, all different: the product of the values, or random draws
        from it. At most `most` and `run_cap`."""
        cap = min((number for number in (most, self.run_cap) if number is not None), default=None)
        for name, given in self.parameters.items():
            if self.method == "bayes" or given.keys() not in ({"value"}, {"values"}):
                raise UserError(f"method {self.method}, parameters.{name}: needs a server; use --wandb online")
            if name == "out" or given.get("values") == []:
                raise UserError(f"parameters.{name}: expected an option of eval/bench.py but --out, and its values")
        choices = [given["values"] if "values" in given else [given["value"]] for given in self.parameters.values()]
        walk: Iterator[tuple[Any, ...]] = itertools.product(*choices)
        if self.method == "random":
            if cap is None:
                raise UserError("method random: lacks the number of settings; give run_cap or --count")
            rng = random.Random(seed)  # a small space may have fewer settings than `cap`
            drawn = (tuple(rng.choice(values) for values in choices) for _ in range(100 * cap))
            walk = iter({repr(values): values for values in drawn}.values())
        return [dict(zip(self.parameters, values, strict=True)) for values in itertools.islice(walk, cap)]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "Measure a head in many settings: run a wandb sweep file for eval/bench.py, with or without a wandb server."
    )
    add = parser.add_argument
    add("sweep", type=Path, help="a sweep file, such as recipes/sweeps/quickstart-drafts.yaml")
    add(
        "--out",
        type=Path,
        help="folder for the results; default: runs/sweep-NAME, after the file's `name`, or else the file's own",
    )
    add("--count", type=typed(Count), help="most settings to measure; default: run_cap of the file")
    add("--seed", type=typed(Seed), default=0, help="seed with which method random draws settings")
    add_wandb_option(parser, "log each setting as a wandb run; online: a wandb server chooses the settings")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, run: Run = subprocess.run) -> int:
    """Measure the settings, each in a process started with `run`, or let a server choose them."""
    options = parse_arguments(arguments)
    file = options.sweep
    sweep = read_sweep(file)
    mode = OFF if options.wandb == OFF else os.environ.get("WANDB_MODE") or options.wandb
    if mode == "online":
        return run_agent(file, options.count)
    try:
        settings = sweep.settings(options.count, options.seed)
        places = [place_of(sweep, setting) for setting in settings]  # raises for a wrong setting before measuring
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    out = options.out or Path("runs", plain_name(f"sweep-{sweep.name or file.stem}"))
    check_folder(out, "--out")
    rows: list[Row] = []
    for n, (setting, place) in enumerate(zip(settings, places, strict=True), start=1):
        print(f"{n}/{len(settings)}  {sweep.text(setting)}", file=sys.stderr, flush=True)
        names = {"WANDB_NAME": sweep.text(setting), "WANDB_RUN_GROUP": sweep.name or file.stem}
        rows.append(measure(sweep, setting, out / place, {"WANDB_PROJECT": sweep.project, **names}, options.wandb, run))
        ranked = sorted(rows, key=lambda row: rank(row, sweep.metric))
        write_json(out / "sweep.json", {"sweep": str(file), "metric": sweep.metric.model_dump(), "rows": ranked})
        write_text(out / "sweep.csv", csv_text(sweep, ranked))
    print_table(sweep, ranked)
    print(best_line(sweep, ranked))
    for row in rows:
        for text in filter(None, (row["error"], row["busy"])):
            print(f"{sweep.text(row['setting'])}: {text}; see {out / row['folder']}")
    print(f"written to {out}", file=sys.stderr)
    if mode == "offline":
        print(f"wandb: offline; upload the runs with: wandb sync {out}/*/wandb/offline-run-*", file=sys.stderr)
    return 1 if any(row["status"] == 1 for row in rows) else 2 if any(row["status"] for row in rows) else 0


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raise UserError with the name of a key that is wrong."""
    try:
        sweep = Sweep.model_validate(yaml.safe_load(read_given(path, "a sweep file")))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML ({first_line(error)}); expected a sweep file") from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise UserError(f"{path}: {'.'.join(map(str, fault['loc'])) or 'a sweep file'}: {fault['msg']}") from None
    if not is_file(sweep.program):
        raise UserError(f"{path}: program: no {sweep.program} here; run sweeps from the repository's folder")
    return sweep


def run_agent(file: Path, most: int | None) -> int:
    """Create a sweep from a file on the server, and run its measurements here."""
    import wandb

    os.environ["WANDB_MODE"] = "online"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    if "--wandb=online" not in config.get("command", ()):
        raise UserError(
            f"{file}: command: expected --wandb=online in it, so that wandb hears of it; see recipes/sweeps"
        )
    try:
        sweep_id = wandb.sweep(config, project=config.get("project", "draftsmith"), entity=config.get("entity"))
        wandb.agent(sweep_id, count=most)
    except (wandb.errors.Error, OSError) as error:
        raise UserError(f"wandb: no sweep ({first_line(error)}); log in, or sweep with --wandb offline") from None
    return 0


def bench_arguments(setting: Setting) -> list[str]:
    """Return the program's arguments in the form of wandb's agent. A switch that is False is left out."""
    kept = {name: value for name, value in setting.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in kept.items()]


def place_of(sweep: Sweep, setting: Setting) -> str:
    """Return the name of a setting's folder. It depends on everything that the figures depend on: arguments, head and
    prompt files. Raise UserError for arguments that eval/bench.py would refuse."""
    from heads.published import is_published
    from heads.registry import untrained_kind
    from heads.saved import find_head, weights_hash

    try:
        options = parse_bench(bench_arguments(setting))
        prompts = split_prompts(to_settings(options).prompts)
        (head,) = options.heads
        weights = None
        if not untrained_kind(head):
            weights = weights_hash(head if is_published(head) else find_head(head))
    except UserError as error:
        raise UserError(f"{sweep.text(setting)}: {error}") from None
    texts = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in prompts if is_file(name)]
    said = json.dumps([sorted(bench_arguments(setting)), weights, texts])
    name = re.sub(r"[^A-Za-z0-9.=-]+", "-", sweep.text(setting))[:80].strip("-.")
    return f"{name}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"


def measure(sweep: Sweep, setting: Setting, folder: Path, names: dict[str, str], wandb: str, run: Run) -> Row:
    """Return the row of a setting, from its results.json if there is one, else from a new measurement."""
    status, error, log = 0, None, folder / "log.txt"
    if (results := found(folder)) is None:
        command = [sys.executable, sweep.program, *bench_arguments(setting)]
        command += [f"--out={folder.resolve()}", f"--wandb={wandb}"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as stream, Progress("measuring this setting", announced=True):
            done = run(
                command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path, **names}
            )
        if done.returncode == 130:
            raise KeyboardInterrupt
        status, results = done.returncode, found(folder)
        if results is None:
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            error = next((line.removeprefix("error: ") for line in reversed(lines) if line.strip()), "wrote nothing")
            status = 2 if done.returncode == 2 else 1
    if results is not None and results["exact"]["divergences"]:
        status, error = 1, "an output was not the target's own"
    return {
        "setting": setting,
        "figures": figures_of(results) if results else {},
        "identical": exact_cell(results) if results else "failed",
        "status": status,
        "error": error,
        "busy": results and busy_warning(results["measurements"]),
        "folder": folder.name,
    }


def found(folder: Path) -> Results | None:
    try:
        return read_results(folder / "results.json")
    except UserError:
        return None


def rank(row: Row, metric: Metric) -> float:
    value = row["figures"].get(metric.name)
    return math.inf if value is None else -value if metric.goal == "maximize" else value


def csv_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys([*METRICS, *(name for row in rows for name in row["figures"])]))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*sweep.parameters, *names, "identical", "error", "folder"])
    for row in rows:
        given = [row["setting"][name] for name in sweep.parameters]
        table.writerow([*given, *map(row["figures"].get, names), row["identical"], row["error"], row["folder"]])
    return text.getvalue()


def print_table(sweep: Sweep, rows: Sequence[Row]) -> None:
    shown = list(dict.fromkeys([sweep.metric.name, "tau", "speedup", "tokens_per_second"]))
    table = Table(box=box.SIMPLE, show_edge=False)
    table.add_column("setting", overflow="fold")
    for name in (*shown, "identical"):
        table.add_column(name.replace("_per_second", "/s").replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        figures = [figure_text(row["figures"], name) for name in shown]
        table.add_row(escape(sweep.text(row["setting"])), *figures, row["identical"])
    Console().print(table)


def figure_text(figures: dict[str, float | None], name: str) -> str:
    value, low, high = (figures.get(name + end) for end in ("", "_low", "_high"))
    if value is None:
        return "not measured" if figures else "-"
    text = f"{value:,.{1 if 'second' in name else 2}f}{'x' * (name == 'speedup')}"
    return text if low is None or high is None else f"{text} [{low:.2f}, {high:.2f}]"


def best_line(sweep: Sweep, rows: Sequence[Row]) -> str:
    best, metric = rows[0], sweep.metric.name
    if best["figures"].get(metric) is None:
        return f"best: none, since no setting has a reliable {metric}"
    said = [f"{name} {figure_text(best['figures'], name)}" for name in dict.fromkeys([metric, "tau", "speedup"])]
    return f"best: {sweep.text(best['setting'])}: {', '.join(said)}"


if __name__ == "__main__":
    sys.exit(exit_status(main))
