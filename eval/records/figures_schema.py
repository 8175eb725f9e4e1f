"""What was measured of one setting: tau, times, speedup, and texts that differ."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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
    busy_cores: float | None = None
    """Cores that other processes used when it began, if they left fewer than its threads need."""
    suites: dict[str, "Measurement"] = {}
    """The same figures of each suite, and of each category as `suite/category`."""
