"""A wandb sweep file over evaluations, read strictly, and walked without a server: grid or random.

The same file goes to `wandb sweep`: `program` is eval/bench.py, `parameters` are its options (and `head`), `command` is
what an agent runs, with wandb's macros.
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

from eval.benchmark.results import Results
from eval.files import read_given
from heads.errors import UserError, first_line

KEYS = ("name", "description", "project", "entity", "program", "method", "metric", "parameters", "command", "run_cap")
METRICS = ("tau", "speedup", "tokens_per_second", "plain_tokens_per_second", "ms_per_round", "loop_share")
"""Names in `figures_of` of every measurement, beside alpha_1, alpha_2, ..."""
GOALS = ("maximize", "minimize")
METHODS = ("grid", "random")
COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
"""wandb's, where a file names none."""
FLAGS = "${args_no_boolean_flags}"

Setting = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A sweep file, checked."""

    path: Path
    method: str
    program: str
    parameters: dict[str, dict[str, Any]]
    command: tuple[str, ...]
    metric: str | None
    maximize: bool
    run_cap: int | None

    def text(self, setting: Setting) -> str:
        """Return the varied values of a setting in a line."""
        names = [name for name, given in self.parameters.items() if len(given.get("values", (0, 0))) > 1]
        shown = [name for name in names if "value" not in self.parameters[name]] or list(self.parameters)
        return " ".join(f"{name}={setting[name]}" for name in shown)

    def settings(self, count: int | None = None, seed: int = 0) -> list[Setting]:
        """The settings to measure, all different: `count` of them at most, or run_cap."""
        cap = min((number for number in (count, self.run_cap) if number is not None), default=None)
        if self.method == "grid":
            return list(itertools.islice(self._grid(), cap))
        if self.method != "random":
            raise UserError(
                f"{self.path}: method {self.method}: needs a server to choose by; use --wandb online, grid or random"
            )
        if cap is None:
            raise UserError(f"{self.path}: method random: says not how many settings; give run_cap or --count")
        drawn: dict[str, Setting] = {}
        rng = random.Random(seed)
        for _ in range(100 * cap):  # a small space may hold fewer settings than are asked for
            setting = {name: draw(parameter, rng) for name, parameter in self.parameters.items()}
            drawn.setdefault(repr(setting), setting)
            if len(drawn) == cap:
                break
        return list(drawn.values())

    def _grid(self) -> Iterator[Setting]:
        for name, parameter in self.parameters.items():
            if "values" not in parameter and "value" not in parameter:
                raise UserError(
                    f"{self.path}: parameters.{name}: a grid needs value or values; "
                    "write them out, or use method random"
                )
        choices = [parameter.get("values", [parameter.get("value")]) for parameter in self.parameters.values()]
        for chosen in itertools.product(*choices):
            yield dict(zip(self.parameters, chosen, strict=True))

    def words(self, setting: Setting, interpreter: str) -> list[str]:
        """The command of a setting, as wandb's agent would make it."""
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in setting.items()]
        kept = [flag for flag, value in zip(flags, setting.values(), strict=True) if value is not False]
        macros = {"${env}": [], "${interpreter}": [interpreter], "${program}": [self.program]}
        macros |= {FLAGS: kept, "${args}": kept}
        return [part for word in self.command for part in macros.get(word, [word])]

    def arguments(self, setting: Setting) -> list[str]:
        """Return the arguments of the command for the program."""
        words = self.words(setting, "")
        return words[words.index(self.program) + 1 :]


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file. UserError names the key that is wrong."""
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
    parameters = read_parameters(path, raw["parameters"])
    metric, maximize = read_metric(path, raw.get("metric"))
    return Sweep(
        path,
        raw["method"],
        program,
        parameters,
        read_command(path, raw.get("command", list(COMMAND)), parameters),
        metric,
        maximize,
        cap,
    )


def read_parameters(path: Path, raw: Any) -> dict[str, dict[str, Any]]:
    """The parameters, each with a value, values, or a range to draw from."""
    if not isinstance(raw, dict) or not raw:
        raise UserError(f"{path}: parameters: expected options of eval/bench.py with their values")
    for name, parameter in raw.items():
        place = f"{path}: parameters.{name}"
        if not isinstance(parameter, dict):
            raise UserError(f"{place}: expected value, values, or min and max; got {parameter!r}")
        if name == "out":
            raise UserError(f"{place}: every setting has a folder of its own; name --out of the sweep")
        keys, kind = set(parameter) - {"distribution"}, parameter.get("distribution")
        if keys == {"min", "max"}:
            low, high = parameter["min"], parameter["max"]
            if not all(type(bound) in (int, float) for bound in (low, high)) or not low < high:
                raise UserError(f"{place}: expected numbers, min below max; got {low!r} and {high!r}")
            if kind not in (None, "uniform", "int_uniform", "log_uniform_values"):
                raise UserError(f"{place}: distribution: expected uniform, int_uniform or log_uniform_values")
            if kind == "log_uniform_values" and low <= 0:
                raise UserError(f"{place}: log_uniform_values: expected min above 0, got {low!r}")
        elif keys not in ({"value"}, {"values"}) or kind not in (None, "constant", "categorical"):
            raise UserError(f"{place}: expected value, values, or min and max; got {', '.join(sorted(parameter))}")
        elif "values" in keys and (not isinstance(parameter["values"], list) or not parameter["values"]):
            raise UserError(f"{place}: values: expected a list that is not empty, got {parameter['values']!r}")
    return {str(name): parameter for name, parameter in raw.items()}


def read_metric(path: Path, raw: Any) -> tuple[str | None, bool]:
    """The metric's name, and whether more of it is better."""
    if raw is None:
        return None, True
    if not isinstance(raw, dict) or set(raw) != {"name", "goal"} or raw["goal"] not in GOALS:
        raise UserError(f"{path}: metric: expected a name and a goal, {' or '.join(GOALS)}; got {raw!r}")
    if raw["name"] not in METRICS and not re.fullmatch(r"alpha_[1-9]\d*", str(raw["name"])):
        raise UserError(f"{path}: metric: expected {', '.join(METRICS)} or alpha_1, ...; got {raw['name']!r}")
    return str(raw["name"]), raw["goal"] == "maximize"


def read_command(path: Path, raw: Any, parameters: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """The words of the command, macros unfilled."""
    known = (*COMMAND, FLAGS)
    if not isinstance(raw, list) or not all(isinstance(word, str | int | float) for word in raw):
        raise UserError(f"{path}: command: expected a list of words, got {raw!r}")
    words = tuple(str(word) for word in raw)
    for word in words:
        if "${" in word and word not in known:
            raise UserError(f"{path}: command: {word}: expected one of {', '.join(known)}")
    for needed, macros in (("${program}", ("${program}",)), (FLAGS, ("${args}", FLAGS))):
        if sum(word in macros for word in words) != 1:
            raise UserError(f"{path}: command: expected {needed} once")
    switches = [name for name, given in parameters.items() if any(type(v) is bool for v in choices_of(given))]
    if switches and "${args}" in words:
        raise UserError(
            f"{path}: command: ${{args}} makes --{switches[0]}=True of {switches[0]}, which is a switch; write {FLAGS}"
        )
    return words


def choices_of(parameter: dict[str, Any]) -> list[Any]:
    """The values that are written out."""
    return [*parameter.get("values", []), *([parameter["value"]] if "value" in parameter else [])]


def draw(parameter: dict[str, Any], rng: random.Random) -> Any:
    """One value of a parameter."""
    if choices := choices_of(parameter):
        return rng.choice(choices)
    low, high, kind = parameter["min"], parameter["max"], parameter.get("distribution")
    if kind == "log_uniform_values":
        return math.exp(rng.uniform(math.log(low), math.log(high)))
    if kind == "int_uniform" or (kind is None and type(low) is type(high) is int):
        return rng.randint(int(low), int(high))
    return rng.uniform(low, high)


def figures_of(results: Results) -> dict[str, float | None]:
    """Return the figures of a results.json's headline under flat names, for sorting a sweep and for wandb."""
    spec, plain, speedup = results["speculative"], results["baseline"], results["speedup"]
    withheld = speedup is None
    return {
        "tau": results["tau"]["mean"],
        "speedup": None if withheld else speedup["measured"],
        "tokens_per_second": None if withheld else spec["tokens_per_second"],
        "plain_tokens_per_second": plain["tokens_per_second"],
        "ms_per_round": None if withheld else spec["ms_per_round"],
        "loop_share": results["loop_share"],
        **{f"alpha_{depth}": alpha for depth, alpha in enumerate(results["alpha"], start=1)},
    }


def ranked(rows: Sequence[dict[str, Any]], sweep: Sweep) -> list[dict[str, Any]]:
    """Rows by the metric, the best first; those without it last, in the order they were walked."""
    if sweep.metric is None:
        return list(rows)
    values = [row["figures"].get(sweep.metric) for row in rows]
    sign = -1 if sweep.maximize else 1
    order = sorted(range(len(rows)), key=lambda i: math.inf if values[i] is None else sign * values[i])
    return [rows[i] for i in order]


def folder_name(text: str, digest: str) -> str:
    """A folder's name that says what a setting is, as far as there is room, and cannot be another setting's."""
    return f"{re.sub(r'[^A-Za-z0-9.=-]+', '-', text)[:80].strip('-.')}-{digest[:8]}"
