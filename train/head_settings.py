"""A recipe's `head`: one section of settings for each kind of head, generated from that kind's own settings."""

import ast
import inspect
import textwrap
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, create_model
from pydantic_core import to_json

from heads.methods.settings import SETTINGS
from train.core.strict_yaml import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from heads.targets.model import FrozenTarget

INIT_FROM: Any = (
    str | None,
    Field(
        default=None,
        min_length=1,
        description="A head to start from: a run, a folder or a Hub id, ours or another project's. Its weights, "
        "shape and layers are taken; the settings of the training stay the recipe's. Heads that draft blocks may "
        "start from each other. Null: a new head.",
    ),
)


def section(settings: type[Any], about: str | None = None, names: Collection[str] = (), **own: Any) -> type[BaseModel]:
    """Return a section with the fields, defaults and docstrings of a dataclass, or with those of its fields that are
    named. Most values of heads are checked later, once the target is known."""
    hints, meanings = get_type_hints(settings, include_extras=True), _field_docstrings(settings)
    named = {
        field.name: (_typed(hints[field.name]), Field(default=field.default, description=meanings.get(field.name)))
        for field in fields(settings)
        if not names or field.name in names
    }
    made: type[BaseModel] = create_model(
        settings.__name__, __base__=Settings, __doc__=about or settings.__doc__, **own, **named
    )  # type: ignore[call-overload]
    return made


def _typed(hint: Any) -> Any:
    """Return a type hint with sections in place of dataclasses, and integers limited to 32 bits."""
    if hint is int:
        return Annotated[int, Field(gt=-(2**31), lt=2**31)]
    if is_dataclass(hint) and isinstance(hint, type):
        return section(hint)
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_typed(option) for option in get_args(hint))]  # noqa: UP007 - built from a tuple
    return hint


def _field_docstrings(settings: type[Any]) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


OURS = {"kind", "init_from"}
"""Settings that every section has, whatever its method."""
SECTIONS = {
    kind: section(
        settings,
        f"The settings of a head of kind `{kind}`.",
        kind=(Literal[kind], Field(description="The method.")),
        init_from=INIT_FROM,
    )
    for kind, settings in SETTINGS.items()
}
AnyHead: Any = Annotated[Union[tuple(SECTIONS.values())], Field(discriminator="kind")]  # noqa: UP007 - from a tuple


def make_head(section: Any, target: "FrozenTarget", token_counts: "Tensor") -> Any:
    """Return a new head built from a recipe's section, or one with the weights of the head that `init_from` names."""
    from heads.published import start_from  # imports torch, which the schema does not need
    from heads.registry import build_head

    if section.init_from is None:
        return build_head(section.kind, section.model_dump(mode="json", exclude=OURS), target, token_counts)
    given = section.model_dump(mode="json", exclude=OURS, exclude_unset=True)
    return start_from(section.init_from, section.kind, given, target, token_counts)


def resolved_head(head: Any, config: Any) -> BaseModel:
    values = {name: getattr(config, name) for name in type(head).model_fields if name not in OURS}
    resolved: BaseModel = type(head).model_validate_json(to_json(head.model_dump(include=OURS) | values))
    return resolved
