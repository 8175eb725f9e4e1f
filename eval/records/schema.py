"""results.json and compare.json as objects.

A file of one head has its facts under `head`, and repeats the figures of the headline setting at the top level, for
readers who look for one number. A file of several heads has `heads`, and each of its measurements names its head. Both
are a `Results`. Keys are added, never renamed; keys that are not known here are kept. A speedup is reported only if
every output was identical.
"""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from eval.records.measure_settings import BenchSettings

HEAD, TARGET = "HEAD", "TARGET"
"""Places of the two folders in a command."""
HEADLINE = ("tree", "temperature", "batch_size", "context")
"""Keys that tell which of the measurements is at the top level."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float that is null in JSON, and NaN here, if nothing was measured."""
Interval = tuple[float, float] | None


class Part(BaseModel):
    """A part of results.json. A field with a default may be absent."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)


class Flip(Part):
    """A choice of a text that fell on another token than plain decoding's (`eval.runtime.near_ties.Mismatch`)."""

    position: int
    token: int
    chosen: int
    gap: Number
    ulp: Number


class Divergence(Part):
    """The first place where a text differs from another."""

    suite: str
    prompt: str
    tree: str
    against: Literal["plain", "itself"] = "plain"
    temperature: float
    position: int
    plain_text: str | None
    """The token of plain decoding, or of the first run; None: that text ended."""
    text: str | None
    top_two_margin: Number
    repeat: int = 0
    plain_token: int | None = None
    token: int | None = None
    near_tie: bool = False
    """True if rounding alone explains the difference."""
    flips: list[Flip] = []
    """Where the choice fell on a token that is not the highest, of a text that was judged."""


class Identical(Part):
    prompts: int
    identical: int


class CheckedDraws(Part):
    """A server's sampled tokens beside the target's distribution at their places."""

    tokens: int
    log_probability: float
    """Their mean log-probability, each at least -10."""
    expected: float
    error: float
    """Standard error of the mean of tokens that the target draws."""
    likeliest: float
    """Share of the tokens that are the likeliest at their place."""
    expected_likeliest: float

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} sampled tokens have a mean log-probability of {self.log_probability:.3f}, expected "
            f"{self.expected:.3f} ± {self.error:.3f}, and {self.likeliest:.1%} are the likeliest, expected "
            f"{self.expected_likeliest:.1%}"
        )


class Exact(Part):
    prompts: int
    identical: int | None = None
    """None if texts are exact in distribution only, or were not compared."""
    divergences: list[Divergence] = []
    near_ties: list[Divergence] = []
    kind: Literal["distribution"] | None = None
    greedy: Identical | None = None
    """If texts are exact in distribution, the same prompts at temperature 0."""
    against: Literal["runtime", "plain server", "distribution", "nothing"] | None = None
    """What a server's texts were compared with. Only the runtime judges differences."""
    draws: CheckedDraws | None = None


class Tau(Part):
    mean: Number
    """Of all rounds."""
    ci95: Interval
    per_request: float | None = None


class Bin(Tau):
    """tau of the rounds that begin at these positions of the text."""

    start: int = Field(validation_alias="from", serialization_alias="from")
    to: int
    rounds: int


class Percentiles(Part):
    p50: Number = math.nan
    p95: Number = math.nan
    p99: Number = math.nan


class Spread(Part):
    mean: Number = math.nan
    median: Number = math.nan


class Baseline(Part):
    """Speed of plain decoding."""

    tokens_per_second: Number
    ms_per_token: Number
    token_ms: Percentiles
    step_ms: Spread = Spread()


class Speculative(Part):
    tokens_per_second: Number = math.nan
    ms_per_round: Number = math.nan
    hidden: bool = False
    """A server kept tokens of its answers back, so that their times are not known."""
    token_ms: Percentiles = Percentiles()
    round_ms: Spread = Spread()
    breakdown_ms: dict[str, float] = {}
    """Time of each phase of a round."""
    plain_step_ms: Number = math.nan


class Speedup(Part):
    measured: Number
    ci95: Interval
    predicted: Number = math.nan
    """From tau and the times of the phases of a round."""
    ratio_of_medians: Number = math.nan
    """The same from the medians of whole rounds and steps."""
    tokens: int | None = None
    """Timed tokens of the side with fewer."""
    reliable: bool = True


class Turns(Part):
    timed: int = 0
    left_out: int = 0


class DraftUse(Part):
    """Rounds of all rows that one of two drafts drafted, and their accepted draft tokens."""

    rounds: int
    accepted: int


class Measurement(Part):
    """Figures of one setting, over all prompts or over those of a suite."""

    head: str = ""
    """Name of one of several heads."""
    tree: str
    depth: int
    nodes: int
    temperature: float
    rule: str
    batch_size: int | None = None
    """Of several that were measured, as is `context`."""
    context: int | None = None
    exact: Exact
    tau: Tau
    tau_by_position: list[Bin] = []
    longest: int = 0
    """Tokens of the longest text, its prompt included."""
    alpha: list[float | None]
    """Acceptance by depth. None: no round came so deep."""
    accepted_histogram: list[int]
    lookup: DraftUse | None = None
    """Of a draft by lookup or a head: the rounds that the lookup drafted. None: there is one draft."""
    least_match: int | None = None
    """Number of tokens of a match from which that lookup drafts."""
    loop_share: float | None
    tokens: int
    undecoded: int
    """Outputs that end with the first token, which is the prefill's."""
    undraftable: float | None = None
    """Share of the texts' tokens that are none of the head's draft vocabulary; None: it drafts all, or it is not
    known."""
    draft_bytes: int | None = None
    """Least bytes of weights that the head reads in a round; None: not known, as in a server."""
    first_token_ms: Percentiles = Percentiles()
    """Of a server."""
    drafted: float | None = None
    """Draft tokens a round in a server, if it counts them."""
    baseline: Baseline | None = None
    """None for an audit without times, and for a server that was measured without a plain one."""
    speculative: Speculative = Speculative()
    speedup: Speedup | None = None
    turns: Turns = Turns()
    suites: dict[str, "Measurement"] = {}
    """The same figures of each suite, and of each category as `suite/category`."""


class Target(Part):
    """Only the name is known of a target that a server has and that is not here."""

    name: str
    architecture: str = ""
    fingerprint: str = ""
    settings: dict[str, Any] = {}
    """Fields of its config.json that change its texts, where they differ from the defaults of its class."""
    tokenizer: str = ""
    """A hash of its tokenizer."""
    quantize: str | None = None
    weight_bytes: int = 0
    parameters: int = 0
    layers: int = 0
    hidden_size: int = 0
    vocab_size: int = 0
    context_length: int = 0
    template: dict[str, Any] = {}
    """Arguments of its chat template."""
    overrides: dict[str, Any] = {}
    """Settings of its generation_config.json that vLLM refuses with a draft, with the values that it takes."""
    two_tables: bool = False
    """Its config ties embeddings and output head, and its checkpoint holds two tables that differ."""


class PointSuite(Part):
    tau: float
    ci95: Interval
    prompts: list[tuple[int, int]]
    """Tokens and rounds of each prompt."""


class TauFigures(Part):
    """tau of a head in training, on held-out prompts."""

    model_config = ConfigDict(extra="ignore")
    tau: float
    ci95: Interval = None
    alpha: list[float | None]
    tau_by_training_step: float | None = None
    """The training step's estimate on the same texts; None if the drafts are not greedy chains, or the logits are
    penalised."""
    is_estimate: bool = False
    """True if nothing was decoded: `tau` is the training step's estimate on training text."""
    suites: dict[str, PointSuite] = {}


class Point(TauFigures):
    """A line of kind `eval` in metrics.jsonl."""

    step: int
    tokens: int
    """Training tokens until then."""
    seconds: float
    lr: float


class HeadConfig(Part):
    depth: int | None = None
    block_size: int | None = None


class Origin(Part):
    """How a published head was read, and what differs from an engine's reading."""

    form: str
    differs: list[str]


class Head(Part):
    name: str = ""
    """Of one of several heads."""
    kind: str
    path: str
    sha256: str | None
    parameters: int
    trained_tokens: int | None = None
    """Tokens of the run until this head was kept."""
    aux_layer_ids: list[int]
    budget_tokens: int | None = None
    """Tokens of the whole run."""
    data_sha256: str | None = None
    """Hash of the training data."""
    context_length: int | None = None
    """Tokens of a row of its training, as far as they are known."""
    positions: int | None = None
    """Positions of a text for which it was made."""
    config: HeadConfig
    curve: list[Point] = []
    """Of a head in the folder of its run: tau over training."""
    origin: Origin | None = None
    unserved: str | None = None
    """Why no engine serves the head; None: one does, or it is not known."""
    serve: str | None = None
    """Command with which an engine serves it as it was fastest, with the words HEAD and TARGET in the place of their
    folders or ids, and notes as comments."""
    why_not: str | None = None
    """Why there is none."""


class Served(Part):
    name: str
    url: str
    model: str
    plain_url: str | None


class Device(Part):
    name: str
    threads: int = 0


class RecordedSettings(BenchSettings):
    """The settings of a measurement, with what is known of its prompts."""

    model_config = ConfigDict(extra="allow", frozen=False, strict=False)
    suites: list[str]
    prompts_hash: str
    num_prompts: int
    distinct_prompts: int
    conversations: int | None = None


class Look(Part):
    """Figures of a draft that a search looked at before it measured the best ones."""

    tree: str
    depth: int
    nodes: int = 0
    width: int
    tokens: Number = math.nan
    speedup: Number
    prompts: int = 0
    least_match: int | None = None


class Search(Part):
    """A search for the fastest draft of one head at one temperature, batch size and context."""

    head: str = ""
    temperature: float
    batch_size: int | None = None
    context: int | None = None
    curve: list[Look]
    matches: list[Look] = []
    """Of a lookup before a head: the fastest draft with other lengths of a match."""
    proposed: list[str]
    measured: dict[str, float] = {}
    """Reliable speedups by tree."""
    unreliable: list[str] = []
    chosen: str | None = None
    plain_is_faster: bool = False

    @property
    def least_match(self) -> int | None:
        """The length of a match with which a lookup before the head was fastest."""
        return max(self.matches, key=lambda look: look.speedup).least_match if self.matches else None


class Piece(Part):
    """A token of an output, its round (0 is the prefill), and whether it was drafted."""

    text: str
    round: int
    drafted: bool


class Decoded(Part):
    """One output, token by token."""

    pieces: list[Piece]
    round_ms: list[float] = []


class Sample(Decoded):
    suite: str
    prompt_id: str
    prompt: str
    output: str
    rounds: int
    tau: Number
    plain: Decoded | None = None


class RooflinePart(Part):
    """A phase of a round: the bytes that it moves, their time at the bandwidth, and the time that it takes."""

    part: str
    bytes: int
    floor_us: float
    us: float
    over_floor: float | None


class Speedups(Part):
    now: float
    floor: float
    """With plain step and round at their floors."""


class Roofline(Part):
    """The phases of a round and of a plain step (`eval.measure.roofline`)."""

    tree: str
    batch_size: int
    length: int
    copy_bandwidth: float
    tau: float
    round: list[RooflinePart]
    round_us: float
    round_floor_us: float
    plain: list[RooflinePart]
    plain_us: float
    plain_floor_us: float
    plain_share_of_bandwidth: float
    speedup: Speedups


class Results(Part):
    """A measurement of one head or of several, here or in a server."""

    schema_version: Literal[1]
    measured_at: str
    """Time in UTC, in one form, so that times sort as text."""
    target: Target
    device: Device
    dtype: str
    versions: dict[str, str]
    settings: RecordedSettings
    command: list[str] = []
    server: Served | None = None
    heads: Annotated[list[Head], Field(min_length=1)]
    exact: Exact
    """Of all measurements together."""
    measurements: Annotated[list[Measurement], Field(min_length=1)]
    auto: list[Search] = []
    samples: list[Sample] = []
    roofline: Roofline | None = None
    chosen: int = Field(0, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def from_file(cls, record: Any) -> Any:
        """Take the one head of a results.json, and find the setting whose figures it has at the top level."""
        if not isinstance(record, dict) or not isinstance(head := record.get("head"), dict):
            return record
        places = [[m.get(key) for key in HEADLINE] for m in record["measurements"]]
        place = [record.get(key) for key in HEADLINE]
        if place not in places:
            raise ValueError("measurements: expected the setting of the figures at the top level")
        chosen, figures = places.index(place), [*record["measurements"]]
        if "suites" not in figures[chosen]:  # older files of a server
            figures[chosen] = {**figures[chosen], "suites": record["suites"]}
        repeated = figures[chosen].keys() - cls.model_fields.keys() | {"head"}
        ours = {key: value for key, value in record.items() if key not in repeated}
        return {**ours, "heads": [head], "measurements": figures, "chosen": chosen}

    @model_validator(mode="after")
    def check_audit(self) -> Self:
        for m in self.measurements:
            for part in (m, *m.suites.values()):
                if part.speedup is not None and (self.exact.divergences or part.exact.divergences):
                    raise ValueError("speedup: expected null where the audit failed")
        for search in self.auto:
            if search.chosen is not None and search.chosen not in search.measured:
                raise ValueError("auto: chosen: expected a draft that was measured")
        return self

    @property
    def is_exact(self) -> bool:
        return not self.exact.divergences

    @property
    def headline(self) -> Measurement:
        return self.measurements[self.chosen]

    @property
    def head(self) -> Head:
        """The only head, or the first."""
        return self.heads[0]

    @property
    def is_comparison(self) -> bool:
        return len(self.heads) > 1

    def head_of(self, measurement: Measurement) -> Head:
        return next(head for head in self.heads if head.name == measurement.head)
