"""Settings of eval/bench.py and eval/compare.py, and the command-line options of measurements."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from eval.measure.command import AUTO, Parser, count, counts, draft_shapes, seed, temperatures, trees
from eval.measure.prompts import HELD_OUT_SUITE, HUB_SUITES, LATER_TURN, Prompt, prompts_hash, split_prompts
from eval.runtime.sampling import RULES, Rule, Sampling, check_rule
from heads.core.contract import HEAD_TREE, Drafter
from heads.core.errors import UserError
from heads.core.tree import TreeShape

if TYPE_CHECKING:
    from heads.targets.model import FrozenTarget


MOST = 2**31
"""Bound of counts, steps and seeds: the product of two smaller numbers does not overflow."""
Count = Annotated[int, Field(ge=1, lt=MOST)]
Seed = Annotated[int, Field(ge=0, lt=MOST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(lambda value: Sampling(value).temperature)]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of a measurement. All of them are recorded in results.json. A recipe's `eval` has those of
    `IN_A_RECIPE` too."""

    prompts: str = HELD_OUT_SUITE
    """Suites or files, separated by commas."""
    num_prompts: int | None = None
    """Number of prompts of each suite; None: the whole suite, or 64 held-out prompts."""
    max_prompt_tokens: int | None = None
    """Maximum number of tokens of a prompt; None: as many as fit in the target's context."""
    skip_long: bool = False
    """Skip prompts that are too long, instead of stopping with an error."""
    trees: tuple[str, ...] = ("chain:5",)
    """Names of the draft trees; `auto` searches for the fastest."""
    rule: Rule = "match"
    """Acceptance rule when sampling (see eval/README.md). At temperature 0 all rules are the same."""
    temperatures: tuple[float, ...] = (0.0,)
    top_k: Annotated[int, Field(ge=0, lt=MOST)] = 0
    """Sample from this many most likely tokens; 0 keeps all."""
    top_p: Share = 1.0
    """Sample from the most likely tokens that together have this probability; 1 keeps all."""
    min_p: Fraction = 0.0
    """Leave out tokens whose probability is below this fraction of the largest one; 0 keeps all."""
    max_new_tokens: Count = 128
    """Maximum number of tokens of an answer."""
    batch_size: int = 1
    repeats: int = 2
    """Number of times that each variant decodes each prompt."""
    seed: Seed = 0
    """Seed for choosing held-out prompts and for sampling."""
    batch_sizes: tuple[int, ...] = ()
    """Several batch sizes, each of which is measured; empty: `batch_size` alone."""
    contexts: tuple[int, ...] = ()
    """Numbers of tokens to which prompts are cut, each of which is measured; empty: the prompts as they are."""
    timing: bool = True
    """False: only compare tokens. Each prompt is then decoded once, and EOS tokens are ignored."""

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
        looked_for = self.is_auto and self.rule == "match" and not target.is_recurrent
        own = looked_for and head.own_tree is not None and head.own_tree.tree
        shapes = draft_shapes([*named, *([HEAD_TREE] if own and HEAD_TREE not in named else [])], head)
        for shape in shapes:
            check_rule(self.rule, shape)
        return shapes

    def record(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        distinct = len({prompt.ids for prompt in prompts})
        conversations = sum(not LATER_TURN.search(prompt.id) for prompt in prompts)
        counts = {"num_prompts": len(prompts), "distinct_prompts": distinct, "conversations": conversations}
        given = {"suites": split_prompts(self.prompts), "prompts_hash": prompts_hash(prompts)}
        return {**asdict(self), **counts, **given}

    def options(self) -> list[str]:
        """Return the options of eval/bench.py that give these settings, without those that have their defaults."""
        words = ["--tree", ",".join(self.trees)]
        for field in fields(BenchSettings):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if value == field.default or field.name in ("trees", "batch_size" if self.batch_sizes else None):
                continue
            match value:
                case bool():
                    words.append(option if value else "--no-timing")
                case tuple():  # an option that takes several is in the singular
                    words += [option.removesuffix("s"), ",".join(f"{part:.15g}" for part in value)]
                case _:
                    words += [option, str(value)]
        return words

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, self.top_k, self.top_p, self.min_p, self.seed)


IN_A_RECIPE = ("skip_long", "rule", "top_k", "top_p", "min_p", "max_new_tokens", "seed")


def add_measure_options(parser: Parser) -> None:
    """Add an option for each setting, and `--out`."""
    known = BenchSettings()
    add = parser.add_argument
    suites = ", ".join([HELD_OUT_SUITE, *HUB_SUITES])
    add("--prompts", default=known.prompts, help=f"suites or files, separated by commas: {suites}")
    add("--num-prompts", type=count, help="prompts of each suite, evenly spread; default: all (64 of python-heldout)")
    add("--max-prompt-tokens", type=count, help="a longer prompt is an error; default: as the context allows")
    add("--skip-long", action="store_true", help="skip prompts over --max-prompt-tokens instead")
    add(
        "--tree",
        dest="trees",
        type=trees,
        help=f"drafts to measure, separated by commas: chain:5,tree:5x8x24,static:3.2.1; {HEAD_TREE}: the head's own "
        f"static tree; {AUTO}: search for the fastest; default: chain:5, for several heads chain:5,chain:3,{HEAD_TREE}",
    )
    add(
        "--temperature",
        dest="temperatures",
        type=temperatures,
        default="0",
        help="0 is greedy; separate several with commas",
    )
    add(
        "--rule",
        default=known.rule,
        choices=RULES,
        help="acceptance rule; ratio and block keep the distribution of sampled text, match every token",
    )
    add("--top-k", type=int, default=known.top_k, help="sample from this many likeliest tokens; 0: all")
    add("--top-p", type=float, default=known.top_p, help="sample from the likeliest tokens up to this sum; 1: all")
    add("--min-p", type=float, default=known.min_p, help="least probability, relative to the likeliest; 0: all")
    add("--max-new-tokens", type=count, default=known.max_new_tokens, help="most new tokens of each prompt")
    add(
        "--batch-size",
        dest="batch_sizes",
        type=counts,
        default="1",
        help="prompts decoded together; separate several with commas, and each is measured",
    )
    add(
        "--context",
        dest="contexts",
        type=counts,
        default=(),
        metavar="TOKENS",
        help="cut prompts of so many tokens from the texts of --prompts; separate several with commas; default: the "
        "prompts as they are",
    )
    add("--repeats", type=count, default=known.repeats, help="times that each setting decodes each prompt")
    add(
        "--no-timing",
        dest="timing",
        action="store_false",
        help="only compare every token with plain decoding's, past EOS; writes audit.json",
    )
    add("--seed", type=seed, default=known.seed, help="seed of the sampling and of the held-out prompts")
    add(
        "--out",
        type=Path,
        help="folder for the results; earlier results in it are replaced; default: a new folder, named after the time "
        "and the settings, in bench/ of the head's run or under runs/; eval/report.py RUN and scripts/publish.py RUN "
        "take the newest results of a run, including those from the end of its training",
    )


def add_prompt_options(parser: Parser, *, num_prompts: int, max_prompt_tokens: int, max_new_tokens: int) -> None:
    """Add the options for prompts, lengths, the seed and `--out`. The arguments are their defaults."""
    add = parser.add_argument
    add("--prompts", default=HELD_OUT_SUITE, help="a suite or a file")
    add("--num-prompts", type=count, default=num_prompts, help="prompts, evenly spread over the suite")
    add("--max-prompt-tokens", type=count, default=max_prompt_tokens, help="longer prompts are skipped")
    add("--max-new-tokens", type=count, default=max_new_tokens, help="most new tokens of each prompt")
    add("--seed", type=seed, default=0, help="seed of the sampling and of the held-out prompts")
    add("--out", type=Path, help="JSON file to write the record to")


def to_settings(options: argparse.Namespace) -> BenchSettings:
    """Return the settings of a command. Raise UserError if they contradict each other."""
    for temperature in options.temperatures:
        Sampling(temperature, options.top_k, options.top_p, options.min_p, options.seed)
    if not any(options.temperatures):
        for name in ("rule", "top_k", "top_p", "min_p"):
            if getattr(options, name) != getattr(BenchSettings, name):
                raise UserError(f"--{name.replace('_', '-')}: has no effect at --temperature 0; leave it out")
    if AUTO in options.trees and not options.timing:
        raise UserError(f"--tree {AUTO}: searches by time; leave --no-timing out, or name trees")
    given = {field.name: getattr(options, field.name) for field in fields(BenchSettings) if field.name in options}
    given |= {"batch_size": options.batch_sizes[0], "repeats": options.repeats if options.timing else 1}
    return BenchSettings(**given | {"batch_sizes": options.batch_sizes if len(options.batch_sizes) > 1 else ()})
