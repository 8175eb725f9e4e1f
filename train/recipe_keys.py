"""The tables of recipes/README.md: every key that a recipe may have, with its type, default and meaning.

They are generated from pydantic's JSON schema of the settings.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from train.recipe import Recipe
from train.target_recipe import TargetRecipe
from train.usage import HEADING, RECIPE_PART, TARGET_PART, find_part

NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "mapping"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
OVERFLOW = 1e9
"""Bounds of this size or larger only keep products from overflowing. They are not shown."""


@dataclass(frozen=True)
class Key:
    """One row of a table."""

    name: str
    """The dotted name, as in an override."""
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """One table."""

    title: str
    about: str
    keys: list[Key]


def recipe_sections(model: type[BaseModel]) -> Iterator[Section]:
    """Yield the table of a recipe, then the tables of its sections."""
    schema = model.model_json_schema()
    yield from _sections(schema, schema["$defs"], "", "Top level", "")


def _sections(schema: dict[str, Any], known: dict[str, Any], prefix: str, title: str, called: str) -> Iterator[Section]:
    """Yield a section's table and those inside it. `known`: the schemas of all sections by name. `called`: the part of
    the title that names the section's kind."""
    keys: list[Key] = []
    inner: list[tuple[dict[str, Any], str, str]] = []
    for name, field in schema["properties"].items():
        key = prefix + name
        default = "required" if name in schema.get("required", []) else _shown(field["default"])
        parts = [known[part] for part in _references(field)]
        meaning = field.get("description") or parts[0]["description"]  # absent if it equals the section's docstring
        keys.insert(0 if name == "kind" else len(keys), Key(key, _words(field), default, _line(meaning)))
        inner += [(part, f"{key}.0." if field.get("type") == "array" else f"{key}.", key) for part in parts]
    yield Section(title, _line(schema["description"]), keys)
    for section, start, key in inner:
        kind = section["properties"].get("kind")
        whose = called if kind is None else f", kind `{kind['const']}`"
        yield from _sections(section, known, start, f"`{key}`{whose}", whose)


def _references(node: Any) -> Iterator[str]:
    """Yield the names of the sections that a field may hold."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for option in (*node.get("anyOf", ()), *node.get("oneOf", ()), node.get("items")):
            yield from _references(option)


def _words(node: dict[str, Any], plural: str = "") -> str:
    """Return a type in words, such as `integer >= 1` or `list of texts or null`."""
    if options := node.get("anyOf") or node.get("oneOf"):
        return " or ".join(dict.fromkeys(_words(option, plural) for option in options))
    if "$ref" in node:
        return "section" + plural
    if choices := node.get("enum") or ([node["const"]] if "const" in node else []):
        *others, last = (f"`{choice}`" for choice in choices)
        return f"{', '.join(others)} or {last}" if others else last
    if node["type"] == "array":
        count = f"{node['minItems']} " if node.get("minItems") == node.get("maxItems", 0) else ""
        return f"list of {count}{_words(node['items'], 's')}"
    if node["type"] == "null":
        return "null"
    bounds = [f"{sign} {node[name]:g}" for name, sign in BOUNDS.items() if abs(node.get(name, OVERFLOW)) < OVERFLOW]
    return f"{NAMES[node['type']]}{plural} {', '.join(bounds)}".strip()


def _shown(value: Any) -> str:
    """Return a default as YAML."""
    if isinstance(value, dict) and value:
        return "see below"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _line(text: str) -> str:
    return " ".join(text.split())


def markdown(sections: Iterable[Section]) -> str:
    """Return the sections as headings and tables. `train.usage` parses them."""
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
    """Return the page with its generated parts replaced."""
    for name, recipe in ((RECIPE_PART, Recipe), (TARGET_PART, TargetRecipe)):
        part = find_part(page, name)
        page = page[: part.start()] + markdown(recipe_sections(recipe)) + page[part.end() :]
    return page
