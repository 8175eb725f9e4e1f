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
    """Rank of the low-rank matrices."""
    alpha: float = 32.0
    """Scale of the update, which is alpha / rank times the product of the two matrices."""
    modules: tuple[str, ...] | None = None
    """Layers that get an adapter, by the last part of their names, such as `q_proj`. Null: every linear layer but the
    output head."""

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
    """A smaller model with the target's tokenizer: a folder or a Hub id."""
    layers: tuple[int, ...] | None = None
    """Layers of the target, ascending: the draft is a copy of the target with these layers only."""
    fresh: dict[str, Any] | None = None
    """A random model of the target's family: the settings in which it differs from the target's config, such as
    hidden_size."""
    loss: str = "kl"
    """Divergence between the distributions of target and draft: `kl`, `cross_entropy`, `reverse_kl`, `total_variation`,
    `negative_log_acceptance`, `jsd` or `kl_tv`. Or `labels`: cross-entropy on the text."""
    beta: float | None = None
    """`jsd` only: weight of the target's distribution in the mixture. Null: 0.5."""
    lora: LoraSettings | None = None
    """Adapters to train. Null: all weights are trained."""
    model: dict[str, Any]
    """The draft's own config, by which it is made again."""
    vocab_size: int
    """The target's vocabulary, and the rows of the draft's embeddings."""
    common_size: int
    """Tokens that can be drafted, from the first: the draft's own vocabulary held no more."""

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
