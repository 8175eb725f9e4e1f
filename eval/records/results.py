"""Functions that write and read results.json, compare.json and metrics.jsonl (`eval.records.schema`)."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from eval.records.figures_schema import Measurement
from eval.records.head_schema import Point
from eval.records.schema import Results
from eval.records.speedup_checks import why_unreliable
from heads.core.errors import UserError, first_line
from heads.core.files import write_bytes

COMPARED = "compare.json"
"""Name of the file of a comparison of several heads."""


def plain(part: BaseModel) -> dict[str, Any]:
    """Return the keys that were set, without those that have no value."""
    return part.model_dump(by_alias=True, exclude_unset=True)


def as_record(results: Results) -> dict[str, object]:
    """Return the contents of the file. With one head, the headline's figures are at the top level."""
    record = plain(results)
    if results.is_comparison:
        return record
    (head,) = record.pop("heads")
    return {**plain(results.headline), **record, "head": head}


def write_record(record: object, path: Path) -> None:
    """Write a record as JSON atomically. A value that is not finite becomes null."""
    write_bytes(path, to_json(record, indent=1, inf_nan_mode="null", fallback=str) + b"\n")


def write_results(results: Results, path: Path) -> None:
    write_record(as_record(results), path)


def read_results(path: Path) -> Results:
    """Read a results.json or a compare.json. Raise UserError if it is none, or if its values have the wrong form or
    contradict each other."""
    try:
        return Results.model_validate(json.loads(path.read_bytes()))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        what = fault["msg"].removeprefix("Value error, ")
        raise UserError(
            f"{path}: {place or 'the whole'}: {what}; expected a results.json that eval/bench.py wrote; measure again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: expected a results.json that eval/bench.py wrote: {first_line(error)}") from None


def read_log(file: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl without truncated lines, or no records if there is no such file."""
    records = []
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def read_curve(file: Path) -> list[Point]:
    """Return the points of a metrics.jsonl, without lines that are none."""
    points = []
    for record in read_log(file):
        with suppress(ValidationError):
            points.append(Point.model_validate(record))
    return points


def named_figures(m: Measurement) -> dict[str, float]:
    """Return the figures of a setting by name, for wandb and for the ranking of a sweep, without those that are not
    known and without speeds that are not reliable."""
    is_reliable = why_unreliable(m) is None
    speedup = m.speedup if is_reliable else None
    tau_low, tau_high = m.tau.ci95 or (None, None)
    low, high = (speedup and speedup.ci95) or (None, None)
    figures: dict[str, float | None] = {
        "tau": m.tau.mean,
        "tau_low": tau_low,
        "tau_high": tau_high,
        "speedup": speedup.measured if speedup else None,
        "speedup_low": low,
        "speedup_high": high,
        "tokens_per_second": m.speculative.tokens_per_second if is_reliable else None,
        "plain_tokens_per_second": m.baseline.tokens_per_second if m.baseline else None,
        "ms_per_round": m.speculative.ms_per_round if is_reliable else None,
        "loop_share": m.loop_share,
        **{f"alpha_{depth}": alpha for depth, alpha in enumerate(m.alpha, start=1)},
    }
    return {name: value for name, value in figures.items() if value is not None}
