"""How to measure: one model of settings, from which a recipe's `eval`, the command's options and the record in
results.json are made."""

import argparse
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, Field

from eval.core.command_line import AUTO, draft_shapes, is_tuple, print_line, typed
from eval.data.prompts import HELD_OUT_SUITE, LATER_TURN, Prompt, expanded_prompts, prompts_hash, split_prompts
from eval.runtime.sampling_params import ANY_TREE, FILTERS, Rule, Sampling, SharedSampling, Temperature, check_rule
from heads.core.contract import HEAD_TREE, Drafter
from heads.core.errors import UserError
from heads.core.strict_settings import Count, Seed
from heads.core.tree import TreeShape

if TYPE_CHECKING:
    from heads.targets.frozen_target import FrozenTarget


def check_tree(text: str) -> str:
    if text not in (AUTO, HEAD_TREE):
        draft_shapes([text])
    return text


Tree = Annotated[str, AfterValidator(str.strip), AfterValidator(check_tree)]
Trees = Annotated[tuple[Tree, ...], Field(min_length=1)]
SERVED = "model"
"""Value of an option that takes the sampling from the target (`served_sampling`)."""
SAMPLED = ("temperatures", *FILTERS, "repetition_penalty")
"""Settings that `sampling` replaces."""


class MeasureSettings(SharedSampling):
    """Settings of every measurement: of one during training, which a recipe's `eval` describes, and of the bench."""

    skip_long: bool = False
    """Skip prompts that are too long, instead of stopping with an error."""
    rule: Rule = "match"
    """Acceptance rule when sampling: `match`, `ratio`, `block` or `likeliest` (see eval/README.md). All are the same at
    temperature 0."""
    max_new_tokens: Count = 128
    """Maximum number of tokens of an answer."""
    seed: Seed = 0
    """Seed for choosing held-out prompts and for sampling."""


class BenchSettings(MeasureSettings):
    """Settings of the bench and of the final measurement of a run. All of them are recorded in results.json."""

    prompts: Annotated[str, AfterValidator(expanded_prompts)] = HELD_OUT_SUITE
    """Suites (python-heldout, spec_bench, mt_bench, humaneval, mbpp, gsm8k) or files, separated by commas."""
    num_prompts: Count | None = None
    """Number of prompts of each suite, evenly spread. Default: all, or 64 held-out prompts."""
    max_prompt_tokens: Count | None = None
    """Maximum number of tokens of a prompt; a longer one is an error. Default: as the context allows."""
    trees: Trees = ("chain:5",)
    """Draft trees, such as chain:5, tree:5x8x24 or static:3.2.1; head: the head's own static tree; auto: search for the
    fastest."""
    sampling: Literal["model"] | None = None
    """model: temperature, filters and repetition penalty of the target's generation_config, as servers sample by
    default."""
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1)] = (0.0,)
    """Sampling temperatures; 0 is greedy."""
    batch_size: Count = 1
    """Prompts decoded together, if `batch_sizes` is empty."""
    batch_sizes: tuple[Count, ...] = ()
    """Prompts decoded together, or requests in flight to a server. Each of several sizes is measured."""
    contexts: tuple[Count, ...] = ()
    """Numbers of tokens to which prompts are cut, from the texts of the suites. Each is measured. Default: the prompts
    as they are."""
    repeats: Count = 2
    """Number of times that each setting decodes each prompt."""
    timing: bool = True
    """Without timing, only tokens are compared, past EOS, each prompt once; writes audit.json."""

    @property
    def points(self) -> list[tuple[int | None, int]]:
        """Context and batch size of each point that is measured; the context is None if prompts are not cut."""
        return list(product(self.contexts or (None,), self.batch_sizes or (self.batch_size,)))

    @property
    def is_auto(self) -> bool:
        return AUTO in self.trees

    def shapes(self, head: Drafter, target: "FrozenTarget") -> list[TreeShape]:
        """Return the shapes that are named, except `auto`. A search under `match` also includes the head's own tree,
        unless the target is recurrent."""
        named = [tree for tree in self.trees if tree != AUTO]
        may_branch = self.is_auto and self.rule in ANY_TREE and not target.is_recurrent
        if may_branch and head.tree and HEAD_TREE not in named:
            named.append(HEAD_TREE)
        shapes = draft_shapes(named, head)
        for shape in shapes:
            check_rule(self.rule, shape)
        return shapes

    def record(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        return {
            **self.model_dump(),
            "num_prompts": len(prompts),
            "distinct_prompts": len({prompt.ids or prompt.text for prompt in prompts}),
            "conversations": sum(not LATER_TURN.search(prompt.id) for prompt in prompts),
            "suites": split_prompts(self.prompts),
            "prompts_hash": prompts_hash(prompts),
        }

    def options(self) -> list[str]:
        """Return the options of eval/bench.py that give these settings, without those that have their defaults."""
        words = ["--tree", ",".join(self.trees)]
        # `as_served` resolved `sampling`.
        known = {"trees", "sampling"} | ({"batch_size"} if self.batch_sizes else set())
        for name, value in self.model_dump(exclude_defaults=True, exclude=known).items():
            option = f"--{name.replace('_', '-')}"
            match value:
                case bool():
                    words.append(option if value else "--no-timing")
                case tuple():  # an option that takes several is in the singular
                    words += [option.removesuffix("s"), ",".join(f"{part:.15g}" for part in value)]
                case _:
                    words += [option, str(value)]
        return words

    def sampling_at(self, temperature: float) -> Sampling:
        return Sampling(temperature=temperature, seed=self.seed, **self.shared())

    def as_served(self, target: "FrozenTarget") -> "BenchSettings":
        """Return these settings, with the target's own sampling if `sampling` asks for it."""
        if self.sampling is None:
            return self
        served = served_sampling(target)
        others = {name: getattr(served, name) for name in SAMPLED[1:]}
        return self.model_copy(update={"temperatures": (served.temperature,), **others})


def served_sampling(target: "FrozenTarget") -> Sampling:
    """Return the sampling that vLLM and SGLang take from a target's generation_config if a request names none:
    temperature 1, no filter and no repetition penalty where it says nothing, `do_sample` notwithstanding. Print it in
    one line."""
    config = target.model.generation_config
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    values = neutral | {name: value for name in neutral if (value := getattr(config, name, None)) is not None}
    try:
        served = Sampling(**values | {"top_k": max(values["top_k"], 0)})  # -1 also keeps all
    except UserError as error:
        raise UserError(f"{target.name}: generation_config.json: {error}; do not use --sampling {SERVED}") from None
    shown = ", ".join(f"{name} {getattr(served, name):g}" for name in neutral)
    print_line(f"sampling of {target.name}'s generation_config: {shown}")
    return served


HINTS = get_type_hints(BenchSettings, include_extras=True)


def add_settings_options(parser: argparse.ArgumentParser, names: Iterable[str], **defaults: object) -> None:
    """Add the options for some settings, which are absent from the parsed ones unless they are given on the command
    line or in `defaults`. An option that takes several values has its setting's name in the singular."""
    for name in names:
        field, option = BenchSettings.model_fields[name], name.replace("_", "-")
        default = defaults.get(name, field.default)
        meaning = str(field.description).replace("`", "").replace("\n", " ")
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        if is_tuple(HINTS[name]):
            meaning = f"{meaning} Separate several with commas."
        if not (default is None or isinstance(default, bool) or shown == ""):
            meaning = f"{meaning} Default: {shown}."
        settings: dict[str, Any] = {"dest": name, "default": defaults.get(name, argparse.SUPPRESS), "help": meaning}
        if isinstance(default, bool):
            flag = f"--no-{option}" if default else f"--{option}"
            parser.add_argument(flag, action="store_const", const=not default, **settings)
        else:
            option = option.removesuffix("s") if is_tuple(HINTS[name]) else option
            parser.add_argument(f"--{option}", type=typed(HINTS[name]), metavar="VALUE", **settings)


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    add_settings_options(parser, (name for name in BenchSettings.model_fields if name != "batch_size"))
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the results; earlier results in it are replaced; default: a new folder, named after the time "
        "and the prompts, in bench/ of the head's run or under runs/",
    )


def add_prompt_options(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add options for prompts, of which long ones are skipped, and for the file of a record."""
    names = ("prompts", "num_prompts", "max_prompt_tokens", "max_new_tokens", "seed")
    add_settings_options(parser, names, prompts=HELD_OUT_SUITE, **defaults)
    parser.add_argument("--out", type=Path, help="JSON file to write the record to")
    parser.set_defaults(skip_long=True)


def to_settings(options: argparse.Namespace) -> BenchSettings:
    """Return the settings of a command. Raise UserError if they contradict each other."""
    given = {name: value for name, value in vars(options).items() if name in BenchSettings.model_fields}
    if "sampling" in given:
        for name in (name for name in SAMPLED if name in given):
            option = name.removesuffix("s").replace("_", "-")
            raise UserError(f"--{option}: --sampling {SERVED} takes it from the target; use one of the two")
    elif not any(given.get("temperatures", ())):
        for name in ("rule", *FILTERS):
            if given.get(name, BenchSettings.model_fields[name].default) != BenchSettings.model_fields[name].default:
                raise UserError(f"--{name.replace('_', '-')}: has no effect at --temperature 0; do not give it")
    if not given.get("timing", True):
        if AUTO in given.get("trees", ()):
            raise UserError(f"--tree {AUTO}: searches by time; name trees, or do not use --no-timing")
        given["repeats"] = 1
    if len(given.get("batch_sizes", ())) == 1:
        (given["batch_size"],) = given.pop("batch_sizes")
    return BenchSettings(**given)
