"""The recipe: one YAML file with a tree of typed settings. Each section is named after the part that it configures."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from eval.core.command_line import AUTO
from eval.data.data_files import has_splits, has_subsets, is_local
from eval.data.prompts import HELD_OUT_SUITE, expanded_prompts
from eval.records.measure_settings import BenchSettings, MeasureSettings, Tree
from eval.runtime.sampling_params import FILTERS, Temperature
from heads.core.errors import UserError
from heads.core.files import expanded
from heads.core.strict_settings import MAX_NUMBER, Count, Fraction, Seed, Settings, Share
from heads.methods.method_settings import METHODS
from train.core.strict_yaml import (
    Amount,
    Key,
    Name,
    NamedPlace,
    Source,
    Step,
    check,
    dotted,
    read_settings,
)
from train.data.data_settings import Data
from train.data.sources import RecordSource
from train.features.feature_settings import AnyFeatures, ProcessFeatures
from train.recipe.head_section import AnyHead

T = TypeVar("T")
MAX_EPOCHS = 1_000
"""More epochs than this are taken for a mistake."""
KINDS = {method.entry: kind for kind, method in METHODS.items()}
"""Entry -> the kind of head that it trains."""
OWN, PROVENANCE = "recipe.yaml", "provenance.json"
"""Names of the recipe in a run's folder, and of the file beside it that says how the run was made."""
POINT_SPACING = 4 ** (1 / 3)
"""Ratio of the steps of two measurements: what the curve says of four times the tokens can be checked three later."""
MIN_POINT = 10
"""Before this step tau is measured only at the end of a run."""


def check_length(length: object) -> object:
    """Check the length of a run: a number of steps, or of epochs with that word."""
    if isinstance(length, str):
        epochs = re.fullmatch(r"(\d+(?:\.\d+)?) ?epochs?", length)
        fits = epochs is not None and 0 < float(epochs[1]) <= MAX_EPOCHS
    else:
        fits = type(length) is int and 1 <= length < MAX_NUMBER
    if not fits:
        raise ValueError(f"expected a number of steps, or at most '{MAX_EPOCHS} epochs'")
    return length


def as_tuple(value: object) -> object:
    if isinstance(value, list | tuple) and not value:
        raise ValueError("expected a value, or a list of several")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Several = Annotated[tuple[T, ...], BeforeValidator(as_tuple)]
"""A setting with several values: a list, or one value."""


class Target(Settings):
    """The language model that the head drafts for. It stays frozen."""

    path: NamedPlace
    """A folder or a Hub id, such as `Qwen/Qwen3-8B`; `OWNER/NAME@REVISION` names one revision."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the target's weights. `auto`: the dtype of its checkpoint, or float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code from the target's folder, or from that of the draft model in `head.path`."""
    quantize: Literal["int8"] | None = None
    """`int8` stores the matrices of the decoder layers in a quarter of the memory of float32. Needs torchao."""
    adapter: NamedPlace | None = None
    """A peft adapter of the target, a folder or a Hub id, which is merged into it. Null: none."""
    fix_mistral_regex: bool | None = None
    """Replace the pattern by which the tokenizer splits text, as transformers offers for Mistral's older files. Null:
    leave it; if transformers takes it for a wrong one, a line says so."""
    gguf_file: Name | None = None
    """Name of a GGUF file in `target.path`, whose weights are dequantised. Needs the extra gguf. Null: safetensors."""


class Train(Settings):
    """The training loop."""

    renamed: ClassVar = {
        "epochs": "max_steps, such as '8 epochs'",
        "grad_accum": "tokens_per_step",
        "eval_every": "eval_points",
    }
    max_steps: Annotated[int | str, BeforeValidator(check_length)]
    """Optimizer steps of the whole run, or how often it reads its training rows, such as `8 epochs`. The recipe in the
    run's folder has the number of steps, which follows from the data."""
    seed: Seed = 0
    """Seed of the initial weights and of the order of the data."""
    batch_size: Count = 8
    """Rows of one forward pass in each process."""
    tokens_per_step: Count | None = None
    """Tokens per optimizer step over all processes, padding included: a multiple of those of one forward pass, which
    are `batch_size` x `data.context_length` x processes. Null: one forward pass."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` (Jordan et al., 2024) orthogonalises the updates of inner matrices. AdamW updates the embeddings, the
    output head and the norms."""
    lr: Annotated[float, Field(gt=0, le=100)] = 1e-4
    """Peak learning rate."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.95])
    """AdamW's two decay rates."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight decay of matrices. Norms and biases are not decayed."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up: `cosine` falls along a cosine, `wsd` stays constant, then falls at the end."""
    warmup_steps: Step = 0
    """Steps over which the learning rate rises to `lr`, at most a fifth of the run: a short run shortens them."""
    decay_fraction: Share = 0.2
    """`wsd` only: fraction of the run, at its end, over which the learning rate falls."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the run, as a fraction of `lr`."""
    max_grad_norm: Amount = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of matrix products. `bf16` is autocast over float32 weights; `auto` is bf16 if this machine computes it
    faster, else fp32. A resumed run keeps the precision that it began with."""
    save_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the saved head, to which it is rounded before it is measured. Training keeps float32 weights. `float32`
    needs a target in float32. Modules of a checkpoint (`head.native`) keep its dtypes."""
    checkpoint_every: Count = 500
    """Steps between checkpoints, from which an interrupted run resumes."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep, the newest ones."""
    eval_points: Count = 8
    """Measurements of tau, which make the run's learning curve; the head with the best tau is kept. They are evenly
    spaced in the logarithm of the steps, three to a factor of four, the last one at the end; those before the end of
    the warm-up or before step 10 are left out."""
    log_every: Count = 10
    """Steps between log lines."""

    @property
    def epochs(self) -> float | None:
        """The length of the run in epochs, or None if it is given in steps."""
        return None if isinstance(self.max_steps, int) else float(self.max_steps.rstrip(" epochs"))

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run, which are known when the data have been read."""
        assert isinstance(self.max_steps, int)
        return self.max_steps

    @property
    def measured_steps(self) -> set[int]:
        """Steps after which tau is measured."""
        spaced = {round(self.steps / POINT_SPACING**n) for n in range(self.eval_points)}
        return {self.steps} | {step for step in spaced if step >= max(MIN_POINT, self.warmup_steps)}


class Report(Settings):
    """The final measurement of a run. These settings replace those of `eval`."""

    num_prompts: Count | None = None
    """Prompts to measure on. Null: `eval.num_prompts`."""
    max_new_tokens: Count | None = None
    """Maximum number of tokens of an answer. Null: `eval.max_new_tokens`."""
    renamed: ClassVar = {"trees": "tree", "temperatures": "temperature", "batch_sizes": "batch_size"}
    tree: Several[Tree] | None = None
    """Chains and trees to measure. `auto` searches for the fastest. Null: `eval.tree`."""
    temperature: Several[Temperature] | None = None
    """Sampling temperatures to measure at. Null: `eval.temperature`."""
    batch_size: Several[Count] = (1,)
    """Prompts decoded together. At each of several sizes, all trees and temperatures are measured."""
    sampling: Literal["model"] | None = None
    """`model`: temperature, top-k, top-p, min-p and repetition penalty of the target's generation_config, as servers
    sample by default. Null: `temperature`, and the filters of `eval`."""
    repeats: Count = 2
    """Number of times that each prompt is decoded with each setting."""


class Eval(MeasureSettings):
    """Measurements of tau during training. The head with the best tau is kept."""

    prompts: Annotated[Name, AfterValidator(expanded_prompts)]
    """Held-out prompts: a file, or one of the suites `python-heldout`, `spec_bench`, `mt_bench`, `humaneval`, `mbpp`
    and `gsm8k`; or several of these, separated by commas."""
    num_prompts: Count = 32
    """Number of prompts of each suite to measure on, evenly spread over it."""
    max_prompt_tokens: Count = 256
    """Maximum number of tokens of a prompt. A longer one is an error; modules of `python-heldout` are truncated."""
    batch_size: Count = 8
    """Prompts decoded together."""
    tree: Tree = "chain:5"
    """Draft tokens per round: `chain:K` for a chain, `static:3.2.1` or `tree:DEPTHxTOPKxNODES` for a tree, `head` for
    the head's own tree."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""
    report: Report = Report()
    """The final measurement of the run."""

    def final(self) -> BenchSettings:
        """Return the settings of the final measurement. If prompts are drawn with a seed, they are other prompts than
        those on which the best head was chosen."""
        several = {"tree", "temperature", "batch_size"}
        report = self.report
        shared = self.model_dump(exclude={*several, "report"})
        shared |= report.model_dump(exclude=several, exclude_none=True)
        return BenchSettings(
            **shared | {"seed": self.seed + 1},
            trees=report.tree or (self.tree,),
            temperatures=report.temperature or (self.temperature,),
            batch_size=report.batch_size[0],
            batch_sizes=report.batch_size if len(report.batch_size) > 1 else (),
        )


class Tracking(Settings):
    """Experiment tracking. `metrics.jsonl` in the run's folder is always written."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases. `offline` writes files that `wandb sync` can upload later. If it is not off, the variable
    WANDB_MODE wins."""
    tensorboard: bool = False
    """Write TensorBoard files to `tensorboard/` in the run's folder. Needs the package tensorboard."""
    trackio: bool = False
    """Log to trackio, which `trackio show` displays. TRACKIO_SPACE_ID names a Space. Needs the package trackio."""
    project: Annotated[str, Field(max_length=128, pattern=r"^[^/\\#?%:]+$")] | None = None
    """Project of the wandb or trackio run. Null: that of the variable WANDB_PROJECT, or draftsmith."""
    name: Name | None = None
    """Name of the wandb or trackio run. Null: that of the variable WANDB_NAME, or the name of the run's folder."""

    @field_validator("wandb", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads `off` as false


class Recipe(Settings):
    """A training recipe."""

    output_dir: NamedPlace
    """Folder of the run: checkpoints, head, results, report. The same command with the same folder resumes the run."""
    target: Target
    """The language model that the head drafts for."""
    head: AnyHead
    """The draft head: `kind`, and the settings of that kind."""
    data: Data
    """Training data."""
    features: AnyFeatures = ProcessFeatures(kind="process")
    """Where the target's hidden states for the head are computed."""
    train: Train
    """The training loop."""
    eval: Eval
    """Measurements of tau."""
    tracking: Tracking = Tracking()
    """Experiment tracking."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply the overrides and check it. UserError lists all faults, one per line."""
    path = Path(expanded(str(path)))
    return checked(in_its_folder(read_settings(path, overrides), path))


def checked(source: Source) -> Recipe:
    """Return the recipe with these settings. UserError lists all faults, one per line."""
    recipe, errors = check(source, Recipe)
    if recipe is not None:
        for key, why in _useless(recipe).items():
            if _is_changed(recipe, key):
                errors.append(source.line(key, f"has no effect {why}; leave it out ({dotted(key)}=null)"))
        errors += [source.line(key, what) for key, what in _contradictions(recipe)]
    if recipe is None or errors:
        raise UserError("\n".join(errors))
    return recipe


def check_kind(recipe: Recipe, place: str, name: str) -> None:
    """Raise UserError if a recipe, which is from `place`, is for another kind of head than train/NAME.py trains."""
    kind = recipe.head.kind
    if kind != KINDS[name]:
        raise UserError(
            f"{place}: head.kind: train/{name}.py trains {KINDS[name]}, the recipe says {kind}; use "
            f"train/{METHODS[kind].entry}.py"
        )


def in_its_folder(source: Source, path: Path) -> Source:
    """Return the settings of a run's own recipe.yaml for the folder in which it lies, wherever the run began: as
    `output_dir`, unless the command line names another, and in paths into it."""
    if path.name != OWN or not (path.parent / PROVENANCE).is_file():
        return source
    old = str(read_settings(path).tree.get("output_dir"))

    def move(value: Any) -> object:
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        if isinstance(value, list):
            return [move(item) for item in value]
        is_inside = isinstance(value, str) and f"{value}/".startswith(f"{old}/")
        return os.path.abspath(path.parent) + value.removeprefix(old) if is_inside else value

    return replace(source, tree=move(source.tree))


def dump_recipe(record: dict[str, object]) -> str:
    """Return the plain settings of a recipe as YAML. `load_recipe` reads the same settings back."""
    return yaml.safe_dump(record, sort_keys=False, allow_unicode=True)


def plain_settings(recipe: Recipe) -> dict[str, object]:
    """Return every setting that has an effect in this run, as nested plain values."""
    tree = recipe.model_dump(mode="json")
    for key in _useless(recipe):
        section: Any = tree
        for part in key[:-1]:
            section = section[part]
        section.pop(key[-1], None)
    return tree


def _useless(recipe: Recipe) -> dict[Key, str]:
    """Return the settings that have no effect, each with the reason."""
    useless: dict[Key, str] = {}
    if recipe.train.schedule != "wsd":
        useless["train", "decay_fraction"] = "with schedule cosine; set train.schedule=wsd"
    if recipe.tracking.wandb == "off" and not recipe.tracking.trackio:
        useless |= {("tracking", name): "without tracking.wandb or tracking.trackio" for name in ("project", "name")}
    if recipe.eval.prompts == HELD_OUT_SUITE:
        useless["eval", "skip_long"] = "on modules, which are cut to fit"
    report = recipe.eval.report
    if report.sampling:
        useless["eval", "report", "temperature"] = "with eval.report.sampling"
    if recipe.eval.temperature == 0 and (report.sampling or not any(report.temperature or ())):
        sampled = FILTERS if report.sampling else ("rule", *FILTERS)
        useless |= {("eval", name): "at eval.temperature 0, which is greedy" for name in sampled}
    for name in ("regenerate", "on_policy"):
        if getattr(recipe.data, name) is not None and getattr(recipe.data, name).temperature == 0:
            useless["data", name, "seed"] = f"at data.{name}.temperature 0"
    if all(source.kind != "chat" for source in recipe.data.sources):
        useless["data", "template"] = "without a source of kind chat"
    for n, source in enumerate(recipe.data.sources):
        if source.weight is None or len(recipe.data.sources) == 1:
            useless["data", "sources", n, "weight"] = "with one source"
        if isinstance(source, RecordSource) and is_local(source.path):
            absent = {"subset": not has_subsets(source.path), "split": not has_splits(source.path)}
            for name in (name for name, is_absent in absent.items() if is_absent):
                useless["data", "sources", n, name] = f"on files, which have no {name}s"
    return useless


def _contradictions(recipe: Recipe) -> Iterator[tuple[Key, str]]:
    """Yield the settings that contradict other settings, each with its error."""
    data = recipe.data
    depth = getattr(recipe.head, "depth", None)
    if isinstance(depth, int) and depth >= data.context_length:
        yield ("head", "depth"), f"expected less than data.context_length ({data.context_length})"
    kind = recipe.features.kind
    if data.on_policy and recipe.head.kind != "draft":
        yield ("data", "on_policy"), f"is for draft models (head.kind draft), got {recipe.head.kind}; leave it out"
    elif data.on_policy and kind not in ("process", "sharded"):
        yield ("features", "kind"), f"data.on_policy generates rows along the way, got {kind}; use process or sharded"
    if getattr(recipe.head, "layers", None) is not None and recipe.head.init_from is None and kind != "process":
        yield ("features", "kind"), f"head.layers copies layers of the target, got {kind}; use process"
    weights = [source.weight is not None for source in data.sources]
    for name, answers in (("regenerate", data.regenerate), ("on_policy", data.on_policy)):
        if any(weights) and answers is not None and answers.prompts is None:
            yield ("data", name, "prompts"), "is missing: it is what the sources' weights share out; give a number"
    if any(weights) and not all(weights):
        missing = weights.index(False)
        yield ("data", "sources", missing, "weight"), "is missing: give every source a weight, or none"
    if recipe.eval.tree == AUTO:
        yield ("eval", "tree"), "the same tree is measured every time, got 'auto'; name it, such as chain:5"


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe of a run of this many steps, with a warm-up of at most a fifth of them. UserError for settings
    that come into effect only after the last step."""
    warmup = min(recipe.train.warmup_steps, steps // 5)
    changes = {"max_steps": steps, "warmup_steps": warmup}
    if recipe.data.on_policy and recipe.data.on_policy.every >= steps:
        raise UserError(f"data.on_policy.every: expected less than train.max_steps ({steps})")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def _is_changed(recipe: Recipe, key: Key) -> bool:
    """Return True for a setting that differs from its default. A run's own recipe has every default."""
    section: Any = recipe
    for part in key[:-1]:
        section = section[part] if isinstance(part, int) else getattr(section, part)
    name = str(key[-1])
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return getattr(section, name) not in (None, {}, default)
