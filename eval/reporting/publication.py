"""Publication of a run: the head's files and its model card, without local paths.

A saved head names its data without paths. The path of its target is replaced by the target's id on the Hub, or by "a
local model".
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmark.results import RESULTS, Results, folders_of, newest_results
from eval.reporting.card import CARD, front_matter, hub_datasets, model_card, quoted
from eval.reporting.format import LOCAL_MODEL, is_exact
from heads.checkpoint import CONFIG, check_loaders, find_head, load_head, read_config
from heads.errors import UserError, first_line
from heads.formats.base import ENGINES
from heads.formats.contract import Verdict, why_unfit
from heads.registry import HEADS
from heads.target.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from heads.target.hub import is_hub_id, repo_and_revision

PLOT = "plots/acceptance.png"
OTHERS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("added_tokens.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
)
"""Files of a Hugging Face model directory that may accompany a head's two files, for example with a draft model."""

BASE = "TARGET"
"""Placeholder in commands for a target without a public name."""
STEPS = 5
"""Number of draft tokens per round for a head without a measured depth or a depth of its training."""

Contents = dict[str, Path | bytes]


@dataclass(frozen=True)
class Publication:
    """Files to publish, by their names in the repository (each a local file or bytes), and what they describe."""

    files: Contents
    kind: str
    base_model: str | None
    measurement: Path | None
    """Folder of the measurement that the card shows."""
    results: Results | None

    @property
    def card(self) -> str:
        """Return the model card."""
        data = self.files[CARD]
        assert isinstance(data, bytes)
        return data.decode()

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes."""
        return {
            name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in self.files.items()
        }


def collect(
    run: Path,
    repo_id: str,
    *,
    results: Path | None = None,
    base_model: str | None = None,
    rights: Callable[[str], Mapping[str, str]] = lambda base: {},
    unmeasured: bool = False,
    unserved: bool = False,
) -> Publication:
    """Collect the publication of a run with its newest measurement, or with the one in the folder `results`. Raise
    UserError if the head is damaged, was not measured (unless `unmeasured`), is not exact, or if no engine serves it or
    one would misread it (unless `unserved`).

    rights: license keys of a target by its id on the Hub, empty if it has none.
    """
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; expected a run directory")
    folder = find_head(run)
    head, record = load_head(folder), read_config(folder)
    found = measured(folder, record, unmeasured, results)
    name = record["target"]["name"]
    beside = folder.resolve().parents  # any of them may be the folder in which training was started
    here = any(os.path.exists(parent / str(name)) for parent in beside)
    base = base_model or (name if isinstance(name, str) and is_hub_id(name) and not here else None)
    target = base or LOCAL_MODEL
    files = head_files(folder, record, base)
    verdicts = head_verdicts(folder, record, found[1] if found else None, repo_id, base)
    if (doubt := why_unfit(verdicts)) is not None and not unserved:
        raise UserError(f"{folder}: {doubt}; mend it, or publish it --unserved")
    command = f"python eval/bench.py {repo_id}{'' if base else ' --target FOLDER_OF_THE_TARGET'}"
    about = f"## Use\n\n```\n{command}\n```\n\n{served_by(verdicts, record, repo_id, base)}"
    data: dict[str, Any] = {
        "rights": rights(base or ""),
        "datasets": hub_datasets(record.get("provenance")),
        "name": repo_id.partition("/")[2],
    }
    if found is None:
        parameters = sum(weight.numel() for weight in head.parameters())
        intro = f"A draft head (`{record['kind']}`, {parameters:,} parameters) for {quoted(target)}."
        parts = [front_matter(record["kind"], target, **data), f"# {record['kind']} on {target}", intro, about]
        card = "\n\n".join([*parts, "## Measured", "Not measured."]) + "\n"
    else:
        place, figures = found
        shown = {**figures, "target": {**figures["target"], "name": target}}
        card = model_card(shown, about=about, data=data)
        plot = place / PLOT
        if plot.is_file():
            files[PLOT] = plot
        else:
            card = "\n".join(line for line in card.splitlines() if PLOT not in line).rstrip() + "\n"
    files[CARD] = card.encode(errors="backslashreplace")  # names from a damaged file may not be valid text
    check_private(files)
    return Publication(files, record["kind"], base, *(found or (None, None)))


def measured(
    folder: Path, record: dict[str, Any], unmeasured: bool, chosen: Path | None
) -> tuple[Path, Results] | None:
    """Return the folder and the results of the measurement in `chosen`, or else of the newest one in the run that
    contains the head. Return None if there is none and `unmeasured` is True."""
    run = Path(os.path.abspath(folder)).parent  # without resolving links: their targets are not in the run
    found = newest_results(folders_of(run) if chosen is None else [chosen])
    if found is None:
        if chosen is not None:
            raise UserError(f"{chosen}: no {RESULTS} in it; name the folder of a measurement")
        if unmeasured:
            return None
        raise UserError(
            f"{run}: no {RESULTS} in it, the head was never measured; run eval/bench.py {folder} --out {run}, "
            "or publish it --unmeasured"
        )
    file, results = found[0] / RESULTS, found[1]
    if not is_exact(results):
        number = len(results["exact"]["divergences"])
        raise UserError(
            f"{file}: the audit failed, {number} outputs are not the target's own; "
            "only a head whose audit holds is published"
        )
    theirs = {"kind": results["head"]["kind"], "config": results["head"]["config"]}
    weights = results["head"].get("sha256")  # missing in older results
    if theirs != {"kind": record["kind"], "config": record["config"]} or weights not in (None, record.get("sha256")):
        raise UserError(f"{file}: measured another head than {folder}; measure this one with eval/bench.py")
    if results["target"]["fingerprint"].partition("-")[0] != record["target"]["fingerprint"].partition("-")[0]:
        raise UserError(f"{file}: measured on another target than {folder} was trained for; measure it on its own")
    return found


def head_verdicts(
    folder: Path, record: dict[str, Any], results: Results | None, repo_id: str, base: str | None
) -> list[Verdict]:
    """Return the result of each engine's check of the head, with as many draft tokens as in its headline setting or its
    training."""
    config = record["config"]
    depth = (results or {}).get("depth") or config.get("depth") or STEPS
    modules = config.get("num_modules", 1)  # vLLM drafts with all of them, once or repeatedly
    target = BASE if base is None else repo_and_revision(base)[0]
    target += "-WITH-ADAPTER" if record["target"].get("adapter") else ""
    return check_loaders(folder, name=repo_id, base=target, steps=max(depth // modules, 1) * modules)


def served_by(verdicts: Sequence[Verdict], record: dict[str, Any], repo_id: str, base: str | None) -> str:
    """Return the section of the card about engines, with the command for each engine."""
    engines = [verdict for verdict in verdicts if verdict.reader in ENGINES]
    lines = ["## Served by", ""]
    for verdict in (verdict for verdict in engines if verdict.serves):
        lines += [f"{verdict.reader}:", "", "```", verdict.command, "```", ""]
    lines += [f"- {verdict.reader}: no, it {verdict.reason}" for verdict in engines if not verdict.serves]
    for verdict in verdicts:
        if verdict.reader not in ENGINES:
            what = f"`{verdict.command}`" if verdict.serves else f"no, it {verdict.reason}"
            lines.append(f"- {verdict.reader}: {what}")
    converters = HEADS[record["kind"]].format.converters(repo_id, base or BASE, record["config"])
    lines += [f"- {line}" for line in converters]
    if record["target"].get("adapter"):
        lines.append("- the target in these commands is the one with `adapter/` merged into it")
    lines += ["", "Names, shapes and fields were compared with what these versions' sources load; they were not run."]
    return "\n".join(lines)


def head_files(folder: Path, record: dict[str, Any], base: str | None) -> Contents:
    """Return the files of a head's folder that are published, with the public name of the target in them."""
    weights = HEADS[record["kind"]].format.weights_file
    files: Contents = {CONFIG: public_config(folder / CONFIG, base), weights: folder / weights}
    for name in OTHERS:
        if (folder / name).is_file():
            files[name] = folder / name
    if record["target"].get("adapter"):
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (folder / ADAPTER / name).is_file():
                raise UserError(f"{folder / ADAPTER / name}: missing; the head is for the target with this adapter")
        config = read_object(folder / ADAPTER / ADAPTER_CONFIG)
        files[f"{ADAPTER}/{ADAPTER_CONFIG}"] = as_json({**config, "base_model_name_or_path": base})
        files[f"{ADAPTER}/{ADAPTER_WEIGHTS}"] = folder / ADAPTER / ADAPTER_WEIGHTS
    return files


def public_config(file: Path, base: str | None) -> bytes:
    """Return a head's config.json with the public name `base` of its target instead of a local path."""
    config = read_object(file)
    if "base_model_name_or_path" in config:
        config["base_model_name_or_path"] = base
    if base and isinstance(config.get("auto_map"), dict):  # code that is published with the target, not with the head
        repo, _ = repo_and_revision(base)
        config["auto_map"] = {
            key: name if "--" in str(name) else f"{repo}--{name}" for key, name in config["auto_map"].items()
        }
    config["draftsmith"]["target"]["name"] = base
    return as_json(config)


def check_private(files: Contents) -> None:
    """Raise UserError with the name of a file if its text contains the path of the user's home directory."""
    home = os.path.expanduser("~").rstrip("/")
    for name, data in files.items():
        text = data if isinstance(data, bytes) else data.read_bytes() if name.endswith(".json") else b""
        if home and f"{home}/".encode() in text:
            raise UserError(f"{name}: would name a path in {home}; take it out of the run's own file of that name")


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raise UserError if the file does not contain one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a JSON object ({first_line(error)}); fetch or train the head again") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: not a JSON object; fetch or train the head again")
    return found


def as_json(value: Any) -> bytes:
    """Return a value as JSON in the layout of a head's files."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
