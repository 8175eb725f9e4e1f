"""The keys of a recipe, as --help all prints them and as recipes/KEYS.md lists them: from pydantic's JSON schema."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "mapping"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
OVERFLOW = 1e9
"""Bounds of this size or larger only keep products from overflowing. They are not shown."""
WIDTH = 100
Key = tuple[str, str, str, str]
"""Name, type, default and meaning."""


def keys_of(recipe: type[BaseModel], kind: str | None = None) -> str:
    """Return every key of a recipe with its type, default and meaning. `kind`: of the sections for heads, list only
    that one."""
    lines = [
        "Keys of the recipe. Any of them may be given on the command line, as in train.max_steps=100.",
        "With the key extends, a file names another one, whose settings it takes over and changes.",
    ]
    for title, about, keys in _sections_of(recipe):
        if kind is not None and title.startswith("head") and not title.endswith(f"kind {kind}"):
            continue
        lines += ["", *_wrapped(f"{title}: {about}", "")]
        for key, type_, default, meaning in keys:
            lines += [f"  {key} ({type_}; {default})", *_wrapped(meaning, " " * 6)]
    return "\n".join(lines)


def keys_page(recipe: type[BaseModel]) -> str:
    """Return the keys of a recipe as a page in Markdown. A key that several kinds of head share is listed once."""
    sections = _sections_of(recipe)
    first_head = next(n for n, (title, _, _) in enumerate(sections) if title.startswith("head, "))
    kinds: dict[Key, list[str]] = {}
    for title, _, keys in sections:
        for key in keys if title.startswith("head, ") else ():
            kinds.setdefault(key, []).append(title.rpartition(" ")[2])
    shared = {key: (*key[:3], f"{key[3]} For {', '.join(of)}.") for key, of in kinds.items() if len(of) > 1}
    tables = []
    for title, about, keys in sections:
        tables.append((title, about, [key for key in keys if key not in shared]))
    tables.insert(first_head, ("head, several kinds", "Settings that kinds of head share.", [*shared.values()]))
    lines = [
        "# Keys of a recipe",
        "",
        "`python scripts/write_pages.py` writes this page. `python train/eagle.py --help all` lists those of one kind.",
        "With `extends`, a file names [another one](README.md), whose settings it takes over and changes.",
    ]
    for title, about, keys in tables:
        lines += ["", f"## {title}", "", about.replace("\n", " "), "", "| key | type | default | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for name, type_, default, meaning in keys:
            cells = [f"`{name}`", type_, default.removeprefix("default "), meaning.replace("\n", " ")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sections_of(recipe: type[BaseModel]) -> list[tuple[str, str, list[Key]]]:
    """Return the title, the meaning and the keys of each section."""
    schema = recipe.model_json_schema()
    return [
        (title, section["description"], list(_keys(section, schema, prefix)))
        for title, section, prefix in _sections(schema, schema["$defs"], "", "Top level")
    ]


def _keys(section: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[Key]:
    for name, field in sorted(section["properties"].items(), key=lambda item: item[0] != "kind"):
        default = "required" if name in section.get("required", ()) else _shown(field["default"])
        references = [schema["$defs"][part] for part in _references(field)]
        meaning = field.get("description") or references[0]["description"]  # absent if it is the section's own
        yield f"{prefix}{name}", _type(field), default, meaning


def _wrapped(text: str, indent: str) -> list[str]:
    words = " ".join(text.replace("`", "").split())
    return textwrap.wrap(words, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _sections(
    schema: dict[str, Any], known: dict[str, Any], prefix: str, title: str
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a section and those inside it, each with its title before it and the beginning of its keys after it."""
    yield title, schema, prefix
    for name, field in schema["properties"].items():
        for part in _references(field):
            kind = known[part]["properties"].get("kind")
            whose = f", {title.partition(', ')[2]}".rstrip(", ") if kind is None else f", kind {kind['const']}"
            start = f"{prefix}{name}.0." if field.get("type") == "array" else f"{prefix}{name}."
            yield from _sections(known[part], known, start, f"{prefix}{name}{whose}")


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for option in (*node.get("anyOf", ()), *node.get("oneOf", ()), node.get("items")):
            yield from _references(option)


def _type(node: dict[str, Any], plural: str = "") -> str:
    """Return a type in words, such as `integer >= 1` or `list of texts or null`."""
    if options := node.get("anyOf") or node.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(option, plural) for option in options))
    if "$ref" in node:
        return "section" + plural
    if choices := node.get("enum") or ([node["const"]] if "const" in node else []):
        return " or ".join(map(str, choices))
    if node["type"] == "array":
        count = f"{node['minItems']} " if node.get("minItems") == node.get("maxItems", 0) else ""
        return f"list of {count}{_type(node['items'], 's')}"
    if node["type"] == "null":
        return "null"
    bounds = [f"{sign} {node[name]:g}" for name, sign in BOUNDS.items() if abs(node.get(name, OVERFLOW)) < OVERFLOW]
    return f"{NAMES[node['type']]}{plural} {', '.join(bounds)}".strip()


def _shown(value: object) -> str:
    if isinstance(value, dict) and value:
        return "default see below"
    return f"default {value if isinstance(value, str) else json.dumps(value)}"
