"""results.json and compare.json as objects.

A file of one head has its facts under `head`, and repeats the figures of the headline setting at the top level, for
readers who look for one number. A file of several heads has `heads`, and each of its measurements names its head. Both
are a `Results`. Keys are added, never renamed; keys that are not known here are kept. A speedup is reported only if
every output was identical.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from eval.records.figures_schema import Exact, Measurement, Number, Part
from eval.records.head_schema import Head
from eval.records.measure_settings import BenchSettings

HEAD, TARGET = "HEAD", "TARGET"
"""Places of the two folders in a command."""
HEADLINE = ("tree", "temperature", "batch_size", "context")
"""Keys that tell which of the measurements is at the top level."""


class Target(Part):
    """Only the name is known of a target that a server has and that is not here."""

    name: str
    architecture: str = ""
    fingerprint: str = ""
    settings: dict[str, object] = {}
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
    template: dict[str, object] = {}
    """Arguments of its chat template."""
    overrides: dict[str, object] = {}
    """Settings of its generation_config.json that vLLM refuses with a draft, with the values that it takes."""
    two_tables: bool = False
    """Its config ties embeddings and output head, and its checkpoint holds two tables that differ."""


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
    def from_file(cls, record: object) -> object:
        """Take the one head of a results.json, and find the setting whose figures it has at the top level."""
        if not isinstance(record, dict) or not isinstance(head := record.get("head"), dict):
            return record

        def place_of(figures: dict[str, object]) -> list[object]:
            return [figures.get(key) for key in HEADLINE]

        places = [*map(place_of, record["measurements"])]
        place = place_of(record)
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
