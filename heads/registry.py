"""Registry of the heads, with functions that build them for a target."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heads.blocks.block_heads import BLOCK_HEADS
from heads.core.contract import split_draft
from heads.core.errors import UserError
from heads.formats import draft_model, eagle3, medusa, mtp
from heads.formats.blocks import block_format
from heads.formats.engine_folder import Format
from heads.methods.draft_model import Draft
from heads.methods.eagle3 import Eagle3
from heads.methods.medusa import Medusa
from heads.methods.method_settings import METHODS
from heads.methods.mtp import Mtp
from heads.methods.two_drafts import LookupFirst
from heads.methods.untrained import EarlyExit, EngineLookup, Lookup
from heads.targets.frozen_target import FrozenTarget


@dataclass(frozen=True)
class HeadKind:
    head: type[Any]
    """Class that implements `heads.core.contract.DraftHead`."""
    format: Format
    """Format of the folder in which the head is saved."""
    training: frozenset[str] = frozenset({"depth", "depth_decay", "loss", "later_slots"})
    """Settings that affect only the training. A head that starts from another may have different ones."""
    optional: frozenset[str] = frozenset()
    """Settings that a head that starts from another may leave out (`Eagle3.without`)."""


HEADS = {
    "eagle3": HeadKind(Eagle3, eagle3.FORMAT, optional=frozenset({"fc_norm", "norm_output"})),
    "medusa": HeadKind(Medusa, medusa.FORMAT, frozenset({"depth_decay", "loss", "tree_nodes"})),
    "mtp": HeadKind(Mtp, mtp.FORMAT),
    **{kind: HeadKind(head, block_format(head), head.training_settings) for kind, head in BLOCK_HEADS.items()},
    "draft": HeadKind(Draft, draft_model.FORMAT, frozenset({"loss", "lora"})),
}
"""Methods by kind, the name in recipes and in saved heads. A published head is read as the first kind that recognises
it. Draft models come last, because the folders of other heads look like models, too."""

UNTRAINED: dict[str, type[Any]] = {"lookup": Lookup, "ngram": EngineLookup, "early_exit": EarlyExit}
"""Class of each kind. It implements `heads.core.contract.Drafter`; its `for_target` takes a number and a target."""


def kind_of(head: object) -> str:
    if isinstance(head, LookupFirst):
        return f"lookup+{kind_of(head.head)}"
    kinds = {method.head: kind for kind, method in HEADS.items()} | {cls: kind for kind, cls in UNTRAINED.items()}
    return kinds[type(head)]


def build_head(kind: str, settings: dict[str, Any], target: FrozenTarget, token_counts: Tensor) -> Any:
    """Return a new head for `target`. `settings` are the recipe's; the target's own shape replaces those left out.

    token_counts (V,) int64: how often each target id is a label in the training data. The draft vocabulary is chosen
    from it.
    """
    chosen = {name: value for name, value in settings.items() if value is not None}
    return HEADS[kind].head.for_target(METHODS[kind].settings.from_plain(chosen), target, token_counts)


def untrained_kind(text: str) -> str | None:
    """Return the kind in a text such as `lookup:3`, or None if it has another form or names a head, too."""
    kind, colon, _ = text.partition(":")
    return kind if colon and kind in UNTRAINED and split_draft(text)[0] is None else None


def build_untrained(text: str, target: FrozenTarget) -> Any:
    kind, _, number = text.partition(":")
    if not number.isdecimal():
        raise UserError(f"{text}: expected {kind} with a number, such as {kind}:3")
    return UNTRAINED[kind].for_target(int(number), target)
