"""results.json and compare.json: their schema, and functions that write and read them.

Keys are added, never renamed. Figures at the top level are those of the headline setting. `measurements` contains every
setting; `suites` contains every suite and category, in a measurement at its setting, at the top level at the headline
setting. A speedup is reported only if every output was identical.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import to_json

from eval.measure.speedup_checks import why_unreliable
from heads.core.errors import UserError, first_line
from heads.core.files import write_bytes
from heads.core.tree import MAX_NODES

SCHEMA_VERSION = 1
COMPARED = "compare.json"
"""Name of the file of a comparison of several heads."""
Results = dict[str, Any]

Number = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, le=10**15)]
Share = Annotated[float, Field(ge=0, le=1)]
Depth = Annotated[int, Field(ge=1, le=MAX_NODES)]
Tokens = Annotated[float, Field(ge=0, le=MAX_NODES + 1)]
"""Acceptance length: tokens per target pass."""
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)] | None
VagueInterval = Annotated[list[Number | None], Field(min_length=2, max_length=2)] | None
Tree = Annotated[str, Field(pattern=r"^[a-z]+(:[0-9x.]+)?$", max_length=5000)]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$")]
"""Time in UTC, so that times sort correctly as text."""
Steps = Annotated[dict[Literal["mean", "median"], Number | None], Field(min_length=2)]
Percentiles = Literal["p50", "p95", "p99"]
Phases = Literal["draft", "verify", "accept", "commit"]


class Part(BaseModel):
    """A part of results.json: every key that a report, a model card, a sweep or a plot reads. Other keys may have any
    value. A field with a default may be absent."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Divergence(Part):
    suite: str
    prompt: str
    tree: str
    against: str
    plain_text: str | None
    text: str | None
    temperature: Number
    position: Whole
    top_two_margin: Number


class Identical(Part):
    prompts: Whole
    identical: Whole


class Exact(Part):
    prompts: Whole
    identical: Whole | None
    divergences: list[Divergence]
    near_ties: list[Any] = []
    kind: Literal["distribution"] | None = None
    greedy: Identical | None = None
    against: Literal["runtime", "plain server", "nothing"] | None = None
    """What a server's texts were compared with. Only the runtime judges differences."""

    @model_validator(mode="after")
    def check(self) -> Self:
        uncompared = self.identical is None and self.against != "nothing"
        if len({self.kind is not None, self.greedy is not None, uncompared}) > 1:
            raise ValueError("kind distribution, greedy, and identical null go together")
        return self


class Tau(Part):
    mean: Tokens
    """Of all rounds."""
    ci95: Interval
    per_request: Tokens | None = None
    """Mean of the prompts' own."""


class Bin(Tau):
    start: Whole = Field(alias="from")
    to: Whole
    rounds: Whole


class Baseline(Part):
    tokens_per_second: Number
    ms_per_token: Number
    token_ms: Annotated[dict[Percentiles, Number | None], Field(min_length=3)]
    step_ms: Steps = {}


class Speculative(Part):
    tokens_per_second: Number
    ms_per_round: Number
    token_ms: Annotated[dict[Percentiles, Number | None], Field(min_length=3)]
    breakdown_ms: Annotated[dict[Phases, Number], Field(min_length=4)] | None = None
    plain_step_ms: Annotated[float, Field(gt=1e-9, le=1e9)] | None = None
    round_ms: Steps = {}


class Speedup(Part):
    measured: Number
    ci95: Interval
    predicted: Number | None
    tokens: Whole = 0
    ratio_of_medians: Number | None = None


class Figures(Part):
    """One setting over all prompts."""

    tree: Tree
    depth: Depth
    nodes: Whole
    temperature: Number
    rule: str
    batch_size: Whole = 1
    """Of several that were measured, as is `context`."""
    context: Whole = 0
    exact: Exact
    tau: Tau
    tau_by_position: list[Bin] = []
    alpha: Annotated[list[Share | None], Field(min_length=1)]
    accepted_histogram: Annotated[list[Whole], Field(min_length=1)]
    first_token_ms: dict[Percentiles, Number] = {}
    baseline: Baseline | None
    """None for a server that was measured without a plain one."""
    speculative: Speculative
    speedup: Speedup | None
    turns: dict[Literal["timed", "left_out"], Whole] = {}
    loop_share: Share | None
    undecoded: Whole
    draft_bytes: Whole | None = None
    """Least bytes of weights that the head reads in a round; None: not known, as in a server."""
    suites: dict[str, "Suite"] = {}
    """The same figures of each suite, and of each category as `suite/category`."""

    @model_validator(mode="after")
    def check(self) -> Self:
        phases = self.speculative.breakdown_ms
        if phases is not None and not sum(phases.values()) > 0:
            raise ValueError("breakdown_ms: expected times above 0")
        return self


class FiguresOfHead(Figures):
    head: str
    """Name of one of several heads."""


class SuiteTau(Part):
    mean: Tokens | None
    ci95: VagueInterval


class SuiteBaseline(Part):
    ms_per_token: Number | None
    token_ms: Annotated[dict[Percentiles, Number | None], Field(min_length=3)]
    step_ms: Steps = {}


class SuiteSpeculative(Part):
    round_ms: Steps = {}


class SuiteSpeedup(Part):
    measured: Number | None
    ci95: VagueInterval
    predicted: Number | None = None
    tokens: Whole = 0
    ratio_of_medians: Number | None = None


class Suite(Part):
    """One setting over one suite or category. Figures are null if no output has a second token."""

    exact: Exact
    tau: SuiteTau
    accepted_histogram: Annotated[list[Whole], Field(min_length=1)]
    baseline: SuiteBaseline | None
    speculative: SuiteSpeculative = SuiteSpeculative()
    speedup: SuiteSpeedup | None
    loop_share: Share | None


class Target(Part):
    """Only the name is known of a target that a server has and that is not here."""

    name: str
    architecture: str | None = None
    fingerprint: str | None = None
    weight_bytes: Whole | None = None
    parameters: Whole | None = None
    layers: Whole | None = None
    hidden_size: Whole | None = None
    vocab_size: Whole | None = None
    two_tables: bool = False
    """Its config ties embeddings and output head, and its checkpoint holds two tables that differ."""


class PointSuite(Part):
    tau: Tokens
    ci95: Interval
    prompts: list[Annotated[list[Whole], Field(min_length=2, max_length=2)]]
    """Tokens and rounds of each prompt."""


class Point(Part):
    """A measurement of tau during training, a line of kind `eval` in metrics.jsonl."""

    step: Whole
    tokens: Whole
    """Training tokens until then."""
    seconds: Number
    """Of the training steps until then."""
    lr: Number
    tau: Tokens
    ci95: Interval
    alpha: list[Share | None]
    """Acceptance by depth."""
    is_estimate: bool = False
    """True if nothing was decoded: the training step's estimate on training text."""
    suites: dict[str, PointSuite] = {}


class HeadConfig(Part):
    depth: Depth | None = None


class Origin(Part):
    form: str
    differs: list[str]


class Head(Part):
    kind: str
    path: str
    sha256: str | None
    parameters: Whole
    trained_tokens: Whole | None = None
    """Tokens of the run until this head was kept."""
    aux_layer_ids: list[int]
    budget_tokens: Whole | None = None
    """Tokens of the whole run."""
    data_sha256: str | None = None
    """Hash of the training data."""
    config: HeadConfig
    curve: list[Point] = []
    """Of a head in the folder of its run: tau over training."""
    origin: Origin | None = None
    unserved: str | None = None
    """Why no engine serves the head; None: one does, or it is not known."""


class NamedHead(Head):
    name: str


class Served(Part):
    name: str
    url: str
    model: str
    plain_url: str | None


class Device(Part):
    name: str
    threads: Whole = 0


class Settings(Part):
    prompts: str
    suites: list[str]
    prompts_hash: str
    num_prompts: Whole
    distinct_prompts: Whole
    max_new_tokens: Whole
    batch_size: Whole
    batch_sizes: list[Whole] = []
    repeats: Whole
    seed: Whole


class Look(Part):
    """Figures of a draft that a search looked at before it measured the best ones."""

    tree: Tree
    depth: Depth
    width: Whole
    speedup: Number


class Search(Part):
    temperature: Number
    curve: list[Look]
    proposed: list[str]
    measured: dict[str, Number]
    unreliable: list[str] = []
    chosen: str | None
    plain_is_faster: bool


class Piece(Part):
    text: str
    round: Whole
    drafted: bool


class Decoded(Part):
    """One output, token by token."""

    pieces: list[Piece]
    round_ms: list[Number] = []
    """Time of each round after the prompt's pass."""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.round_ms and any(piece.round > len(self.round_ms) for piece in self.pieces):
            raise ValueError("round_ms: expected a time for each round of the pieces")
        return self


class Sample(Decoded):
    suite: str
    prompt_id: str
    prompt: str
    rounds: Whole
    tau: Tokens | None
    plain: Decoded | None = None
    """The output of plain decoding, whose rounds have one token each."""


class Common(Part):
    """What a results.json and a compare.json have in common."""

    schema_version: Literal[1]
    measured_at: Time
    target: Target
    device: Device
    dtype: str
    command: list[str] = []
    versions: dict[str, str]
    settings: Settings
    exact: Exact
    measurements: Annotated[list[Figures], Field(min_length=1)]
    auto: list[Search] = []

    @model_validator(mode="after")
    def check_audit(self) -> Self:
        failed = bool(self.exact.divergences)
        whole: list[Figures] = list(self.measurements)
        if isinstance(self, File):
            whole.append(self)
        parts: list[Figures | Suite] = [*whole, *(suite for figures in whole for suite in figures.suites.values())]
        for part in parts:
            if part.speedup is not None and (failed or part.exact.divergences):
                raise ValueError("speedup: expected null where the audit failed")
        for search in self.auto:
            if search.chosen not in search.measured and (search.chosen or (search.measured and not failed)):
                raise ValueError("auto: chosen: expected a draft that was measured")
        return self


class File(Common, Figures):
    """A results.json. Its own figures are those of the headline setting."""

    head: Head
    server: Served | None = None
    """Of a measurement of a server; None: measured here."""
    suites: dict[str, Suite]
    samples: list[Sample]


class Comparison(Common):
    """A compare.json."""

    heads: Annotated[list[NamedHead], Field(min_length=1)]
    measurements: Annotated[list[FiguresOfHead], Field(min_length=1)]  # type: ignore[assignment]


def write_record(record: Results, path: Path) -> None:
    """Write a record as JSON atomically. A value that is not finite becomes null."""
    write_bytes(path, to_json(record, indent=1, inf_nan_mode="null", fallback=str) + b"\n")


def write_results(results: Results, path: Path) -> None:
    File.model_validate_json(to_json(results, inf_nan_mode="null", fallback=str))
    write_record(results, path)


def read_results(path: Path) -> Results:
    """Read a results.json, or a compare.json by that name. Raise UserError if it is not one, or if its values have the
    wrong form or contradict each other."""
    form: type[Common] = Comparison if path.name == COMPARED else File
    try:
        text = path.read_bytes()
        form.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place, what = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        raise UserError(
            f"{path}: {place or 'the whole'}: {what}; expected a results.json that eval/bench.py wrote; measure again"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a results.json that eval/bench.py wrote: {first_line(error)}") from None
    results: Results = json.loads(text)
    return results


def read_log(file: Path) -> list[Results]:
    """Return the records of a metrics.jsonl without truncated lines, or no records if there is no such file."""
    records = []
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def read_curve(file: Path) -> list[Results]:
    """Return the points of a metrics.jsonl in the form of `Point`, without lines that are none."""
    points = []
    for record in read_log(file):
        with suppress(ValidationError):
            points.append(Point.model_validate(record).model_dump())
    return points


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
        "plain_tokens_per_second": results["baseline"] and results["baseline"]["tokens_per_second"],
        "ms_per_round": None if withheld else results["speculative"]["ms_per_round"],
        "loop_share": results["loop_share"],
        **{f"alpha_{depth}": alpha for depth, alpha in enumerate(results["alpha"], start=1)},
    }
