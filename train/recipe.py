"""The recipe: one YAML file, one tree of typed settings, each named for the part that it configures."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field

from eval.benchmark.prompts import HELD_OUT_SUITE
from eval.command import AUTO
from eval.runtime.sampling import check_rule
from heads.base import HEAD_TREE
from heads.errors import UserError
from heads.tree import parse_shape
from train.data.loading import Data
from train.data.sources import RecordSource
from train.features.settings import AnyFeatures, ProcessFeatures
from train.head_settings import AnyHead
from train.strict_yaml import (
    MOST,
    Count,
    Fraction,
    Key,
    Name,
    Positive,
    Seed,
    Settings,
    Share,
    Step,
    Temperature,
    check,
    read_settings,
)


def _check_project(name: str) -> str:
    if not name.strip() or len(name) > 128 or any(character in name for character in "/\\#?%:"):
        raise ValueError("expected 1 to 128 characters, none of / \\ # ? % :")
    return name


Several = Annotated[int, Field(ge=1, le=2**16)]


class Adapter(Settings):
    """A LoRA adapter of the target, trained together with Medusa's heads (Medusa-2, arXiv 2401.10774, section 2.2.2).

    `train.lr` is the adapter's learning rate. The loss is KL(original target || adapted target) on every label, plus
    `heads_weight` times the heads' own. The published text is then the adapted target's.
    """

    first_step: Step
    """First step that trains the adapter too, with a warm-up of its own. The steps before it train the heads alone."""
    rank: Count = 32
    """Rank of the low-rank matrices."""
    alpha: Positive = 16.0
    """Scale of the update, which is alpha / rank times the product of the two matrices."""
    dropout: Fraction = 0.05
    """Dropout on the adapter's input."""
    modules: Annotated[list[Name], Field(min_length=1)] | None = None
    """Layers that get an adapter, by the last part of their names, such as `q_proj`. Null: every linear layer but the
    output head."""
    heads_weight: Positive = 0.2
    """Weight of the heads' loss beside the target's."""
    head_lr_multiple: Positive = 4.0
    """The heads' learning rate, as a multiple of `train.lr`."""


class Target(Settings):
    """The language model that the head drafts for. It stays frozen."""

    path: Name
    """A folder or a Hub id, such as `Qwen/Qwen3-8B`; `OWNER/NAME@REVISION` names one revision."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of the target's weights. `auto`: as it was saved, but float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target, or with the draft model that `head.path` names."""
    quantize: Literal["int8"] | None = None
    """`int8` stores the matrices of the decoder layers in a quarter of float32's memory; needs torchao."""
    adapter: Adapter | None = None
    """Medusa-2: an adapter of the target, trained with the heads."""


class Train(Settings):
    """The training loop."""

    max_steps: Count
    """Optimizer steps of the whole run."""
    seed: Seed = 0
    """Seed of the initial weights and of the order of the data."""
    batch_size: Several = 8
    """Rows of one forward pass on one device."""
    grad_accum: Several = 1
    """Forward passes of one optimizer step, in each process."""
    tokens_per_step: Count | None = None
    """Tokens of one optimizer step over all processes, padding included, in place of `grad_accum`, which then follows
    from `batch_size`, `data.context_length` and the number of processes."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` (Jordan et al., 2024) orthogonalises the updates of inner matrices; AdamW keeps the output head and the
    norms."""
    lr: Annotated[float, Field(gt=0, le=100)] = 1e-4
    """Highest learning rate."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.95])
    """AdamW's two decay rates."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight decay of matrices. Norms and biases have none."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up: `cosine` falls along a cosine, `wsd` stays, then falls at the end."""
    warmup_steps: Step = 0
    """Steps in which the learning rate rises to `lr`."""
    decay_fraction: Share = 0.2
    """`wsd` only: last part of the run, in which the learning rate falls."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the run, as a fraction of `lr`."""
    max_grad_norm: Positive = 1.0
    """Gradients of a larger norm are scaled down to it."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number type of the products. `bf16` is autocast over float32 weights; `auto` is bf16 where this machine computes
    it faster, else fp32. A resumed run keeps what it began with."""
    checkpoint_every: Count = 500
    """Steps between checkpoints, from which an interrupted run resumes."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    eval_every: Count | None = None
    """Steps between measurements of tau; the head with the best tau is kept. Null: only at the end."""
    log_every: Count = 10
    """Steps between log lines."""


class Report(Settings):
    """The measurement that ends the run: settings in which it differs from the measurements along the way."""

    num_prompts: Count | None = None
    """Prompts to measure on. Null: `eval.num_prompts`."""
    max_new_tokens: Count | None = None
    """Most tokens of an answer. Null: `eval.max_new_tokens`."""
    batch_size: Count = 1
    """Prompts decoded together."""
    trees: Annotated[list[str], Field(min_length=1)] | None = None
    """Chains and trees to measure; `auto` looks for the fastest. Null: `eval.tree`."""
    temperatures: Annotated[list[Temperature], Field(min_length=1)] | None = None
    """Sampling temperatures to measure at. Null: `eval.temperature`."""
    repeats: Count = 2
    """Times that each setting decodes each prompt."""


class Eval(Settings):
    """Measurements of tau during training, which choose the head that is kept."""

    prompts: Name
    """Held-out prompts: a file, or one of the suites `python-heldout`, `spec_bench`, `mt_bench`, `humaneval`, `mbpp`
    and `gsm8k`."""
    num_prompts: Count = 32
    """Prompts to measure on, evenly spread over the suite."""
    max_prompt_tokens: Count = 256
    """Most tokens of a prompt. A longer one in a file is an error; modules of `python-heldout` are cut to fit."""
    skip_long: bool = False
    """Leave longer prompts out instead."""
    max_new_tokens: Count = 128
    """Most tokens of an answer."""
    batch_size: Count = 8
    """Prompts decoded together."""
    tree: str = "chain:5"
    """Draft tokens of a round: `chain:K`; `static:3.2.1` and `tree:DEPTHxTOPKxNODES` for trees; `head` for the head's
    own tree."""
    rule: Literal["match", "ratio", "block"] = "match"
    """Acceptance rule of sampled drafts (see eval/README.md). At temperature 0 all rules are one."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0, lt=MOST)] = 0
    """Sample from this many most likely tokens; 0 keeps all."""
    top_p: Share = 1.0
    """Sample from the most likely tokens that together have this probability; 1 keeps all."""
    min_p: Fraction = 0.0
    """Leave out tokens less likely than this fraction of the most likely one; 0 keeps all."""
    seed: Seed = 0
    """Seed of the choice of held-out prompts, and of the sampling."""
    report: Report = Report()
    """The measurement that ends the run."""


class Tracking(Settings):
    """Experiment tracking. `metrics.jsonl` in the run's folder is always written."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: `offline` writes files to be sent later with `wandb sync`."""
    tensorboard: bool = False
    """Write TensorBoard's files to `tensorboard/` in the run's folder. Needs the package tensorboard."""
    project: Annotated[str, AfterValidator(_check_project)] = "draftsmith"
    """Project of the wandb run."""
    name: Name | None = None
    """Name of the wandb run. Null: the name of the run's folder."""


class Recipe(Settings):
    """A training recipe."""

    output_dir: Name
    """Folder of the run: checkpoints, head, results, report. The same command in the same folder resumes the run."""
    target: Target
    """The language model that the head drafts for."""
    head: AnyHead
    """The draft head: `kind`, and the settings of that kind."""
    data: Data
    """Training data."""
    features: AnyFeatures = ProcessFeatures(kind="process")
    """Where the target computes what the head reads."""
    train: Train
    """The training loop."""
    eval: Eval
    """Measurements of tau."""
    tracking: Tracking = Tracking()
    """Experiment tracking."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe. UserError lists everything that is wrong, a line each."""
    source = read_settings(Path(path), overrides)
    recipe, errors = check(source, Recipe)
    if recipe is not None:
        errors += [source.line(key, what) for key, what in (*_given_in_vain(recipe), *_contradictions(recipe))]
    if recipe is None or errors:
        raise UserError("\n".join(errors))
    return recipe


def dump_recipe(record: dict[str, Any]) -> str:
    """The plain settings of a recipe as YAML, which `load_recipe` reads back to the same settings."""
    return yaml.safe_dump(record, sort_keys=False, allow_unicode=True)


def plain_settings(recipe: Recipe) -> dict[str, Any]:
    """Nested plain values of every setting that has an effect in this run."""
    tree = recipe.model_dump(mode="json")
    for key in _useless(recipe):
        section: Any = tree
        for part in key[:-1]:
            section = section[part]
        section.pop(key[-1], None)
    return tree


def _useless(recipe: Recipe) -> dict[Key, str]:
    """Settings that another setting makes useless, each with that other one."""
    useless: dict[Key, str] = {}
    if recipe.train.schedule != "wsd":
        useless["train", "decay_fraction"] = "with schedule cosine; set train.schedule=wsd"
    if recipe.train.tokens_per_step is not None:
        useless["train", "grad_accum"] = "with train.tokens_per_step"
    if recipe.tracking.wandb == "off":
        useless |= {("tracking", name): "with tracking.wandb off" for name in ("project", "name")}
    if recipe.eval.prompts == HELD_OUT_SUITE:
        useless["eval", "skip_long"] = "on modules, which are cut to fit"
    if recipe.eval.temperature == 0 and not any(recipe.eval.report.temperatures or ()):
        sampled = ("rule", "top_k", "top_p", "min_p")
        useless |= {("eval", name): "at eval.temperature 0, which is greedy" for name in sampled}
    for name in ("regenerate", "on_policy"):
        if getattr(recipe.data, name) is not None and getattr(recipe.data, name).temperature == 0:
            useless["data", name, "seed"] = f"at data.{name}.temperature 0"
    if recipe.head.kind != "draft":
        useless["data", "on_policy"] = f"with head.kind {recipe.head.kind}: only a draft model writes text"
    if all(source.kind != "chat" for source in recipe.data.sources):
        useless["data", "template"] = "without a source of kind chat"
    for n, source in enumerate(recipe.data.sources):
        if source.weight is None or len(recipe.data.sources) == 1:
            useless["data", "sources", n, "weight"] = "with one source"
        if isinstance(source, RecordSource) and source.is_local:
            useless["data", "sources", n, "split"] = "on a file, which has no splits"
    return useless


def _given_in_vain(recipe: Recipe) -> Iterator[tuple[Key, str]]:
    """Useless settings that the recipe gives."""
    for key, why in _useless(recipe).items():
        if _is_given(recipe, key):
            yield key, f"has no effect {why}; leave it out"


def _contradictions(recipe: Recipe) -> Iterator[tuple[Key, str]]:
    """Settings that cannot go with others."""
    train, data = recipe.train, recipe.data
    if train.warmup_steps >= train.max_steps:
        yield ("train", "warmup_steps"), f"expected less than train.max_steps ({train.max_steps})"
    depth = getattr(recipe.head, "depth", None)
    if isinstance(depth, int) and depth >= data.context_length:
        yield ("head", "depth"), f"expected less than data.context_length ({data.context_length})"
    if recipe.target.adapter and recipe.target.adapter.first_step >= train.max_steps:
        yield ("target", "adapter", "first_step"), f"expected less than train.max_steps ({train.max_steps})"
    if data.on_policy and data.on_policy.every >= train.max_steps:
        yield ("data", "on_policy", "every"), f"expected less than train.max_steps ({train.max_steps})"
    kind = recipe.features.kind
    if recipe.target.adapter and kind != "process":
        yield ("features", "kind"), f"target.adapter is trained in every process, got {kind}; use process"
    if data.on_policy and kind in ("vllm", "cache"):
        yield ("features", "kind"), f"data.on_policy makes rows along the way, got {kind}; use process or sharded"
    weights = [source.weight is not None for source in data.sources]
    if any(weights) and not all(weights):
        missing = weights.index(False)
        yield ("data", "sources", missing, "weight"), "is missing: give every source a weight, or none"
    trees: list[tuple[Key, str]] = [(("eval", "tree"), recipe.eval.tree)]
    # Only the report looks for a tree: along the way the same one is measured every time.
    named = [(n, tree) for n, tree in enumerate(recipe.eval.report.trees or ()) if tree != AUTO]
    trees += [(("eval", "report", "trees", n), tree) for n, tree in named]
    for key, tree in trees:
        if fault := _tree_fault(tree, recipe.eval.rule):
            yield key, fault


def _tree_fault(tree: str, rule: str) -> str | None:
    """The fault of measuring a tree by a rule; None where there is none."""
    if tree == HEAD_TREE:
        grown = f"rule {rule}: the tree 'head' is grown from ranks, and may leave out a draw; use rule match"
        return None if rule == "match" else grown
    try:
        shape = parse_shape(tree)
        check_rule(rule, shape)
    except UserError as error:
        return str(error)
    return f"expected a tree that drafts something, such as chain:5, got '{tree}'" if shape.nodes == 1 else None


def _is_given(recipe: Recipe, key: Key) -> bool:
    section: Any = recipe
    for part in key[:-1]:
        section = section[part] if isinstance(part, int) else getattr(section, part)
    name = str(key[-1])
    return name in section.model_fields_set and getattr(section, name) is not None
