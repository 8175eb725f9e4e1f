"""Every key that a recipe may have, with type, default and meaning: the tables of recipes/README.md.

The schema is the source, and the docstring under a field is its meaning.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from train.recipe import Recipe
from train.target_recipe import TargetRecipe
from train.usage import HEADING, RECIPE_PART, TARGET_PART, find_part

NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "mapping", Any: "any value"}
BOUNDS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
OVERFLOW = 1e9


@dataclass(frozen=True)
class Key:
    """One row of a table."""

    name: str
    """Dotted, as an override writes it."""
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """One table."""

    title: str
    about: str
    keys: list[Key]


def model_sections(
    model: type[BaseModel], prefix: str = "", title: str = "Top level", called: str = ""
) -> Iterator[Section]:
    """The table of a section of settings, then those of the sections in it. `called`: the kind that they belong to."""
    keys: list[Key] = []
    inner: list[tuple[type[BaseModel], str, str]] = []
    for name, field in model.model_fields.items():
        key = prefix + name
        row = Key(key, type_text(field.annotation, field.metadata), default_text(field), said(field.description))
        keys.insert(0 if name == "kind" else len(keys), row)
        for part in sections_in(field.annotation):
            inner.append((part, f"{key}.0." if get_origin(field.annotation) is list else f"{key}.", key))
    yield Section(title, said(model.__doc__), keys)
    for part, start, key in inner:
        kind = part.model_fields.get("kind")
        whose = called if kind is None else f", kind `{get_args(kind.annotation)[0]}`"
        yield from model_sections(part, start, f"`{key}`{whose}", whose)


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections of settings that may stand at a key."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from sections_in(argument)


def type_text(annotation: Any, constraints: Sequence[Any] = (), *, plural: bool = False) -> str:
    """A type in words: `integer >= 1`, `list of texts or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        held = (extra.metadata if isinstance(extra, FieldInfo) else [extra] for extra in arguments[1:])
        inner = [part for parts in held for part in parts]
        return type_text(arguments[0], [*constraints, *inner], plural=plural)
    if origin in (Union, UnionType):
        options = [type_text(option, constraints, plural=plural) for option in arguments if option is not NoneType]
        return " or ".join([*dict.fromkeys(options), *(["null"] if NoneType in arguments else [])])
    if origin is Literal:
        *others, last = (f"`{value}`" for value in arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (list, tuple):
        sizes = {extra.min_length for extra in constraints if isinstance(extra, MinLen)}
        sizes &= {extra.max_length for extra in constraints if isinstance(extra, MaxLen)}
        count = "".join(f"{size} " for size in sizes)
        return f"list of {count}{type_text(arguments[0], plural=True)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "sections" if plural else "section"
    name = NAMES[origin or annotation] + ("s" if plural else "")
    bounds = (bound for extra in constraints if (bound := bound_text(extra)))
    return f"{name} {', '.join(bounds)}".strip()


def bound_text(constraint: Any) -> str:
    """`>= 1` for a bound on a number; nothing for other constraints and for bounds against overflow."""
    sign, attribute = BOUNDS.get(type(constraint), ("", ""))
    return f"{sign} {bound:g}" if sign and abs(bound := getattr(constraint, attribute)) < OVERFLOW else ""


def default_text(field: FieldInfo) -> str:
    """The default of a setting as YAML writes it."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "see below" if isinstance(default, BaseModel) else value_text(default)


def value_text(value: Any) -> str:
    """A value as YAML writes it."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def said(docstring: str | None) -> str:
    """A docstring as one line."""
    return " ".join((docstring or "").split())


def markdown(sections: Iterable[Section]) -> str:
    """The sections as headings and tables. `train.usage` reads them back."""
    lines = [""]
    for section in sections:
        lines += [f"### {section.title}", "", section.about, "", HEADING, "|---|---|---|---|"]
        for key in section.keys:
            cells = (f"`{key.name}`", key.type, key.default, key.meaning)
            assert not any("|" in cell for cell in cells), key
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with its generated parts made anew."""
    for name, recipe in ((RECIPE_PART, Recipe), (TARGET_PART, TargetRecipe)):
        part = find_part(page, name)
        page = page[: part.start()] + markdown(model_sections(recipe)) + page[part.end() :]
    return page
