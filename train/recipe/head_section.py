"""A recipe's `head`: one section of settings for each kind of head, that kind's own settings with three more."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, create_model

from heads.core.engines import Served
from heads.core.errors import UserError
from heads.core.strict_settings import Place, Settings
from heads.methods.method_settings import METHODS

if TYPE_CHECKING:
    from torch import Tensor

    from heads.targets.frozen_target import FrozenTarget


class HeadSection(Settings):
    """Settings that every section has, whatever its method."""

    kind: str
    init_from: Place | None = None
    """A head to start from: a run, a folder or a Hub id, ours or another project's. Its weights, shape and layers are
    taken; the settings of the training stay the recipe's. Heads that draft blocks may start from each other. Null: a
    new head."""
    serve: Annotated[tuple[Served, ...], Field(min_length=1)] | None = None
    """Engines that the head is for. A head that one of them would not serve is refused before anything is computed. A
    derived recipe names all that serve EAGLE-3 heads of the target, and gives the head `fc_norm` and `norm_output` only
    if all of them read these. Null: any."""


SECTIONS: dict[str, object] = {
    kind: create_model(
        method.settings.__name__,
        __base__=(method.settings, HeadSection),
        __doc__=f"The settings of a head of kind `{kind}`.",
        kind=(Literal[kind], Field(description="The method.")),  # type: ignore[arg-type]
    )
    for kind, method in METHODS.items()
}
AnyHead: Any = Annotated[Union[tuple(SECTIONS.values())], Field(discriminator="kind")]  # noqa: UP007 - from a tuple
NOT_METHOD = set(HeadSection.model_fields)


def make_head(section: HeadSection, target: "FrozenTarget", token_counts: "Tensor") -> Any:
    """Return a new head built from a recipe's section, or one with the weights of the head that `init_from` names."""
    from heads.formats.engine_folder import why_unfit  # imports torch, which the schema does not need
    from heads.published import start_from
    from heads.registry import build_head
    from heads.saved import check_unsaved

    settings = section.model_dump(mode="json", exclude=NOT_METHOD, exclude_unset=section.init_from is not None)
    if section.init_from is None:
        head = build_head(section.kind, settings, target, token_counts)
    else:
        head = start_from(section.init_from, section.kind, settings, target, token_counts)
    if section.serve is not None and (reason := why_unfit(check_unsaved(head, target), section.serve)):
        raise UserError(f"head.serve: {reason}; change the head's settings, or leave the engine out")
    return head


def resolved_head(section: HeadSection, config: Settings) -> object:
    """Return a recipe's section with the values that the config of its head has in place of nulls."""
    values = config.model_dump(mode="json", include=type(section).model_fields.keys() - NOT_METHOD)
    return type(section).from_plain(section.model_dump(mode="json", include=NOT_METHOD) | values)
