"""results.json: the figures of a measurement in one dictionary (`eval.benchmark.figures`), and how it is written and
read.

Keys are added, never renamed. Figures at the top level are those of the headline setting; `measurements` has every
setting, `suites` every suite and category at the headline setting. A speedup stands nowhere unless every output was
identical.
"""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eval.benchmark.results_schema import ResultsFile
from eval.files import write_text
from heads.errors import UserError, first_line

SCHEMA_VERSION = 1
Results = dict[str, Any]


def write_results(results: Results, path: Path) -> None:
    """Write results.json whole or not at all. A value that is not finite becomes null."""
    write_text(path, json.dumps(_clean(results), indent=1, ensure_ascii=False) + "\n")


def read_results(path: Path) -> Results:
    """Read a results.json. UserError if it is not one, or a value in it has the wrong form."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected a results.json that eval/bench.py wrote: {first_line(error)}") from error
    if not isinstance(results, dict) or results.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path}: expected a results.json with schema_version {SCHEMA_VERSION}; measure again")
    try:
        ResultsFile.model_validate(results)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the whole"
        raise UserError(f"{path}: {place}: {fault['msg']}; measure again") from None
    return results


def finite(value: float) -> float | None:
    """Return a number if JSON can hold it, else None."""
    return value if math.isfinite(value) else None


def _clean(value: Any) -> Any:
    """Return a value fit for JSON: plain types, without NaN and infinity."""
    match value:
        case float():
            return finite(value)
        case dict():
            return {str(key): _clean(item) for key, item in value.items()}
        case list() | tuple():
            return [_clean(item) for item in value]
        case str() | int() | None:
            return value
        case _:
            return str(value)
