"""A recipe's `head`: one section of settings for each kind of head, generated from that kind's own Settings."""

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, create_model
from pydantic_core import to_jsonable_python
from torch import Tensor

from heads.published import start_from
from heads.registry import HEADS, build_head
from heads.target.model import FrozenTarget
from train.strict_yaml import Settings

INIT_FROM: Any = (
    str | None,
    Field(
        default=None,
        min_length=1,
        description="A head to start from: a run, a folder or a Hub id, ours or another project's. Its weights, "
        "shape and layers are taken; the settings of the training stay the recipe's. Null: a new head.",
    ),
)


def _section(settings: type[Any], **own: Any) -> type[BaseModel]:
    """Return a section with the fields, defaults and docstrings of a dataclass. Most values are checked later, once the
    target is known."""
    hints, meanings = get_type_hints(settings), _field_docstrings(settings)
    named = {
        field.name: (_from_yaml(hints[field.name]), Field(default=field.default, description=meanings.get(field.name)))
        for field in fields(settings)
    }
    made: type[BaseModel] = create_model(settings.__name__, __base__=Settings, __doc__=settings.__doc__, **own, **named)  # type: ignore[call-overload]
    return made


def _from_yaml(hint: Any) -> Any:
    """Return a type hint with lists in place of tuples: YAML has no tuples, and strict checking would refuse lists.
    Integers are limited to 32 bits."""
    if hint is int:
        return Annotated[int, Field(gt=-(2**31), lt=2**31)]
    if is_dataclass(hint) and isinstance(hint, type):
        return _section(hint)
    arguments = tuple(_from_yaml(argument) for argument in get_args(hint) if argument is not Ellipsis)
    if get_origin(hint) is tuple:
        return list[arguments[0]]  # type: ignore[valid-type]
    if get_origin(hint) in (Union, UnionType):
        return Union[arguments]  # noqa: UP007 - built from a tuple
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
    kind: _section(head.Settings, kind=(Literal[kind], Field(description="The method.")), init_from=INIT_FROM)
    for kind, head in HEADS.items()
}
for _kind, _made in SECTIONS.items():
    _made.__doc__ = f"The settings of a head of kind `{_kind}`."
AnyHead: Any = Annotated[Union[tuple(SECTIONS.values())], Field(discriminator="kind")]  # noqa: UP007 - from a tuple


def make_head(section: Any, target: FrozenTarget, token_counts: Tensor) -> Any:
    """Return a new head built from a recipe's section, or one with the weights of the head that `init_from` names."""
    if section.init_from is None:
        return build_head(section.kind, section.model_dump(exclude=OURS), target, token_counts)
    given = section.model_dump(exclude=OURS, exclude_unset=True)
    return start_from(section.init_from, section.kind, given, target)


def resolved_head(head: Any, config: Any) -> BaseModel:
    """Return the section with all its settings filled in from a head's `config`."""
    values = {name: getattr(config, name) for name in type(head).model_fields if name not in OURS}
    resolved: BaseModel = type(head).model_validate(head.model_dump(include=OURS) | to_jsonable_python(values))
    return resolved
