"""A recipe's `head`: the settings of whichever kind it names, checked against that kind's own Settings."""

from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import Field, ValidationError, create_model

from heads.errors import shown
from heads.registry import HEADS
from train.strict_yaml import Settings, Source, suggest


def head_errors(source: Source) -> list[str]:
    """One line for each fault of `head` by the Settings of its kind: names and types; values are checked with the
    target at hand."""
    head = source.tree.get("head")
    if not isinstance(head, dict):
        return []  # said by the tree itself
    kind = head.get("kind")
    if kind is None:
        return [source.line(("head", "kind"), f"is missing; one of {', '.join(HEADS)}")]
    if not isinstance(kind, str) or kind not in HEADS:
        return [source.line(("head", "kind"), f"unknown kind {shown(kind)}" + suggest(str(kind), HEADS))]
    hints = get_type_hints(HEADS[kind].Settings)
    names = {name: (_from_yaml(hint) | None, None) for name, hint in hints.items()}
    model = create_model("Head", __base__=Settings, **names)  # type: ignore[call-overload]
    settings = {name: value for name, value in head.items() if name != "kind"}
    try:
        model.model_validate(settings)
    except ValidationError as failure:
        lines = []
        for error in failure.errors(include_url=False):
            name = str(error["loc"][-1])
            if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
                what = f"unknown key for head kind {kind}" + suggest(name, ["kind", *names])
            elif error["type"] == "extra_forbidden":
                what = "unknown key" + suggest(name, _parts(hints[str(error["loc"][0])]))
            else:
                what = f"{error['msg'].removeprefix('Input ')}, got {shown(error['input'])}"
            lines.append(source.line(("head", *error["loc"]), what))
        return lines
    return []


def resolved_settings(kind: str, config: Any) -> dict[str, Any]:
    """A recipe's `head` with every setting that it may give a head of `kind`, as a head of this `config` has them."""
    own = {field.name: getattr(config, field.name) for field in fields(HEADS[kind].Settings)}
    return {
        "kind": kind,
        **{
            name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in own.items()
        },
    }


def _parts(hint: Any) -> list[str]:
    """The names of the settings inside a setting that is a dataclass, or may be one."""
    options = [option for option in (hint, *get_args(hint)) if is_dataclass(option)]
    return [field.name for option in options for field in fields(option)]


def _from_yaml(hint: Any) -> Any:
    """A type hint with lists for tuples: YAML has no tuples, and strict checking would refuse every list. Numbers that
    no tensor's shape can have are refused."""
    if hint is int:
        return Annotated[int, Field(gt=-(2**31), lt=2**31)]
    arguments = tuple(_from_yaml(argument) for argument in get_args(hint) if argument is not Ellipsis)
    if get_origin(hint) is tuple:
        return list[arguments[0]]  # type: ignore[valid-type]
    if is_dataclass(hint):
        parts = get_type_hints(hint)
        keys = {field.name: (_from_yaml(parts[field.name]), None) for field in fields(hint)}
        return create_model("Part", __base__=Settings, **keys)  # type: ignore[call-overload]
    if get_origin(hint) in (Union, UnionType):
        return Union[arguments]  # noqa: UP007 - built from a tuple
    return hint
