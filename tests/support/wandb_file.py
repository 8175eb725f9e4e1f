"""A reader of the file of an offline wandb run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, FILE_HEADER, PART_HEADER = 32768, 7, 7
FIRST, LAST = 2, 4


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of the only offline run in a folder. Its file is a log of 32 KiB blocks; each part of a record
    follows its checksum, length and kind."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, held = file.read_bytes(), FILE_HEADER, b""
    while at < len(data):
        if BLOCK - at % BLOCK < PART_HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = data[at + PART_HEADER : at + PART_HEADER + length]
        at += PART_HEADER + length
        held = part if kind in (1, FIRST) else held + part
        if kind in (1, LAST):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined] # created at import
            record.ParseFromString(held)
            yield record


def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, list[str]], int | None]:
    """Return the last values, the paths of each model's files, and the exit code of the only offline run in a folder.
    Values are indexed by name, with a slash between its parts."""
    values: dict[str, Any] = {}
    artifacts: dict[str, list[str]] = {}
    code = None
    for record in records(folder):
        if (kind := record.WhichOneof("record_type")) in ("history", "summary"):
            items = record.history.item if kind == "history" else record.summary.update
            for item in items:
                values["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        elif kind == "artifact" and record.artifact.type == "model":
            artifacts[record.artifact.name] = [entry.path for entry in record.artifact.manifest.contents]
        elif kind == "exit":
            code = record.exit.exit_code
    return values, artifacts, code


def identity(folder: Path) -> tuple[str, str, set[str], dict[str, Any], set[str]]:
    """Return the name, the group, the tags and the config of the only offline run in a folder, and the names in its
    history, each of which becomes a chart."""
    found = list(records(folder))
    first, *_, last = 2 * [record.run for record in found if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    steps = [record.history.item for record in found if record.WhichOneof("record_type") == "history"]
    charted = {"/".join(item.nested_key) or item.key for items in steps for item in items}
    return (
        first.display_name,
        first.run_group,
        set(last.tags),
        config,
        {name.removesuffix("/_type") for name in charted},
    )
