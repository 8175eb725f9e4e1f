"""The form of results.json: everything that a report, a model card, a sweep or a plot reads of it.

A file that is of this form can be rendered. Keys that stand beside these are not read, and may be anything.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from heads.tree import MOST_NODES

Number = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, le=10**15)]
Share = Annotated[float, Field(ge=0, le=1)]
Depth = Annotated[int, Field(ge=1, le=MOST_NODES)]
Tokens = Annotated[float, Field(ge=0, le=MOST_NODES + 1)]
"""Acceptance length: tokens per target pass."""
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)] | None
Tree = Annotated[str, Field(pattern=r"^[a-z]+(:[0-9x.]+)?$", max_length=5000)]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$")]
"""Time in UTC, so that the order of texts is the order of times."""


class Part(BaseModel):
    """A JSON object with these keys and types. Other keys may be present."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Divergence(Part):
    suite: str
    prompt: str
    tree: str
    against: str
    temperature: Number
    position: Whole
    plain_text: str | None
    text: str | None
    top_two_margin: Number


class Greedy(Part):
    prompts: Whole
    identical: Whole


class Exact(Part):
    prompts: Whole
    identical: Whole | None
    divergences: list[Divergence]
    near_ties: list[Any] = []
    kind: Literal["distribution"] = "distribution"
    greedy: Greedy | None = None

    @model_validator(mode="after")
    def check_kind(self) -> Self:
        in_distribution = "kind" in self.model_fields_set
        if in_distribution != (self.greedy is not None) or in_distribution != (self.identical is None):
            raise ValueError("kind distribution, greedy, and identical null go together")
        return self


class Tau(Part):
    mean: Tokens
    ci95: Interval


class Percentiles(Part):
    p50: Number
    p95: Number
    p99: Number


class Baseline(Part):
    tokens_per_second: Number
    ms_per_token: Number
    token_ms: Percentiles


class Breakdown(Part):
    """Time of each phase of a round, `eval.runtime.engine.PHASES`."""

    draft: Number
    verify: Number
    accept: Number
    commit: Number

    @model_validator(mode="after")
    def check_time(self) -> Self:
        if not self.draft + self.verify + self.accept + self.commit > 0:
            raise ValueError("expected times above 0")
        return self


class Speculative(Part):
    tokens_per_second: Number
    ms_per_round: Number
    token_ms: Percentiles
    breakdown_ms: Breakdown
    plain_step_ms: Annotated[float, Field(gt=1e-9, le=1e9)]


class Speedup(Part):
    measured: Number
    ci95: Interval
    predicted: Number


class Adaptive(Part):
    shares: dict[str, Share]


class Figures(Part):
    """Figures of one setting."""

    tree: Tree
    depth: Depth
    nodes: Whole
    temperature: Number
    rule: str
    exact: Exact
    tau: Tau
    alpha: Annotated[list[Share | None], Field(min_length=1)]
    accepted_histogram: Annotated[list[Whole], Field(min_length=1)]
    baseline: Baseline
    speculative: Speculative
    speedup: Speedup | None
    adaptive: Adaptive = Adaptive(shares={})
    loop_share: Share
    undecoded: Whole

    @model_validator(mode="after")
    def check_exact(self) -> Self:
        if self.exact.divergences and self.speedup is not None:
            raise ValueError("speedup: expected null where the audit failed")
        return self


class SuiteTau(Part):
    mean: Tokens | None
    ci95: Annotated[list[Number | None], Field(min_length=2, max_length=2)] | None


class SuiteSpeedup(Part):
    measured: Number | None
    ci95: Annotated[list[Number | None], Field(min_length=2, max_length=2)] | None


class SuitePercentiles(Part):
    p50: Number | None
    p95: Number | None
    p99: Number | None


class SuiteBaseline(Part):
    ms_per_token: Number | None
    token_ms: SuitePercentiles


class Suite(Part):
    """Figures of one suite at the headline setting; None if no output has a second token."""

    exact: Exact
    tau: SuiteTau
    baseline: SuiteBaseline
    speedup: SuiteSpeedup | None
    loop_share: Share


class Adapter(Part):
    parameters: Whole
    rank: Whole


class Target(Part):
    name: str
    architecture: str
    fingerprint: str
    weight_bytes: Whole
    parameters: Whole
    layers: Whole
    hidden_size: Whole
    vocab_size: Whole
    grown_from: str | None
    adapter: Adapter | None


class HeadConfig(Part):
    depth: Depth | None = None


class Head(Part):
    kind: str
    path: str
    sha256: str | None
    parameters: Whole
    aux_layer_ids: list[int]
    config: HeadConfig


class Device(Part):
    name: str
    threads: Whole = 0


class Settings(Part):
    prompts: str
    suites: list[str]
    num_prompts: Whole
    distinct_prompts: Whole
    prompts_hash: str
    max_new_tokens: Whole
    batch_size: Whole
    repeats: Whole
    seed: Whole


class Point(Part):
    """A draft in the cost model."""

    tree: Tree
    depth: Depth
    width: Whole
    speedup: Number


class Search(Part):
    """A search of `--tree auto`."""

    temperature: Number
    curve: list[Point]
    proposed: list[str]
    measured: dict[str, Number]
    chosen: str | None
    plain_is_faster: bool

    @model_validator(mode="after")
    def check_names(self) -> Self:
        if {*self.proposed} - {point.tree for point in self.curve} or {self.chosen} - {*self.measured, None}:
            raise ValueError("proposed or chosen: a tree that was not looked at")
        return self


class Piece(Part):
    text: str
    round: Whole
    drafted: bool


class Sample(Part):
    suite: str
    prompt_id: str
    prompt: str
    rounds: Whole
    tau: Tokens | None
    pieces: list[Piece]


class ResultsFile(Figures):
    """The whole file: figures of the headline setting, and their target, head and machine."""

    schema_version: int
    measured_at: Time
    target: Target
    head: Head
    device: Device
    dtype: str
    versions: dict[str, str]
    settings: Settings
    suites: dict[str, Suite]
    measurements: Annotated[list[Figures], Field(min_length=1)]
    auto: list[Search] = []
    samples: list[Sample]

    @model_validator(mode="after")
    def check_searches(self) -> Self:
        stated: list[Any] = [self.speedup, *(m.speedup for m in self.measurements)]
        stated += [suite.speedup for suite in self.suites.values()]
        if self.exact.divergences and any(stated):
            raise ValueError("speedup: expected null everywhere where the audit failed")
        if not self.exact.divergences and any(search.chosen is None for search in self.auto):
            raise ValueError("auto: chosen is null though the audit held")
        return self
