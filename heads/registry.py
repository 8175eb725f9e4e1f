"""Registry of the heads, and their construction for a target."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from heads.base import from_plain
from heads.draft_model import Draft
from heads.eagle3 import Eagle3
from heads.early_exit import EarlyExit
from heads.errors import UserError
from heads.lookup import Lookup
from heads.medusa import Medusa
from heads.mtp import Mtp
from heads.target.frozen import FrozenTarget

HEADS: dict[str, type[Any]] = {"eagle3": Eagle3, "draft": Draft, "medusa": Medusa, "mtp": Mtp}
"""kind -> a class that fulfils `heads.base.DraftHead`."""

UNTRAINED: dict[str, type[Any]] = {"lookup": Lookup, "early_exit": EarlyExit}
"""kind -> a class that fulfils `heads.base.Drafter` and is made from a number and a target, by `for_target`."""


def kind_of(head: Any) -> str:
    """Return the kind of a head."""
    return next(kind for kind, cls in {**HEADS, **UNTRAINED}.items() if isinstance(head, cls))


def build_head(kind: str, settings: dict[str, Any], target: FrozenTarget, token_counts: Tensor) -> Any:
    """A new head for `target`. `settings` are the recipe's; what it leaves out follows the target's own shape.

    token_counts (V,) int64: how often each target id is a label in the training data; it decides the draft vocabulary.
    """
    head = HEADS[kind]
    chosen = {name: value for name, value in settings.items() if value is not None}
    if others := chosen.keys() - {field.name for field in fields(head.Settings)}:
        raise UserError(f"head.{min(others)}: decided by the target, or no setting at all; take it out of the recipe")
    return head.for_target(from_plain(head.Settings, chosen), target, token_counts)


def untrained_kind(text: str) -> str | None:
    """Return the kind in a text such as `lookup:3`, or None if it has another form."""
    kind, colon, _ = text.partition(":")
    return kind if colon and kind in UNTRAINED else None


def build_untrained(text: str, target: FrozenTarget) -> Any:
    """Make the drafter that `KIND:NUMBER` names."""
    kind, _, number = text.partition(":")
    if not number.isdecimal():
        raise UserError(f"{text}: expected {kind} with a number, such as {kind}:3")
    return UNTRAINED[kind].for_target(int(number), target)
