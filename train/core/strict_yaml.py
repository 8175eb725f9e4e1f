"""Recipes as typed settings: read by OmegaConf, checked by pydantic. All errors are reported at once, each with file,
dotted key and a suggestion."""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from yaml import YAMLError

from heads.core.errors import UserError, shown
from heads.core.files import expanded, read_given
from heads.core.strict_settings import MAX_NUMBER, Place, error_text

Key = tuple[str | int, ...]
EXTENDS = "extends"
"""Key of the file whose settings a recipe takes over."""
M = TypeVar("M", bound=BaseModel)


def _check_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError("holds characters that cannot be printed; name another")
    return name


Step = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]
Amount = Annotated[float, Field(gt=0, le=1e9)]
Name = Annotated[str, Field(min_length=1), AfterValidator(_check_name)]
NamedPlace = Annotated[Place, AfterValidator(_check_name)]


@dataclass
class Source:
    """A tree of plain values, the file it is from, the files that this one extends, and the command line's overrides by
    key."""

    tree: Any
    file: str
    overrides: dict[str, str]
    bases: dict[str, object] = field(default_factory=dict)
    """Settings by file: those of `file`, then those of each file that the one before it extends."""

    def line(self, key: Key, what: str) -> str:
        """Return a line about a key that names the override or the file which has it."""
        name = dotted(key)
        places = [text for override, text in self.overrides.items() if f"{name}.".startswith(f"{override}.")]
        places += [file for file, settings in self.bases.items() if _has_key(settings, key)]
        place = [*places, self.file][0]
        return f"{place}: {name}: {what}" if key else f"{place}: {what}"


def _has_key(settings: Any, key: Key) -> bool:
    try:
        for part in key:
            settings = settings[part]
    except (LookupError, TypeError):
        return False
    return True


def dotted(key: Key) -> str:
    return ".".join(map(str, key))


def read_settings(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Read a YAML file and apply `key.sub=value` overrides, in which a value replaces what was there. `--key=value` is
    the same, as W&B's sweeps write it. Interpolations (`${...}`) stay text. UserError with a line for each fault.

    A file may have the key `extends`, the path of another file from its own folder: its settings are merged over those
    of the other file. A list replaces a list.
    """
    configs: dict[str, object] = {}
    file: str | None = str(path)
    while file is not None:
        configs[file] = config = _read_file(file)
        base = _plain(config).get(EXTENDS)
        if EXTENDS in config:
            del config[EXTENDS]
        if base is not None:
            base = os.path.normpath(Path(file).parent / expanded(str(base)))
            if base in configs or not os.path.isfile(base):
                fault = "extends this file itself" if base in configs else "no such file"
                raise UserError(f"{file}: {EXTENDS}: {base}: {fault}")
        file = base
    try:
        merged = OmegaConf.merge(*reversed(configs.values()))
    except UNREADABLE as error:
        raise UserError(f"{path}: {_in_one_line(error)}") from None
    source = overridden(merged, str(path), overrides)
    return replace(source, bases={name: _plain(config) for name, config in configs.items()})


def _read_file(file: str) -> Any:
    text = read_given(Path(file), "a recipe in YAML")
    try:
        config: object = OmegaConf.load(StringIO(text))
        if not OmegaConf.is_dict(config):
            raise ValueError("expected settings, each as `name: value`, got a list")
    except UNREADABLE as error:
        raise UserError(f"{file}: {_in_one_line(error)}") from None
    return config


def overridden(config: Any, file: str, overrides: Sequence[str]) -> Source:
    """Apply overrides to OmegaConf's settings, or to a tree of plain values, which are from `file`."""
    config = OmegaConf.create(config)
    errors: list[str] = []
    places: dict[str, str] = {}
    for override in overrides:
        name, equals, value = override.removeprefix("--").partition("=")
        place = f"override '{override[:80]}'"
        if not equals or not all(name.split(".")):
            errors.append(f"{place}: expected key.sub=value")
            continue
        try:
            read = _plain(OmegaConf.from_dotlist([f"value={value}"]))["value"]
        except UNREADABLE as error:
            errors.append(f"{place}: {_in_one_line(error)}")
            continue
        try:
            OmegaConf.update(config, name, read, merge=False)
        except UNREADABLE:
            errors.append(f"{place}: there is no such entry of a list")
        places = {name: place} | places
    if errors:
        raise UserError("\n".join(errors))
    return Source(_plain(config), file, places)


UNREADABLE = (YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError)
"""Exceptions of OmegaConf for text that holds no settings."""


def _plain(config: object) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def check(source: Source, model: type[M]) -> tuple[M | None, list[str]]:
    """Return the typed settings, or None, and one line for each fault. Null stands for the default of a setting that
    cannot be null: it is removed from the tree."""
    try:  # as JSON, whose lists are tuples where a setting has a tuple
        return model.model_validate_json(json.dumps(source.tree, default=str)), []
    except ValidationError as failure:
        errors = [dict(error) for error in failure.errors(include_url=False)]
    if any([_drop_null(source.tree, _visible(source.tree, error)) for error in errors]):
        return check(source, model)
    alike: dict[Key, list[dict[str, object]]] = {}  # a value that fits no type of a union is one error for each type
    for error in errors:
        alike.setdefault(_visible(source.tree, error), []).append(error)
    return None, [_describe(source, model, key, each) for key, each in alike.items()]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or the known names if none is similar."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"


def _drop_null(tree: Any, key: Key) -> bool:
    for part in key[:-1]:
        tree = tree[part]
    if isinstance(tree, dict) and key and key[-1] in tree and tree[key[-1]] is None:
        del tree[key[-1]]
        return True
    return False


def _describe(source: Source, model: type[BaseModel], key: Key, errors: list[dict[str, Any]]) -> str:
    """Return the line of a key's errors, of which there are several if its value fits no type of a union."""
    error = errors[0]
    value = error["input"]
    context = error.get("ctx", {})
    choices = re.split(", | or ", str(context.get("expected_tags", context.get("expected", ""))).replace("'", ""))
    match error["type"]:
        case "extra_forbidden":
            return source.line(key, _unknown(source, model, key))
        case "missing":
            return source.line(key, "is missing; give it a value")
        case "union_tag_not_found":
            kinds = [kind for section in _sections(model, source.tree, key) for kind in _kinds(section)]
            return source.line((*key, "kind"), f"is missing; one of {', '.join(kinds)}")
        case "union_tag_invalid":
            return source.line((*key, "kind"), f"got {shown(value['kind'])}" + suggest(context["tag"], choices))
        case "literal_error":
            return source.line(key, f"got {shown(value)}" + suggest(str(value), choices))
    message = error_text(error["msg"])
    message += "".join(f" or {other['msg'].removeprefix('Input should be ')}" for other in errors[1:])
    return source.line(key, message if isinstance(value, dict) else f"{message}, got {shown(value)}")


def _unknown(source: Source, model: type[BaseModel], key: Key) -> str:
    section, *others = _sections(model, source.tree, key[:-1])
    name = str(key[-1])
    if now := getattr(section, "renamed", {}).get(name):
        return f"is no key any more; give {dotted((*key[:-1], now))}"
    if kinds := [kind for other in others if name in other.model_fields for kind in _kinds(other)]:
        return f"has no effect here: it belongs to kind {' or '.join(kinds)}; leave it out"
    return "unknown key" + suggest(name, section.model_fields)


def _sections(model: type[BaseModel], tree: Any, key: Key) -> list[type[BaseModel]]:
    """Return the sections that are possible at a key, with the one that the tree's `kind` selects first."""
    sections = [model]
    for part in key:
        tree = tree[part]
        if isinstance(part, str):
            sections = list(_models_in(sections[0].model_fields[part].annotation))
        if isinstance(tree, dict) and "kind" in tree:
            sections.sort(key=lambda section: tree["kind"] not in _kinds(section))
    return sections


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    return get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, list):
        for argument in get_args(annotation):
            yield from _models_in(argument)


def _visible(tree: object, error: dict[str, Any]) -> Key:
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
