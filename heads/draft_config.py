"""The settings of a `draft` head."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from heads.errors import UserError
from heads.labels import LABELS
from heads.losses import LOSSES, Divergence, jsd


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters to train in place of whole matrices (LoRA, arXiv 2106.09685); merged in what is saved."""

    rank: int = 16
    alpha: float = 32.0
    """The update is alpha / rank * B A."""
    modules: tuple[str, ...] | None = None
    """Names of the layers that get one, by their last part; every linear layer but the output head if null."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0 or self.modules == ():
            raise UserError(
                f"head.lora: expected a rank of at least 1, alpha above 0 and some modules, got rank {self.rank}, "
                f"alpha {self.alpha}, modules {None if self.modules is None else list(self.modules)}"
            )


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """All that the head's function and its training loss depend on; one of `path`, `layers` and `fresh` is given."""

    path: str | None = None
    """A smaller model that shares the tokenizer: a folder or a hub id."""
    layers: tuple[int, ...] | None = None
    """Made from the target: the layers it keeps, ascending."""
    fresh: dict[str, Any] | None = None
    """A random model of the target's family: what is to differ from the target's config, such as hidden_size."""
    loss: str = "kl"
    """One of heads.losses.LOSSES, or `labels`."""
    beta: float | None = None
    """The weight of the target's law in the mixture of `jsd`; 0.5 if null."""
    lora: LoraSettings | None = None
    """Train adapters; all weights if null."""
    model: dict[str, Any]
    """The draft's own config, by which it is made again."""
    vocab_size: int
    """The target's vocabulary, and the rows of the draft's embeddings."""
    common_size: int
    """Only the first so many tokens are drafted: the draft knew no more."""

    def __post_init__(self) -> None:
        if self.loss not in (*LOSSES, LABELS):
            raise UserError(f"head.loss: expected one of {', '.join([*LOSSES, LABELS])}, got {self.loss!r}")
        if self.beta is not None and self.loss != "jsd":
            raise UserError(f"head.beta: has no effect with loss {self.loss}; leave it out, or set head.loss=jsd")
        if self.beta is not None and not 0 < self.beta < 1:
            raise UserError(f"head.beta: expected a number between 0 and 1, got {self.beta}")

    @property
    def divergence(self) -> Divergence:
        """What the rows' loss is."""
        if self.beta is not None:
            return partial(jsd, beta=self.beta)
        return LOSSES["cross_entropy" if self.loss == LABELS else self.loss]


def typed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as YAML and JSON give them, in the types of `DraftConfig`."""
    typed = dict(settings)
    if typed.get("layers") is not None:
        typed["layers"] = tuple(typed["layers"])
    if typed.get("lora") is not None:
        given = {name: value for name, value in typed["lora"].items() if value is not None}
        if "modules" in given:
            given["modules"] = tuple(given["modules"])
        typed["lora"] = LoraSettings(**given)
    return typed
