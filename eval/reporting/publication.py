"""Publication of a run: the head's files and its model card, without local paths.

A saved head names its data without paths. The path of its target is replaced by the target's id on the Hub, or by
"a local model".
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.benchmark.results import RESULTS, Results, folders_of, newest_results, read_log
from eval.reporting.card import CARD, fenced, front_matter, hub_datasets, model_card, quoted
from eval.reporting.format import LOCAL_MODEL, as_markdown, is_exact, why_unreliable
from heads.checkpoint import CONFIG, check_loaders, find_head, load_head, read_config
from heads.errors import UserError, first_line
from heads.formats.engine import ENGINES, Verdict, why_unfit
from heads.registry import HEADS, untrained_kind
from heads.target.hub import is_hub_id, repo_and_revision, with_names

PLOT = "plots/acceptance.png"
OTHERS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("added_tokens.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
)
"""Files that may accompany a head's config and weights: a draft model is a whole Hugging Face model directory."""

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
SHOWN = ("optimizer", "lr", "max_steps", "tokens_per_step", "batch_size", "warmup_steps", "precision")
"""Settings of `train` that a card lists."""
STEPS = 5
"""Tokens drafted in a round by a head that was neither measured nor trained to a depth."""

Contents = dict[str, Path | bytes]


@dataclass(frozen=True)
class Publication:
    """The files of a publication by their names in the repository, each a local path or bytes, with their facts."""

    files: Contents
    kind: str
    base_model: str | None
    measurement: Path | None
    """Folder of the measurement in the card."""
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
    """Collect the publication of a run with its newest measurement, or with the one in the folder `results`. UserError
    if the head is damaged, was not measured (unless `unmeasured`), is not exact, or no engine serves it or one would
    misread it (unless `unserved`).

    rights: function from a target's id on the Hub to its license keys, empty if it has none.
    """
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; expected a run directory")
    folder = find_head(run)
    head, record = load_head(folder), read_config(folder)
    found = measured(folder, record, unmeasured, results)
    name = record["target"]["name"]
    beside = folder.resolve().parents  # a relative path may start at any of them
    here = any(os.path.exists(parent / str(name)) for parent in beside)
    base = base_model or (name if isinstance(name, str) and is_hub_id(name) and not here else None)
    base = base or base_of_copy(str(name))
    target = base or Path(str(name or LOCAL_MODEL)).name
    files = head_files(folder, record, base)
    verdicts = head_verdicts(folder, record, found[1] if found else None, repo_id, base or target)
    if (doubt := why_unfit(verdicts)) is not None and not unserved:
        raise UserError(f"{folder}: {doubt}; mend it, or publish it --unserved")
    serve = next((verdict.command for verdict in verdicts if verdict.reader in ENGINES and verdict.serves), None)
    about = f"{use(repo_id, base, target)}\n\n{served_by(verdicts, record, repo_id, base, target)}"
    shown_serve = fenced(serve)
    if serve and base is None:
        shown_serve += f"\n\n{quoted(target)} is a folder: put the path of your copy of that model there."
    trained = trained_on(record, folder.parent)
    data: dict[str, Any] = {
        "rights": rights(base or ""),
        "datasets": hub_datasets(record.get("provenance")),
        "name": repo_id.partition("/")[2],
    }
    if found is None:
        parameters = sum(weight.numel() for weight in head.parameters())
        intro = f"A draft head (`{record['kind']}`, {parameters:,} parameters) for {quoted(target)}."
        parts = [front_matter(record["kind"], base or LOCAL_MODEL, **data), f"# {record['kind']} on {target}", intro]
        parts += [shown_serve, "\n".join(["## Trained on", "", *(f"- {line}" for line in trained)])]
        card = "\n\n".join([*filter(None, parts), "## Measured with", "Not measured.", about]) + "\n"
    else:
        place, figures = found
        shown = public_results(figures, repo_id, target)
        files[RESULTS] = as_json(shown)
        card = model_card(shown, serve=shown_serve, trained=trained, about=about, data=data)
        plot = place / PLOT
        if plot.is_file():
            files[PLOT] = plot
        else:
            card = "\n".join(line for line in card.splitlines() if PLOT not in line).rstrip() + "\n"
    if (recipe := folder.parent / RECIPE).is_file():
        files[RECIPE] = public_recipe(recipe, base or target)
    files[CARD] = card.encode(errors="backslashreplace")  # names from a damaged file may not be valid text
    check_private(files)
    return Publication(files, record["kind"], base, *(found or (None, None)))


def measured(
    folder: Path, record: dict[str, Any], unmeasured: bool, chosen: Path | None
) -> tuple[Path, Results] | None:
    """Return the folder and the results of the measurement in `chosen`, or else of the newest one in the head's run.
    None if there is none and `unmeasured` is set."""
    run = Path(os.path.abspath(folder)).parent  # the path as given: the target of a link is in no run
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


def serve_command(results: Results) -> str | None:
    """Return the command with which an engine serves the head of a results.json from this machine, or None if its files
    are not here, no engine serves it, or no draft pays."""
    if "heads" in results or not is_exact(results) or untrained_kind(results["head"]["path"]):
        return None
    reliable = [m["speedup"]["measured"] for m in results["measurements"] if why_unreliable(m) is None]
    if reliable and max(reliable) <= 1:
        return None
    try:
        folder = find_head(results["head"]["path"]) if os.path.isdir(results["head"]["path"]) else None
        verdicts = (
            []
            if folder is None
            else head_verdicts(folder, read_config(folder), results, str(folder), results["target"]["name"])
        )
    except (UserError, OSError):
        return None
    return next((verdict.command for verdict in verdicts if verdict.reader in ENGINES and verdict.serves), None)


def head_verdicts(
    folder: Path, record: dict[str, Any], results: Results | None, repo_id: str, base: str
) -> list[Verdict]:
    """Return the verdict of each engine's check of the head. The number of draft tokens is the depth of the headline
    setting, else of the training."""
    config = record["config"]
    depth = (results or {}).get("depth") or config.get("depth") or STEPS
    modules = config.get("num_modules", 1)  # vLLM drafts with all of them, once or several times
    return check_loaders(
        folder, name=repo_id, base=repo_and_revision(base)[0], steps=max(depth // modules, 1) * modules
    )


def use(repo_id: str, base: str | None, target: str) -> str:
    """Return the card's section on this project's own command."""
    command = f"python eval/bench.py {repo_id}" + ("" if base else f" --target {shlex.quote(target)}")
    return (
        f"## Measure it again\n\ndraftsmith trained and measured this head. In a clone of it:\n\n{fenced(command)}\n\n"
        f"`{RESULTS}` holds every figure; `{RECIPE}` is the recipe with every default."
    )


def trained_on(record: dict[str, Any], run: Path) -> list[str]:
    """Return lines of Markdown on a head's training, from its provenance and the files of its run, as far as they are
    there."""
    made, recipe, lines = record["provenance"], read_recipe(run / RECIPE), []
    data = made["data"]["sources"] if isinstance(made.get("data"), dict) else {}
    sources = data.get("sources", []) if isinstance(data, dict) else data
    for source in sources:
        limit = f", up to {source['limit']:,} records" if source.get("limit") else ""
        lines.append(as_markdown(f"{source.get('path', 'modules of Python')} ({source.get('kind', 'chat')}){limit}"))
    if isinstance(data, dict) and (answers := data.get("regenerate")):
        count = f"{answers['prompts']:,} " if answers.get("prompts") else ""
        lines.append(f"{count}conversations with answers by the target itself (T = {answers.get('temperature', 0):g})")
    train = recipe.get("train", {})
    tokens = next((point["tokens"] for point in reversed(read_log(run / METRICS)) if "tokens" in point), None)
    if "step" in made:
        of = f" of {train['max_steps']:,}" if train.get("max_steps") else ""
        lines.append(f"step {made['step']:,}{of} was kept, which had the highest tau")
    if tokens:
        lines.append(f"{tokens:,} tokens in the whole run")
    settings = [f"{name} {train[name]}" for name in SHOWN if train.get(name) is not None]
    if context := recipe.get("data", {}).get("context_length"):
        settings.append(f"context_length {context}")
    settings += [f"{name} {value}" for name in ("depth", "loss") if (value := record["config"].get(name)) is not None]
    lines.append(as_markdown(", ".join(settings)))
    if commit := made.get("versions", {}).get("draftsmith"):
        lines.append(f"draftsmith {commit}, torch {made['versions'].get('torch')}, {made.get('created', '')[:10]}")
    return lines


def base_of_copy(path: str) -> str | None:
    """Return the Hub id of a target in a folder, if the folder is in the Hub's cache or its config.json has the id."""
    if found := re.search(r"models--([^/]+?)--([^/]+)/snapshots/", f"{path}/"):
        return f"{found[1]}/{found[2]}"
    try:
        name = json.loads((Path(path) / CONFIG).read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return name if isinstance(name, str) and is_hub_id(name) else None


def served_by(verdicts: Sequence[Verdict], record: dict[str, Any], repo_id: str, base: str | None, target: str) -> str:
    """Return the card's section on engines, with the command of each engine that serves the head."""
    engines = [verdict for verdict in verdicts if verdict.reader in ENGINES]
    lines = ["## Served by", ""]
    for verdict in (verdict for verdict in engines if verdict.serves):
        lines += [f"{verdict.reader}:", "", "```", verdict.command, "```", ""]
    lines += [f"- {verdict.reader}: no, it {verdict.reason}" for verdict in engines if not verdict.serves]
    others = [verdict for verdict in verdicts if verdict.reader not in ENGINES and verdict.serves]
    lines += [f"- {verdict.reader}: `{verdict.command}`" for verdict in others]
    lines += [
        f"- {line}" for line in HEADS[record["kind"]].format.converters(repo_id, base or target, record["config"])
    ]
    lines += ["", "Names, shapes and fields were compared with what these versions' sources load; they were not run."]
    return "\n".join(lines)


def head_files(folder: Path, record: dict[str, Any], base: str | None) -> Contents:
    """Return the files of a head, with the target's public name in its config."""
    weights = HEADS[record["kind"]].format.weights_file
    files: Contents = {CONFIG: public_config(folder / CONFIG, base), weights: folder / weights}
    for name in OTHERS:
        if (folder / name).is_file():
            files[name] = folder / name
    return files


def public_config(file: Path, base: str | None) -> bytes:
    """Return a head's config.json for publication, with the target's public name."""
    config = read_object(file)
    if "base_model_name_or_path" in config:
        config["base_model_name_or_path"] = base
    if base and isinstance(config.get("auto_map"), dict):  # its code is in the target's folder, not in the head's
        repo, _ = repo_and_revision(base)
        config["auto_map"] = {
            key: name if "--" in str(name) else f"{repo}--{name}" for key, name in config["auto_map"].items()
        }
    config["draftsmith"]["target"]["name"] = base
    return as_json(config)


def public_results(results: Results, repo_id: str, target: str) -> Results:
    """Return results for publication: without paths and without the texts of prompts."""
    public: Results = with_names({key: value for key, value in results.items() if key not in ("samples", "command")})
    return public | {
        "target": {**public["target"], "name": target},
        "head": {**public["head"], "path": repo_id},
        "samples": [],
    }


def public_recipe(file: Path, target: str) -> bytes:
    """Return a recipe for publication: with names in the place of paths."""
    recipe = with_names(read_recipe(file))
    recipe.get("target", {})["path"] = target
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode()


def read_recipe(file: Path) -> dict[str, Any]:
    """Return the settings of a run's recipe.yaml, or none if it cannot be read."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def check_private(files: Contents) -> None:
    """Refuse a text that contains the user's home directory. UserError names the file."""
    home = os.path.expanduser("~").rstrip("/")
    for name, data in files.items():
        text = data if isinstance(data, bytes) else data.read_bytes() if name.endswith(".json") else b""
        if home and f"{home}/".encode() in text:
            raise UserError(f"{name}: would name a path in {home}; take it out of the run's own file of that name")


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file. UserError if the file does not hold one."""
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
