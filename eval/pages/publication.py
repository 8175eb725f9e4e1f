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
from pydantic_core import to_json

from eval.data.prompts import HELD_OUT_SUITE, HUB_SUITES, split_prompts
from eval.measure.model_facts import engines_for
from eval.pages.card import CARD, PLOTS, quoted, render_card
from eval.pages.texts import LOCAL_MODEL, as_markdown
from eval.records.acceptance_profile import ACCEPTANCE, acceptance_profile
from eval.records.provenance import Provenance, read_provenance
from eval.records.result_folders import RESULTS, folders_of, newest_results
from eval.records.results import as_record, plain, read_log
from eval.records.schema import Results, Target
from eval.servers.gguf_conversion import Q8_0, check_gguf, convert
from heads.core.contract import DraftHead
from heads.core.engines import ALL_ENGINES, LLAMACPP
from heads.core.errors import UserError
from heads.core.serve_commands import gguf_name
from heads.formats.engine_folder import Verdict, why_unfit
from heads.registry import HEADS
from heads.saved import CONFIG, find_head, load_head, read_config
from heads.targets.hub import is_hub_id, local_folder, name_of, repo_and_revision, tokenizer_files, with_names
from heads.targets.identity import changes

RECIPE = "recipe.yaml"
GENERATION = "generation_config.json"
METRICS = "metrics.jsonl"
SHOWN = ("optimizer", "lr", "max_steps", "tokens_per_step", "batch_size", "warmup_steps", "precision")
"""Settings of `train` that a card lists."""
Contents = dict[str, Path | bytes]


@dataclass(frozen=True)
class Publication:
    """The files of a publication by their names in the repository, each a local path or bytes, with their facts."""

    files: Contents
    card: str
    kind: str
    base_model: str | None
    license: str | None
    measurement: Path | None
    """Folder of the measurement in the card."""


def collect(
    run: Path,
    repo_id: str,
    *,
    results: Path | None = None,
    base_model: str | None = None,
    rights: Callable[[str], Mapping[str, str]] = lambda base: {},
    unmeasured: bool = False,
    unserved: bool = False,
    gguf: Path | None = None,
) -> Publication:
    """Collect the publication of a run with its own results.json, or with the one in the folder `results`. UserError if
    the head is damaged, was not measured (unless `unmeasured`), is not exact, or no engine serves it or one would
    misread it (unless `unserved`). `gguf`: folder to write the head into as a GGUF file, too, by the converter of an
    installed llama.cpp.

    rights: function from a target's id on the Hub to its license keys, empty if it has none.
    """
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; expected a run's folder")
    folder = find_head(run)
    head, record = load_head(folder), read_config(folder)
    place, figures = find_measurement(folder, record, unmeasured, results) or (None, None)
    name = record["target"]["name"]
    parents = folder.resolve().parents  # a relative path may start at any of them
    is_folder = any(os.path.exists(parent / str(name)) for parent in parents)
    base = base_model or (name if isinstance(name, str) and is_hub_id(name) and not is_folder else None)
    base = base or base_of_copy(str(name))
    target = base or Path(str(name or LOCAL_MODEL)).name
    measured, facts = (figures.measurements, figures.target) if figures else ((), Target(name=target))
    names = {"head": repo_id, "target": repo_and_revision(base or target)[0]}
    verdicts = engines_for(folder, measured, facts, names=names)
    provenance = read_provenance(folder)
    if (doubt := why_unfit(verdicts, provenance.serve)) is not None and not unserved:
        raise UserError(f"{folder}: {doubt}; fix it, or publish it --unserved")
    form = HEADS[record["kind"]].format
    files: Contents = {CONFIG: public_config(folder / CONFIG, base), form.weights_file: folder / form.weights_file}
    files |= tokenizer_files(folder)  # a draft model is a whole Hugging Face model directory
    if (folder / GENERATION).is_file():
        files[GENERATION] = folder / GENERATION
    if gguf is not None:
        file = gguf / gguf_name(record["kind"], repo_id)
        write_gguf(file, folder, head, record, verdicts)
        files[file.name] = file
    shown = None
    if figures is not None and place is not None:
        shown = public_results(figures, repo_id, target)
        files[RESULTS] = to_json(as_record(shown), indent=2, inf_nan_mode="null", fallback=str) + b"\n"
        if (profile := acceptance_profile(shown)) is not None:
            files[ACCEPTANCE] = as_json(profile)
        files |= {plot: place / plot for plot in PLOTS if (place / plot).is_file()}
    if (folder.parent / RECIPE).is_file():
        recipe = with_names(read_recipe(folder.parent / RECIPE))
        recipe.get("target", {})["path"] = base or target
        files[RECIPE] = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode()
    licensed = rights(base or "")
    card = render_card(
        record["kind"],
        base or (target if shown else LOCAL_MODEL),
        sum(weight.numel() for weight in head.parameters()),
        shown,
        name=repo_id.partition("/")[2],
        rights=licensed,
        datasets=hub_datasets(provenance),
        local=None if base else quoted(target),
        trained=trained_on(provenance, record["config"], folder.parent),
        plots=[plot for plot in PLOTS if plot in files],
        command=shlex.join(shown.command if shown else bench_command(repo_id, target, ())),
        own_prompts=", ".join(quoted(name) for name in private_prompts(shown)),
        engines=[verdict for verdict in verdicts if verdict.reader in ALL_ENGINES],
        others=[verdict for verdict in verdicts if verdict.reader not in ALL_ENGINES],
        tried=form.tried if form.tried_settings.items() <= record["config"].items() else None,
        converters=form.converters(repo_id, base or target, record["config"]),
    )
    files[CARD] = card.encode(errors="backslashreplace")  # names from a damaged file may not be valid text
    check_private(files)
    return Publication(files, card, record["kind"], base, licensed.get("license"), place)


def write_gguf(file: Path, folder: Path, head: DraftHead, record: dict[str, Any], verdicts: Sequence[Verdict]) -> None:
    """Write a head as a GGUF file in 8 bits, with the tokenizer of its target, and read it back. UserError if llama.cpp
    does not serve it."""
    verdict = next(verdict for verdict in verdicts if verdict.reader == LLAMACPP)
    if not verdict.serves:
        raise UserError(f"--gguf: {LLAMACPP} {verdict.reason}; leave --gguf out")
    name = str(record["target"]["name"])
    target = None if record["kind"] == "draft" else local_folder(name)
    if not convert(str(folder), file, target=target, dtype=Q8_0, log=file.with_suffix(".log")):
        raise UserError(f"--gguf: llama.cpp's converter does not know the tokenizer of {name}; leave --gguf out")
    check_gguf(file, head, record["kind"])


def find_measurement(
    folder: Path, record: dict[str, Any], unmeasured: bool, chosen: Path | None
) -> tuple[Path, Results] | None:
    """Return the folder and the results of the measurement in `chosen`, or else of the one that ended the head's run.
    None if there is none and `unmeasured` is set."""
    run = Path(os.path.abspath(folder)).parent  # the path as given: the target of a link is in no run
    measurement = newest_results([run if chosen is None else chosen])
    if measurement is None:
        if chosen is not None:
            raise UserError(f"{chosen}: no {RESULTS} in it; name the folder of a measurement")
        if unmeasured:
            return None
        if later := newest_results(folders_of(run)):
            raise UserError(f"{run}: no {RESULTS} of its own; --results {later[0]} names the newest measurement in it")
        raise UserError(
            f"{run}: no {RESULTS} in it, the head was never measured; run eval/bench.py {folder} --out {run}, "
            "or publish it --unmeasured"
        )
    place, results = measurement
    if not results.is_exact:
        raise UserError(
            f"{place / RESULTS}: the audit failed, {len(results.exact.divergences)} outputs are not the target's own; "
            "only a head whose audit holds is published"
        )
    head = results.head
    same_weights = head.sha256 in (None, record.get("sha256"))  # missing in older results
    if not same_weights or (head.kind, plain(head.config)) != (record["kind"], record["config"]):
        raise UserError(f"{place / RESULTS}: measured another head than {folder}; measure this one with eval/bench.py")
    if changed := changes(record["target"], results.target.model_dump(exclude_unset=True)):
        raise UserError(
            f"{place / RESULTS}: measured on another target than {folder} was trained for ({'; '.join(changed)}); "
            "measure it on its own"
        )
    return measurement


def trained_on(provenance: Provenance, config: Mapping[str, object], run: Path) -> list[str]:
    """Return lines of Markdown on the training of a head with this config, from its provenance and the files of its
    run, as far as they are there."""
    recipe = read_recipe(run / RECIPE)
    train = recipe.get("train", {})
    lines = []
    for source in provenance.data.sources.sources:
        limit = f", up to {source.limit:,} records" if source.limit else ""
        lines.append(as_markdown(f"{source.path} ({source.kind}){limit}"))
    if answers := provenance.data.sources.regenerate:
        count = f"{answers.prompts:,} " if answers.prompts else ""
        lines.append(f"{count}conversations with answers by the target itself (T = {answers.temperature:g})")
    if provenance.step is not None:
        of = f" of {provenance.steps:,}" if provenance.steps else ""
        lines.append(f"step {provenance.step:,}{of} was kept, which had the highest tau")
    if points := [point for point in read_log(run / METRICS) if "tokens" in point]:
        lines.append(f"{points[-1]['tokens']:,} tokens in the whole run")
    settings = {name: train.get(name) for name in SHOWN}
    settings["context_length"] = recipe.get("data", {}).get("context_length")
    settings |= {name: config.get(name) for name in ("depth", "loss")}
    lines.append(as_markdown(", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)))
    if versions := provenance.versions:
        created = provenance.created[:10]
        lines.append(f"draftsmith {versions.get('draftsmith')}, torch {versions.get('torch')}, {created}")
    return lines


def base_of_copy(path: str) -> str | None:
    """Return the Hub id of a target in a folder, if the folder is in the Hub's cache or its config.json has the id."""
    if match := re.search(r"models--([^/]+?)--([^/]+)/snapshots/", f"{path}/"):
        return f"{match[1]}/{match[2]}"
    try:
        name = json.loads((Path(path) / CONFIG).read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return name if isinstance(name, str) and is_hub_id(name) else None


def public_config(file: Path, base: str | None) -> bytes:
    """Return a head's config.json for publication, with the target's public name."""
    config = json.loads(file.read_text(encoding="utf-8"))
    if "base_model_name_or_path" in config:
        config["base_model_name_or_path"] = base
    if base and isinstance(config.get("auto_map"), dict):  # its code is in the target's folder, not in the head's
        repo, _ = repo_and_revision(base)
        config["auto_map"] = {
            key: name if is_hub_id(str(name).partition("--")[0]) else f"{repo}--{str(name).rpartition('--')[2]}"
            for key, name in config["auto_map"].items()
        }
    record = config["draftsmith"]["target"]
    record |= {"name": base, **({"adapter": name_of(record["adapter"])} if "adapter" in record else {})}
    return as_json(config)


def public_results(results: Results, repo_id: str, target: str) -> Results:
    public = Results.model_validate({**with_names(plain(results)), "chosen": results.chosen})
    public.command = bench_command(repo_id, target, results.command[5:])  # after the head and its target
    public.target.name, public.head.path, public.head.serve, public.samples = target, repo_id, None, []
    return public


def bench_command(repo_id: str, target: str, options: Sequence[str]) -> list[str]:
    return ["python", "eval/bench.py", repo_id, "--target", target, *with_names([*options])]


def private_prompts(results: Results | None) -> list[str]:
    """Return the names of prompt files, which others do not have."""
    names = split_prompts(results.settings.prompts) if results else []
    return [name for name in names if name not in (HELD_OUT_SUITE, *HUB_SUITES)]


def read_recipe(file: Path) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def hub_datasets(provenance: Provenance) -> list[str]:
    """Return the Hub ids of the data sets in a head's provenance."""
    paths = [source.path for source in provenance.data.sources.sources]
    return list(dict.fromkeys(repo_and_revision(path)[0] for path in paths if is_hub_id(path)))


def check_private(files: Contents) -> None:
    """Refuse a text that contains the user's home directory. UserError names the file."""
    home = os.path.expanduser("~").rstrip("/")
    for name, data in files.items():
        text = data if isinstance(data, bytes) else data.read_bytes() if name.endswith(".json") else b""
        if home and f"{home}/".encode() in text:
            raise UserError(f"{name}: would name a path in {home}; take it out of the run's own file of that name")


def as_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
