"""Sweep files of evaluations in wandb's format, and their settings without a server: a grid, or random draws from it.

`wandb sweep` reads the same file: `program` is eval/bench.py, `parameters` are its options (and `head`), and `command`
is for wandb's agent. Distributions, and methods that learn from earlier runs, need wandb's server.
"""

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from heads.errors import UserError, first_line
from heads.files import read_given

KEYS = ("name", "description", "project", "entity", "program", "method", "metric", "parameters", "command", "run_cap")
METRICS = ("tau", "speedup", "tokens_per_second", "plain_tokens_per_second", "ms_per_round", "loop_share")
"""Names that a sweep can rank by, in addition to alpha_1, alpha_2, ..."""
GOALS = ("maximize", "minimize")
METHODS = ("grid", "random")
COMMAND = ("${env}", "${interpreter}", "scripts/tracked.py", "${program}", "${args_no_boolean_flags}")
"""Command of an agent, which sends the figures of its runs to wandb."""

Setting = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Contents of a sweep file, checked by `read_sweep`."""

    path: Path
    name: str
    """The file's `name`, else the name of the file."""
    project: str | None
    method: str
    program: str
    parameters: dict[str, dict[str, Any]]
    command: list[Any] | None
    metric: str | None
    maximize: bool
    run_cap: int | None

    def text(self, setting: Setting) -> str:
        """Return the values of a setting in one line, without those that do not vary."""
        varying = [name for name, given in self.parameters.items() if len(given.get("values", ())) > 1]
        shown = varying or list(self.parameters)
        return " ".join(f"{name}={setting[name]}" for name in shown)

    def settings(self, count: int | None = None, seed: int = 0) -> list[Setting]:
        """Return the settings to measure, all different, and at most `count` and `run_cap` of them."""
        cap = min((number for number in (count, self.run_cap) if number is not None), default=None)
        if self.method not in METHODS:
            raise UserError(
                f"{self.path}: method {self.method}: needs a server to choose by; use --wandb online, grid or random"
            )
        for name, parameter in self.parameters.items():
            if parameter.keys() not in ({"value"}, {"values"}):
                raise UserError(
                    f"{self.path}: parameters.{name}: a server draws from {', '.join(parameter)}; use --wandb online, "
                    "or write value or values"
                )
        choices = [given["values"] if "values" in given else [given["value"]] for given in self.parameters.values()]
        if self.method == "grid":
            walk: Iterator[tuple[Any, ...]] = itertools.product(*choices)
        elif cap is None:
            raise UserError(f"{self.path}: method random: lacks the number of settings; give run_cap or --count")
        else:  # a small space may have fewer settings than `cap`
            rng = random.Random(seed)
            drawn = (tuple(rng.choice(values) for values in choices) for _ in range(100 * cap))
            walk = iter({repr(values): values for values in drawn}.values())
        return [dict(zip(self.parameters, values, strict=True)) for values in itertools.islice(walk, cap)]

    def arguments(self, setting: Setting) -> list[str]:
        """Return the program's arguments in the form of wandb's agent. A switch that is False is left out."""
        kept = {name: value for name, value in setting.items() if value is not False}
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in kept.items()]


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raise UserError with the name of a key that is wrong."""
    try:
        raw = yaml.safe_load(read_given(path, "a sweep file"))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML ({first_line(error)}); expected a sweep file") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a sweep file: method, program, parameters")
    for key in raw:
        if key not in KEYS:
            near = get_close_matches(str(key), KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KEYS)}"
            raise UserError(f"{path}: unknown key {key!r}; {hint}")
    for key in ("method", "program", "parameters"):
        if key not in raw:
            raise UserError(f"{path}: lacks {key}; add it")
    if raw["method"] not in (*METHODS, "bayes"):
        raise UserError(f"{path}: method: expected {', '.join(METHODS)} or bayes, got {raw['method']!r}")
    program = raw["program"]
    if not isinstance(program, str) or Path(program).parts[-2:] != ("eval", "bench.py"):
        raise UserError(f"{path}: program: expected eval/bench.py, got {program!r}")
    cap = raw.get("run_cap")
    if cap is not None and (type(cap) is not int or cap < 1):
        raise UserError(f"{path}: run_cap: expected a whole number from 1 up, got {cap!r}")
    texts = {key: raw.get(key) for key in ("name", "project")}
    for key, text in texts.items():
        if not isinstance(text, str | None):
            raise UserError(f"{path}: {key}: expected text, got {text!r}")
    metric = read_metric(path, raw.get("metric"))
    parameters = read_parameters(path, raw["parameters"])
    return Sweep(
        path,
        texts["name"] or path.stem,
        texts["project"],
        raw["method"],
        program,
        parameters,
        raw.get("command"),
        *metric,
        cap,
    )


def read_parameters(path: Path, raw: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters of a sweep file. Raise UserError for those that no sweep can use."""
    if not isinstance(raw, dict) or not raw:
        raise UserError(f"{path}: parameters: expected options of eval/bench.py with their values")
    for name, parameter in raw.items():
        place = f"{path}: parameters.{name}"
        if not isinstance(parameter, dict) or not parameter:
            raise UserError(f"{place}: expected value or values, got {parameter!r}")
        if name == "out":
            raise UserError(f"{place}: every setting has a folder of its own; name --out of the sweep")
        if "values" in parameter and (not isinstance(parameter["values"], list) or not parameter["values"]):
            raise UserError(f"{place}: values: expected a list that is not empty, got {parameter['values']!r}")
    return {str(name): parameter for name, parameter in raw.items()}


def read_metric(path: Path, raw: Any) -> tuple[str | None, bool]:
    """Return the metric's name, and True if higher is better."""
    if raw is None:
        return None, True
    if not isinstance(raw, dict) or set(raw) != {"name", "goal"} or raw["goal"] not in GOALS:
        raise UserError(f"{path}: metric: expected a name and a goal, {' or '.join(GOALS)}; got {raw!r}")
    if raw["name"] not in METRICS and not re.fullmatch(r"alpha_[1-9]\d*", str(raw["name"])):
        raise UserError(f"{path}: metric: expected {', '.join(METRICS)} or alpha_1, ...; got {raw['name']!r}")
    return str(raw["name"]), raw["goal"] == "maximize"


def ranked(rows: Sequence[dict[str, Any]], sweep: Sweep) -> list[dict[str, Any]]:
    """Return the rows sorted by the metric, the best first. Rows without it are last, in their original order."""

    def key(row: dict[str, Any]) -> float:
        value = row["figures"].get(sweep.metric)
        return math.inf if value is None else -value if sweep.maximize else value

    return sorted(rows, key=key)


def folder_name(text: str, digest: str) -> str:
    """Return a folder's name that describes a setting, shortened if necessary, and is unique because of `digest`."""
    return f"{re.sub(r'[^A-Za-z0-9.=-]+', '-', text)[:80].strip('-.')}-{digest[:8]}"
