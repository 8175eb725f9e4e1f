"""What is known of a head and of its training."""

from pydantic import ConfigDict

from eval.records.figures_schema import Interval, Part


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
