"""provenance.json, which is also in a saved head: how the head was made. Keys that are not known here are kept."""

from pathlib import Path

from pydantic import ValidationError, field_validator

from eval.records.figures_schema import Part
from eval.records.schema import Device
from heads.core.errors import UserError
from heads.core.strict_settings import first_fault
from heads.saved import CONFIG, read_config


class TrainedSource(Part):
    kind: str = "chat"
    path: str = "modules of Python"
    limit: int | None = None


class TrainedAnswers(Part):
    prompts: int | None = None
    temperature: float = 0.0


class RecipeData(Part):
    """A recipe's section `data`."""

    sources: list[TrainedSource] = []
    context_length: int | None = None
    regenerate: TrainedAnswers | None = None


class TrainingData(Part):
    sources: RecipeData = RecipeData()
    sha256: str | None = None

    @field_validator("sources", mode="before")
    @classmethod
    def whole_section(cls, value: object) -> object:
        """Take the sources alone, which older heads have."""
        return {"sources": value} if isinstance(value, list) else value


class Provenance(Part):
    created: str = ""
    command: list[str] = []
    versions: dict[str, str] = {}
    device: Device | None = None
    num_processes: int | None = None
    target: dict[str, object] = {}
    """Its path and dtype, and what tells it from other copies."""
    data: TrainingData = TrainingData()
    steps: int | None = None
    """Steps of the whole run."""
    serve: list[str] | None = None
    """The engines that it was trained for."""
    step: int | None = None
    """The step at which the head was kept."""
    tokens: int | None = None
    """Training tokens until then."""
    tau: float | None = None
    measured: dict[str, object] = {}
    """The settings of the measurement."""
    estimated: str | None = None
    """How tau was estimated, if nothing was decoded."""


def read_provenance(folder: Path) -> Provenance:
    """Return how the head in a folder was made. UserError if the folder has no head, or the record has another form."""
    try:
        return Provenance.model_validate(read_config(folder).get("provenance", {}))
    except ValidationError as failure:
        raise UserError(
            f"{folder / CONFIG}: draftsmith.provenance.{first_fault(failure)}; fetch or train the head again"
        ) from None
