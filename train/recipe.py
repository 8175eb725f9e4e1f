"""The recipe: one YAML file, one tree of typed settings, each named for the part that it configures."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field

from eval.command import AUTO
from eval.files import is_file
from eval.prompts import HELD_OUT_SUITE
from eval.runtime.rules import check_rule
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.own_tree import HEAD_TREE
from heads.tree import parse_shape
from train.head_settings import head_errors
from train.strict_yaml import Key, Settings, check, read_settings


def _check_name(name: str) -> str:
    if not name.isprintable():
        raise ValueError("holds characters that cannot be printed; name another")
    return name


def _check_project(name: str) -> str:
    if not name.strip() or len(name) > 128 or any(character in name for character in "/\\#?%:"):
        raise ValueError("expected 1 to 128 characters, none of / \\ # ? % :")
    return name


MOST = 2**31
"""No count, step or id is this large: below it no product of two of them overflows."""
Count = Annotated[int, Field(ge=1, lt=MOST)]
Several = Annotated[int, Field(ge=1, le=2**16)]
Step = Annotated[int, Field(ge=0, lt=MOST)]
Seed = Annotated[int, Field(ge=0, lt=MOST)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Weight = Positive | None
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1), AfterValidator(_check_name)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(lambda value: Sampling(value).temperature)]
Share = Annotated[float, Field(gt=0, le=1)]


class Adapter(Settings):
    """Medusa-2 (arXiv 2401.10774, section 2.2.2): a LoRA adapter of the target, trained with the heads and for them.

    `train.lr` is the adapter's rate. The loss is KL(target as it was || adapted target) on every label, plus
    `heads_weight` times the heads' own.
    """

    first_step: Step
    """Until then the heads are trained alone; with it the adapter begins, with a warm-up of its own."""
    rank: Count = 32
    alpha: Positive = 16.0
    dropout: Fraction = 0.05
    modules: Annotated[list[Name], Field(min_length=1)] | None = None
    """Names of the layers adapted, by their last part; every linear layer but the output head if null."""
    heads_weight: Positive = 0.2
    head_lr_multiple: Positive = 4.0
    """The heads' rate, in parts of `train.lr`."""


class Target(Settings):
    path: Name
    """A folder or a hub id of any Hugging Face causal language model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` keeps what the target was saved in, except float32 on a CPU, where bfloat16 is slow."""
    trust_remote_code: bool = False
    quantize: Literal["int8"] | None = None
    """int8: the matrices of the decoder layers, through torchao; a quarter of float32's memory."""
    adapter: Adapter | None = None


class PythonSource(Settings):
    """Modules of Python's standard library; some are held out by a hash of their path."""

    kind: Literal["python"]
    limit: Count | None = None
    """At most so many modules; all of them if null."""
    weight: Weight = None
    """Its share of the training rows and prompts, relative to the other sources. If no source gives one, rows are
    shared in proportion to size, prompts evenly."""


class RecordSource(Settings):
    """Records of JSON lines, Parquet, or a hub data set."""

    path: Name
    split: str = "train"
    """Of a hub data set; a file has none."""
    limit: Count | None = None
    weight: Weight = None


class TextSource(RecordSource):
    """Plain text: records with `text`, or a .txt file."""

    kind: Literal["text"]


class ChatSource(RecordSource):
    """Conversations: `messages`, `conversations` or `instruction` records; the labels are the assistant's answers."""

    kind: Literal["chat"]
    chat_template: str | None = None
    """A file with a Jinja chat template, used in place of the tokenizer's own."""
    max_skipped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The share of records that may be left out because they cannot be used: no answer, an unknown role, refused by the
    chat template, ..."""


AnySource = Annotated[PythonSource | TextSource | ChatSource, Field(discriminator="kind")]


class Answers(Settings):
    """Prompts from the sources, and how the runtime has them answered."""

    prompts: Annotated[int, Field(ge=1, le=10**8)]
    """How many there are."""
    prompt_tokens: Count = 512
    """Prompts from text are this long at most; longer conversations are left out."""
    new_tokens: Count = 256
    batch_size: Count = 8
    seed: Seed = 0
    train_on_prompts: bool = False
    """Whether prompt tokens are labels too."""


class Regenerate(Answers):
    """Train on the target's own answers to prompts from the sources, which is what a draft head must foresee."""

    temperature: Temperature = 0.0
    share: Share = 1.0
    """The share of training rows that are answers; the rest are the sources as they are."""


class OnPolicy(Answers):
    """Train on what the draft itself writes, as it stands (arXiv 2310.08461, section 4); head.kind draft only."""

    every: Count
    """Steps between two renewals; the first samples are written after so many."""
    samples: Count
    """How many of the prompts, in turn, are answered at each renewal."""
    temperature: Temperature = 1.0
    share: Share = 0.5
    """The share of training rows that are samples; the rest are the other data."""


class Data(Settings):
    sources: Annotated[list[AnySource], Field(min_length=1)]
    context_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens in one packed row."""
    regenerate: Regenerate | None = None
    on_policy: OnPolicy | None = None


class Train(Settings):
    max_steps: Count
    seed: Seed = 0
    batch_size: Several = 8
    """Rows of one forward pass on one device."""
    grad_accum: Several = 1
    """Forward passes of one optimizer step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon (Jordan et al., 2024) orthogonalises the updates of inner matrices; AdamW keeps lm_head and the norms. Not
    under DeepSpeed or FSDP, which cut matrices up."""
    lr: Annotated[float, Field(gt=0, le=100)] = 1e-4
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = Field(default=[0.9, 0.95])
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: Step = 0
    decay_fraction: Share = 0.2
    """wsd only: the part of the run in which the rate falls."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The rate at the end of the run, in parts of `lr`."""
    max_grad_norm: Positive = 1.0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """The dtype of products in training. bf16 is autocast over float32 weights; auto is bf16 where that is faster on
    this machine, else fp32. A resumed run keeps what it began with."""
    checkpoint_every: Count = 500
    keep_checkpoints: Count = 2
    eval_every: Count | None = None
    """Steps between measurements of tau; only at the end if null."""
    log_every: Count = 10


class Report(Settings):
    """The measurement that ends the run, where it is to differ from the ones along the way."""

    num_prompts: Count | None = None
    max_new_tokens: Count | None = None
    batch_size: Count = 1
    trees: Annotated[list[str], Field(min_length=1)] | None = None
    """Drafts to measure; `auto` looks for the fastest."""
    temperatures: Annotated[list[Temperature], Field(min_length=1)] | None = None
    repeats: Count = 2


class Eval(Settings):
    prompts: Name
    """A suite's name or a file of held-out prompts."""
    num_prompts: Count = 32
    max_prompt_tokens: Count = 256
    """The most tokens of a prompt; a longer one in a file is an error, and held-out modules are cut to fit."""
    skip_long: bool = False
    """Leave longer prompts out instead."""
    max_new_tokens: Count = 128
    batch_size: Count = 8
    tree: str = "chain:5"
    rule: Literal["match", "ratio", "ratio-wr", "block"] = "match"
    """By which sampled drafts are accepted (eval/runtime/rules.py); at temperature 0 all are one."""
    temperature: Temperature = 0.0
    top_k: Annotated[int, Field(ge=0, lt=MOST)] = 0
    top_p: Share = 1.0
    min_p: Fraction = 0.0
    seed: Seed = 0
    """Chooses held-out prompts, and the noise of sampling."""
    report: Report = Report()


class Tracking(Settings):
    wandb: Literal["off", "offline", "online"] = "off"
    project: Annotated[str, AfterValidator(_check_project)] = "draftsmith"
    """The wandb project that the run belongs to."""
    name: Name | None = None
    """The run's name there; the last part of `output_dir` if null."""


class Recipe(Settings):
    output_dir: Name
    target: Target
    head: dict[str, Any]
    """`kind`, and the settings of that kind's own Config."""
    data: Data
    train: Train
    eval: Eval
    tracking: Tracking = Tracking()


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe. UserError lists everything that is wrong, a line each."""
    source = read_settings(Path(path), overrides)
    recipe, errors = check(source, Recipe)
    errors += head_errors(source)
    if isinstance(recipe, Recipe) and "kind" in recipe.head:
        errors += [source.line(key, what) for key, what in (*_given_in_vain(recipe), *_contradictions(recipe))]
    if errors:
        raise UserError("\n".join(errors))
    assert isinstance(recipe, Recipe)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as resolved, in YAML that `load_recipe` reads back to the same settings."""
    return yaml.safe_dump(plain_settings(recipe), sort_keys=False, allow_unicode=True)


def plain_settings(recipe: Recipe) -> dict[str, Any]:
    """Nested plain values of every setting that has an effect in this run."""
    tree = recipe.model_dump(mode="json")
    for key, _ in _useless(recipe):
        section: Any = tree
        for part in key[:-1]:
            section = section[part]
        section.pop(key[-1], None)
    return tree


def _useless(recipe: Recipe) -> list[tuple[Key, str]]:
    """Settings that another setting makes useless, and which one does."""
    train, tracking, measure, data = recipe.train, recipe.tracking, recipe.eval, recipe.data
    rules: list[tuple[Key, bool, str]] = [
        (("train", "decay_fraction"), train.schedule != "wsd", "with schedule cosine; set train.schedule=wsd"),
    ]
    rules += [(("tracking", name), tracking.wandb == "off", "with tracking.wandb off") for name in ("project", "name")]
    rules.append((("eval", "skip_long"), measure.prompts == HELD_OUT_SUITE, "on modules, which are cut to fit"))
    greedy = measure.temperature == 0 and not any(measure.report.temperatures or ())
    for name in ("rule", "top_k", "top_p", "min_p"):
        rules.append((("eval", name), greedy, "at eval.temperature 0, which is greedy"))
    for name, writing in (("regenerate", data.regenerate), ("on_policy", data.on_policy)):
        if writing is not None:
            rules.append((("data", name, "seed"), writing.temperature == 0, f"at data.{name}.temperature 0"))
    kind = recipe.head["kind"]
    rules.append((("data", "on_policy"), kind != "draft", f"with head.kind {kind}: only a draft model writes text"))
    for n, source in enumerate(data.sources):
        unweighted = source.weight is None or len(data.sources) == 1
        rules.append((("data", "sources", n, "weight"), unweighted, "with one source"))
        if isinstance(source, RecordSource):
            rules.append((("data", "sources", n, "split"), is_file(source.path), "on a file, which has no splits"))
    return [(key, why) for key, useless, why in rules if useless]


def _given_in_vain(recipe: Recipe) -> Iterator[tuple[Key, str]]:
    """Useless settings that the recipe gives all the same."""
    for key, why in _useless(recipe):
        if _is_given(recipe, key):
            yield key, f"has no effect {why}; leave it out"


def _contradictions(recipe: Recipe) -> Iterator[tuple[Key, str]]:
    """Settings that cannot go with others."""
    train, data = recipe.train, recipe.data
    if train.warmup_steps >= train.max_steps:
        yield ("train", "warmup_steps"), f"expected less than train.max_steps ({train.max_steps})"
    depth = recipe.head.get("depth")
    if isinstance(depth, int) and depth >= data.context_length:
        yield ("head", "depth"), f"expected less than data.context_length ({data.context_length})"
    if recipe.target.adapter and recipe.target.adapter.first_step >= train.max_steps:
        yield ("target", "adapter", "first_step"), f"expected less than train.max_steps ({train.max_steps})"
    if data.on_policy and data.on_policy.every >= train.max_steps:
        yield ("data", "on_policy", "every"), f"expected less than train.max_steps ({train.max_steps})"
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
    """What is wrong with measuring a tree by a rule."""
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
