"""Checks of YAML against typed settings. All errors are reported at once, each with file, line, dotted key and a
suggestion."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from eval.runtime.sampling import Sampling
from heads.errors import UserError, shown
from heads.files import read_given

Key = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)


def _check_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError("holds characters that cannot be printed; name another")
    return name


MOST = 2**31
"""Bound of counts, steps and seeds: the product of two smaller numbers does not overflow."""
OVERRIDE = "override "
"""Beginning of the place of a key that is given on the command line."""
Count = Annotated[int, Field(ge=1, lt=MOST)]
Step = Annotated[int, Field(ge=0, lt=MOST)]
Seed = Annotated[int, Field(ge=0, lt=MOST)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Weight = Positive | None
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1), AfterValidator(_check_name)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(lambda value: Sampling(value).temperature)]
Share = Annotated[float, Field(gt=0, le=1)]


class Settings(BaseModel):
    """A strict, frozen section: unknown keys are errors, and no value is converted to another type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass
class Source:
    """A tree of plain values, with the location of each of its keys."""

    tree: Any
    places: dict[Key, str]

    def place(self, key: Key) -> str:
        """Return `file:line` of a key, or of the nearest enclosing section that has a location."""
        return next(self.places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in self.places)

    def line(self, key: Key, what: str) -> str:
        """Return the line of one error: location, key, and what is wrong."""
        return f"{self.place(key)}: {dotted(key)}: {what}" if key else f"{self.place(key)}: {what}"


def dotted(key: Key) -> str:
    return ".".join(map(str, key))


def read_settings(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Read a YAML file and apply `key.sub=value` overrides. Raises UserError with a line for each fault."""
    text = read_given(path, "a recipe in YAML")
    try:
        root = yaml.compose(text, _Loader)
        tree = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(_yaml_error(str(path), error)) from None
    if not isinstance(tree, dict):
        got = "an empty file" if tree is None else f"a {type(tree).__name__}"
        raise UserError(f"{path}:1: expected settings, each as `name: value`, got {got}")
    places = {key: f"{path}:{line}" for key, line in _lines(root)}
    source = Source(tree, {**places, (): str(path)})
    errors = [fault for override in overrides if (fault := _override(source, override))]
    if errors:
        raise UserError("\n".join(errors))
    return source


def check(source: Source, model: type[M]) -> tuple[M | None, list[str]]:
    """Return the typed settings, or None, and one line for each fault. Null stands for the default of a setting that
    cannot be null: it is removed from the tree."""
    try:
        return model.model_validate(source.tree), []
    except ValidationError as failure:
        errors = [dict(error) for error in failure.errors(include_url=False)]
    if any([_drop_null(source.tree, _visible(source.tree, error)) for error in errors]):
        return check(source, model)
    alike: dict[Key, list[dict[str, Any]]] = {}  # a value that fits no type of a union is one error for each type
    for error in errors:
        alike.setdefault(_visible(source.tree, error), []).append(error)
    return None, [_describe(source, model, key, found) for key, found in alike.items()]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or the known names if none is similar."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number, and refuses duplicate keys and aliases.

    An alias would be one object in two places: an override of one place would silently change the other.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise _refusal(f"aliases (*{event.anchor}) are not supported; write the value out", event)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError) as error:  # such as month 13, or a number of thousands of digits
            raise _refusal(f"a value that cannot be read ({error})", node) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _refusal(problem: str, at: Any) -> yaml.MarkedYAMLError:
    """Return the error for a node or an event that a recipe may not have."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refusal("expected a plain word as the key", key_node)
        if key_node.tag == "tag:yaml.org,2002:merge":
            raise _refusal("merge keys (<<) are not supported", key_node)
        if key_node.value in seen:
            raise _refusal(f"key '{key_node.value}' is given twice", key_node)
        seen.add(key_node.value)
    return {key.value: loader.construct_object(value, deep=True) for key, value in node.value}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _yaml_error(name: str, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"{name}: nested too deeply for a recipe"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{name}:{error.problem_mark.line + 1}: {error.problem}"
    return f"{name}: {' '.join(str(error).split())}"


def _lines(node: yaml.Node | None, key: Key = ()) -> Iterator[tuple[Key, int]]:
    """Yield each key of a YAML tree with its line number."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield (*key, name.value), name.start_mark.line + 1
            yield from _lines(value, (*key, name.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*key, index), value.start_mark.line + 1
            yield from _lines(value, (*key, index))


def _override(source: Source, override: str) -> str | None:
    """Apply one override `a.b.0.c=value` to the tree; the value replaces what was there. Return what is wrong with it,
    or None. `--a.b.0.c=value` is the same, as W&B's sweeps write it."""
    name, equals, text = override.removeprefix("--").partition("=")
    place = f"{OVERRIDE}'{override}'"
    if not equals or not all(name.split(".")):
        return f"{place}: expected key.sub=value"
    key: Key = tuple(int(part) if part.isdecimal() and len(part) < 10 else part for part in name.split("."))
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        return _yaml_error(place, error)
    tree = source.tree
    for depth, part in enumerate(key):
        last = depth == len(key) - 1
        if isinstance(tree, dict) and isinstance(part, str):
            if last:
                tree[part] = value
            elif not isinstance(tree.get(part), dict | list):
                tree[part] = {}
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            if last:
                tree[part] = value
        else:
            return f"{place}: {dotted(key[: depth + 1])}: there is no such entry"
        if not last:
            tree = tree[part]
    source.places = {known: at for known, at in source.places.items() if known[: len(key)] != key} | {key: place}
    return None


def _drop_null(tree: Any, key: Key) -> bool:
    """Remove the null at a key from its mapping. Return False if there is none."""
    for part in key[:-1]:
        tree = tree[part]
    if isinstance(tree, dict) and key and key[-1] in tree and tree[key[-1]] is None:
        del tree[key[-1]]
        return True
    return False


def _describe(source: Source, model: type[BaseModel], key: Key, errors: list[dict[str, Any]]) -> str:
    """Return the line of a key's errors, of which there are several if its value fits no type of a union."""
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return source.line(key, _unknown(source, model, key))
    if kind == "missing":
        return source.line(key, "is missing; give it a value")
    if kind == "union_tag_not_found" or (kind == "union_tag_invalid" and error["input"]["kind"] is None):
        kinds = [kind for section in _sections(model, source.tree, key) for kind in _kinds(section)]
        return source.line((*key, "kind"), f"is missing; one of {', '.join(kinds)}")
    if kind == "union_tag_invalid":
        tags = re.findall(r"'([^']+)'", context["expected_tags"])
        return source.line(
            (*key, "kind"), f"unknown kind {shown(error['input']['kind'])}" + suggest(context["tag"], tags)
        )
    if kind == "literal_error":
        choices = re.findall(r"'([^']+)'", context["expected"])
        return source.line(key, f"got {shown(error['input'])}" + suggest(str(error["input"]), choices))
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message += "".join(f" or {other['msg'].removeprefix('Input should be ')}" for other in errors[1:])
    given = error["input"]
    return source.line(key, message if isinstance(given, dict) else f"{message}, got {shown(given)}")


def _unknown(source: Source, model: type[BaseModel], key: Key) -> str:
    sections = _sections(model, source.tree, key[:-1])
    name = str(key[-1])
    known = list(dict.fromkeys(field for section in sections[:1] for field in section.model_fields))
    siblings = [section for section in sections[1:] if name in section.model_fields]
    if siblings:
        kinds = " or ".join(kind for section in siblings for kind in _kinds(section))
        return f"has no effect here: it belongs to kind {kinds}; leave it out"
    return "unknown key" + suggest(name, known)


def _sections(model: type[BaseModel], tree: Any, key: Key) -> list[type[BaseModel]]:
    """Return the sections that are possible at a key, with the one that the tree's `kind` selects first."""
    found = [model]
    for part in key:
        tree = tree[part]
        if isinstance(part, str):
            field = found[0].model_fields.get(part) if found else None
            found = list(_models_in(field.annotation)) if field else []
        if isinstance(tree, dict) and "kind" in tree:
            found.sort(key=lambda section: tree["kind"] not in _kinds(section))
    return found


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    """Return the kinds of a section, or none if it has no field `kind`."""
    return get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, list, tuple, dict):
        for argument in get_args(annotation):
            yield from _models_in(argument)


def _visible(tree: Any, error: dict[str, Any]) -> Key:
    """Return the location of a pydantic error without the tags and types of unions, which are not keys in the file."""
    key: list[str | int] = []
    for n, part in enumerate(error["loc"]):
        if isinstance(tree, dict):
            if part not in tree and (n < len(error["loc"]) - 1 or error["type"] != "missing"):
                continue
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        else:
            break
        key.append(part)
    return tuple(key)
