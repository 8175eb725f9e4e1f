"""results.json: its schema, functions that write and read it, and the folders of measurements.

Keys are added, never renamed. Figures at the top level are those of the headline setting. `measurements` contains every
setting; `suites` contains every suite and category at the headline setting. A speedup is reported only if every output
was identical. The newest measurement is found by the time in its file, whatever its folder is called.
"""

import argparse
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model

from eval.benchmark.prompts import split_prompts, suite_name
from eval.benchmark.reliability import why_unreliable
from heads.errors import UserError, first_line
from heads.files import write_text
from heads.tree import MOST_NODES

SCHEMA_VERSION = 1
RESULTS = "results.json"
BENCH = "bench"
"""Folder in a run for later measurements of its head."""
ALWAYS_NAMED = ("trees", "temperatures", "prompts", "batch_sizes", "contexts")
"""Settings that are part of a folder's name even if they have their default values."""
LONGEST_NAME = 150
Results = dict[str, Any]

Number = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, le=10**15)]
Share = Annotated[float, Field(ge=0, le=1)]
Depth = Annotated[int, Field(ge=1, le=MOST_NODES)]
Tokens = Annotated[float, Field(ge=0, le=MOST_NODES + 1)]
"""Acceptance length: tokens per target pass."""
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)] | None
VagueInterval = Annotated[list[Number | None], Field(min_length=2, max_length=2)] | None
Tree = Annotated[str, Field(pattern=r"^[a-z]+(:[0-9x.]+)?$", max_length=5000)]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$")]
"""Time in UTC, so that times sort correctly as text."""
PlainStep = Annotated[float, Field(gt=1e-9, le=1e9)]
Shares = Annotated[list[Share | None], Field(min_length=1)]
Counts = Annotated[list[Whole], Field(min_length=1)]

DIVERGENCE = {
    **dict.fromkeys(("suite", "prompt", "tree", "against"), str),
    **dict.fromkeys(("plain_text", "text"), str | None),
    **{"temperature": Number, "position": Whole, "top_two_margin": Number},
}
EXACT = {
    "prompts": Whole,
    "identical": Whole | None,
    "divergences": [DIVERGENCE],
    "near_ties?": list,
    "kind?": Literal["distribution"],
    "greedy?": ({"prompts": Whole, "identical": Whole}, None),
}
STEP_MS = {"mean": Number | None, "median": Number | None}
SPEEDUP = {"tokens?": Whole, "ratio_of_medians?": Number | None, "reliable?": bool}
TOKEN_MS = {"p50": Number, "p95": Number, "p99": Number}
FIGURES = {
    "tree": Tree,
    "depth": Depth,
    "nodes": Whole,
    "temperature": Number,
    "rule": str,
    "exact": EXACT,
    "tau": {"mean": Tokens, "ci95": Interval},
    "tau_by_position?": [{"from": Whole, "to": Whole, "mean": Tokens, "ci95": Interval, "rounds": Whole}],
    "alpha": Shares,
    "accepted_histogram": Counts,
    "baseline": {"tokens_per_second": Number, "ms_per_token": Number, "token_ms": TOKEN_MS, "step_ms?": STEP_MS},
    "speculative": {
        "tokens_per_second": Number,
        "ms_per_round": Number,
        "token_ms": TOKEN_MS,
        "breakdown_ms": {"draft": Number, "verify": Number, "accept": Number, "commit": Number},
        "plain_step_ms": PlainStep,
        "round_ms?": STEP_MS,
    },
    "speedup": (SPEEDUP | {"measured": Number, "ci95": Interval, "predicted": Number}, None),
    "turns?": {"timed": Whole, "left_out": Whole},
    "loop_share": Share,
    "undecoded": Whole,
}
SUITE = {  # its figures are null if no output has a second token
    "exact": EXACT,
    "tau": {"mean": Tokens | None, "ci95": VagueInterval},
    "baseline": {
        "ms_per_token": Number | None,
        "token_ms": dict.fromkeys(TOKEN_MS, Number | None),
        "step_ms?": STEP_MS,
    },
    "speculative?": {"round_ms?": STEP_MS},
    "speedup": (SPEEDUP | {"measured": Number | None, "ci95": VagueInterval, "predicted?": Number | None}, None),
    "loop_share": Share,
}
FILE = FIGURES | {
    "measured_at": Time,
    "target": {
        **dict.fromkeys(("name", "architecture", "fingerprint"), str),
        **dict.fromkeys(("weight_bytes", "parameters", "layers", "hidden_size", "vocab_size"), Whole),
    },
    "head": {
        "kind": str,
        "path": str,
        "sha256": str | None,
        "parameters": Whole,
        "aux_layer_ids": [int],
        "config": {"depth?": Depth | None},
        "origin?": ({"form": str, "differs": [str]}, None),
    },
    "device": {"name": str, "threads?": Whole},
    "dtype": str,
    "command?": [str],
    "versions": dict[str, str],
    "settings": {
        **{"prompts": str, "suites": [str], "prompts_hash": str},
        **dict.fromkeys(("num_prompts", "distinct_prompts", "max_new_tokens", "batch_size", "repeats", "seed"), Whole),
    },
    "suites": {"*": SUITE},
    "measurements": [FIGURES],
    "auto?": [
        {
            "temperature": Number,
            "curve": [{"tree": Tree, "depth": Depth, "width": Whole, "speedup": Number, "tokens?": Tokens}],
            "proposed": [str],
            "measured": dict[str, Number],
            "unreliable?": [str],
            "chosen": str | None,
            "plain_is_faster": bool,
        }
    ],
    "samples": [
        {
            "suite": str,
            "prompt_id": str,
            "prompt": str,
            "rounds": Whole,
            "tau": Tokens | None,
            "pieces": [{"text": str, "round": Whole, "drafted": bool}],
        }
    ],
}
"""Schema of every key that a report, a model card, a sweep or a plot reads. Other keys may have any value."""


def type_of(form: Any) -> Any:
    """Return the pydantic type of a form: a dictionary is an object with these keys (a key that ends with ? may be
    absent; * is any key), a list contains values of one form, and (form, None) may be null."""
    match form:
        case {"*": item}:
            return dict[str, type_of(item)]  # type: ignore[misc] # made as the program runs
        case dict():
            keys: Any = {
                key.removesuffix("?"): (type_of(item), None if key.endswith("?") else ...) for key, item in form.items()
            }
            return create_model("Object", __config__=ConfigDict(strict=True, extra="ignore"), **keys)
        case [item]:
            return list[type_of(item)]  # type: ignore[misc]
        case (item, None):
            return type_of(item) | None
    return form


FILE_TYPE: TypeAdapter[Any] = TypeAdapter(type_of(FILE))


def write_results(results: Results, path: Path) -> None:
    """Write results.json atomically. A value that is not finite becomes null."""
    write_text(path, json.dumps(_clean(results), indent=1, ensure_ascii=False) + "\n")


def read_results(path: Path) -> Results:
    """Read a results.json. Raise UserError if it is not one, or if its values have the wrong form or contradict each
    other."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected a results.json that eval/bench.py wrote: {first_line(error)}") from error
    if not isinstance(results, dict) or results.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path}: expected a results.json with schema_version {SCHEMA_VERSION}; measure again")
    try:
        FILE_TYPE.validate_python(results)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise UserError(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}; measure again") from None
    if (contradiction := next(contradictions(results), None)) is not None:
        raise UserError(f"{path}: {contradiction}; measure again")
    return results


def read_log(file: Path) -> list[Results]:
    """Return the records of a metrics.jsonl without truncated lines, or no records if there is no such file."""
    records = []
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def contradictions(results: Results) -> Iterator[str]:
    """Yield descriptions of values that have the right form but contradict each other."""
    if not results["measurements"]:
        yield "measurements: expected at least one"
    settings = {"the whole": results, **{f"measurements.{n}": m for n, m in enumerate(results["measurements"])}}
    for place, figures in settings.items():
        if not sum(figures["speculative"]["breakdown_ms"].values()) > 0:
            yield f"{place}: breakdown_ms: expected times above 0"
    failed = results["exact"]["divergences"]
    for place, figures in (settings | {f"suites.{name}": suite for name, suite in results["suites"].items()}).items():
        exact = figures["exact"]
        if len({"kind" in exact, exact.get("greedy") is not None, exact["identical"] is None}) > 1:
            yield f"{place}: exact: kind distribution, greedy, and identical null go together"
        if figures["speedup"] is not None and (failed or exact["divergences"]):
            yield f"{place}: speedup: expected null where the audit failed"
    for n, search in enumerate(results.get("auto", ())):
        known = {point["tree"] for point in search["curve"]}
        if {*search["proposed"]} - known or search["chosen"] not in {*search["measured"], None}:
            yield f"auto.{n}: proposed or chosen: a tree that was not looked at"
        if search["chosen"] is None and search["measured"] and not failed:
            yield f"auto.{n}: chosen: null though the audit held"


def figures_of(results: Results) -> dict[str, float | None]:
    """Return the figures of the headline setting by name, for wandb and for the ranking of a sweep. Speeds that are not
    reliable are None."""
    withheld = why_unreliable(results) is not None
    spread = {"tau": results["tau"]["ci95"], "speedup": None if withheld else results["speedup"]["ci95"]}
    return {
        "tau": results["tau"]["mean"],
        "speedup": None if withheld else results["speedup"]["measured"],
        **{f"{name}_low": ends and ends[0] for name, ends in spread.items()},
        **{f"{name}_high": ends and ends[1] for name, ends in spread.items()},
        "tokens_per_second": None if withheld else results["speculative"]["tokens_per_second"],
        "plain_tokens_per_second": results["baseline"]["tokens_per_second"],
        "ms_per_round": None if withheld else results["speculative"]["ms_per_round"],
        "loop_share": results["loop_share"],
        **{f"alpha_{depth}": alpha for depth, alpha in enumerate(results["alpha"], start=1)},
    }


def _clean(value: Any) -> Any:
    """Return a value that JSON can represent: plain types, with None for NaN and infinity."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): _clean(item) for key, item in value.items()}
        case list() | tuple():
            return [_clean(item) for item in value]
        case str() | int() | None:
            return value
        case _:
            return str(value)


@contextmanager
def own_folder(parent: Path, settings: Any, options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder named with --out, or a new one in `parent` for a measurement with `settings`, a dataclass. On
    exit a new folder, and parents created for it, are removed if they are empty."""
    if options.out:
        yield options.out
        return
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    name = measurement_name(settings, options)
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):  # another process has just made a folder of this name
            folder.mkdir()
            break
    try:
        yield folder
    finally:
        for place in (folder, *made):
            with suppress(OSError):  # it is not empty
                place.rmdir()


def measurement_name(settings: Any, options: argparse.Namespace) -> str:
    """Return a name such as `2026-11-03_14-05-12_chain-5_greedy_python-heldout`: the time, the settings that are always
    named, then all settings that differ from their defaults."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    changed = [f.name for f in fields(settings) if f.name not in ALWAYS_NAMED and given[f.name] != f.default]
    words = [setting_word(name, given[name]) for name in (*ALWAYS_NAMED, *changed) if name in given]
    words += [word for word in (options.dtype, options.quantize) if word not in (None, "auto")]
    return plain_name("_".join([datetime.now().strftime("%Y-%m-%d_%H-%M-%S"), *words]))


def plain_name(text: str) -> str:
    """Return a text as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:LONGEST_NAME].strip("-._+")


def setting_word(name: str, value: Any) -> str:
    """Return a setting as a word of a folder's name."""
    match name:
        case "trees":
            return "+".join(value)
        case "temperatures":
            return "+".join("greedy" if temperature == 0 else f"T{temperature:g}" for temperature in value)
        case "prompts":
            return "+".join(map(suite_name, split_prompts(value)))
    if value is True:
        return name
    return f"{name}-{'+'.join(map(str, value)) if isinstance(value, tuple) else value}".replace("_", "-")


def folders_of(run: Path) -> list[Path]:
    """Return the folders of a run's measurements: the run itself, and the folders in bench/."""
    return [run, *sorted((run / BENCH).glob("*"))]


def newest_results(folders: Iterable[Path]) -> tuple[Path, Results] | None:
    """Return the folder and the results of the newest measurement in some folders, or None if there is none. Of equally
    new ones, return the first. Raise UserError if a results.json is damaged."""
    found = [(folder, read_results(folder / RESULTS)) for folder in folders if (folder / RESULTS).is_file()]
    return max(found, key=lambda pair: str(pair[1]["measured_at"]), default=None)
