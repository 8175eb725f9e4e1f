"""Settings of eval/bench.py and eval/compare.py, and the command-line options of measurements."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from eval.measure.command import (
    AUTO,
    Parser,
    address,
    count,
    counts,
    draft_shapes,
    print_line,
    seed,
    temperatures,
    trees,
)
from eval.measure.prompts import HELD_OUT_SUITE, HUB_SUITES, LATER_TURN, Prompt, prompts_hash, split_prompts
from eval.runtime.sampling_params import RULES, Rule, Sampling, check_rule
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
SERVED = "model"
"""Value of an option that takes the sampling from the target (`served_sampling`)."""
SAMPLED = ("temperatures", "top_k", "top_p", "min_p")
"""Settings that `sampling` replaces."""
UNAPPLIED = (
    *("repetition_penalty", "no_repeat_ngram_size", "typical_p", "epsilon_cutoff", "eta_cutoff", "bad_words_ids"),
    *("sequence_bias", "suppress_tokens"),
)
"""Settings of a generation config that change the distribution in ways that are not supported here. Of these, servers
apply the repetition penalty."""


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
    sampling: Literal["model"] | None = None
    """`model`: sample as a server of the target does by default (`served_sampling`)."""
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
        distinct = len({prompt.ids or prompt.text for prompt in prompts})
        conversations = sum(not LATER_TURN.search(prompt.id) for prompt in prompts)
        counts = {"num_prompts": len(prompts), "distinct_prompts": distinct, "conversations": conversations}
        given = {"suites": split_prompts(self.prompts), "prompts_hash": prompts_hash(prompts)}
        return {**asdict(self), **counts, **given}

    def options(self) -> list[str]:
        """Return the options of eval/bench.py that give these settings, without those that have their defaults."""
        words = ["--tree", ",".join(self.trees)]
        for field in fields(BenchSettings):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            known = ("trees", "sampling", "batch_size" if self.batch_sizes else None)  # `as_served` resolved `sampling`
            if value == field.default or field.name in known:
                continue
            match value:
                case bool():
                    words.append(option if value else "--no-timing")
                case tuple():  # an option that takes several is in the singular
                    words += [option.removesuffix("s"), ",".join(f"{part:.15g}" for part in value)]
                case _:
                    words += [option, str(value)]
        return words

    def sampling_at(self, temperature: float) -> Sampling:
        return Sampling(temperature, self.top_k, self.top_p, self.min_p, self.seed)

    def as_served(self, target: "FrozenTarget") -> "BenchSettings":
        """Return these settings, with the target's own sampling if `sampling` asks for it."""
        if self.sampling is None:
            return self
        served = served_sampling(target)
        own = {name: getattr(served, name) for name in ("top_k", "top_p", "min_p")}
        return replace(self, temperatures=(served.temperature,), **own)


def served_sampling(target: "FrozenTarget") -> Sampling:
    """Return the sampling that vLLM and SGLang take from a target's generation_config if a request names none:
    temperature 1 and no filter where it says nothing, `do_sample` notwithstanding. Print it in one line, with the
    settings that are not applied here."""
    config = target.model.generation_config
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    said = {name: value for name in neutral if (value := getattr(config, name, None)) is not None}
    try:
        served = Sampling(**neutral | said | {"top_k": max(said.get("top_k", 0), 0)})  # -1 also keeps all
    except UserError as error:
        raise UserError(f"{target.name}: generation_config.json: {error}; leave --sampling {SERVED} out") from None
    values = ", ".join(f"{name} {getattr(served, name):g}" for name in neutral)
    unapplied = [f"{name} {value}" for name in UNAPPLIED if (value := getattr(config, name, None)) not in (None, 0, 1)]
    rest = f"; not applied: {', '.join(unapplied)}" if unapplied else ""
    print_line(f"sampling of {target.name}'s generation_config: {values}{rest}")
    return served


IN_A_RECIPE = ("skip_long", "rule", "top_k", "top_p", "min_p", "max_new_tokens", "seed")


def add_measure_options(parser: Parser) -> None:
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
    given: Any = {"default": argparse.SUPPRESS}  # absent unless given, since --sampling replaces them
    add(
        "--temperature",
        dest="temperatures",
        type=temperatures,
        help="0, the default, is greedy; separate several with commas",
        **given,
    )
    add(
        "--sampling",
        choices=[SERVED],
        help=f"{SERVED}: temperature and filters of the target's generation_config, as servers sample by default",
    )
    add(
        "--rule",
        default=known.rule,
        choices=RULES,
        help="acceptance rule; ratio and block keep the distribution of sampled text, match every token",
    )
    add("--top-k", type=int, help="sample from this many likeliest tokens; default: 0, all", **given)
    add("--top-p", type=float, help="sample from the likeliest tokens up to this sum; default: 1, all", **given)
    add("--min-p", type=float, help="least probability, relative to the likeliest; default: 0, all", **given)
    add("--max-new-tokens", type=count, default=known.max_new_tokens, help="most new tokens of each prompt")
    add(
        "--batch-size",
        dest="batch_sizes",
        type=counts,
        default="1",
        help="prompts decoded together, or requests in flight to --server; separate several with commas, and each is "
        "measured",
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
    add(
        "--server",
        type=address,
        metavar="URL",
        help="measure this running vLLM or SGLang, with or without a head named",
    )
    add(
        "--plain-server",
        type=address,
        metavar="URL",
        help="the same target served without a draft, for the speedup of --server",
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
        "and the settings, in bench/ of the head's run or under runs/; eval/report.py and scripts/publish.py take a "
        "run's own results.json, from the end of its training, and another measurement only by its name",
    )


def add_prompt_options(parser: Parser, *, num_prompts: int, max_prompt_tokens: int, max_new_tokens: int) -> None:
    add = parser.add_argument
    add("--prompts", default=HELD_OUT_SUITE, help="a suite or a file")
    add("--num-prompts", type=count, default=num_prompts, help="prompts, evenly spread over the suite")
    add("--max-prompt-tokens", type=count, default=max_prompt_tokens, help="longer prompts are skipped")
    add("--max-new-tokens", type=count, default=max_new_tokens, help="most new tokens of each prompt")
    add("--seed", type=seed, default=0, help="seed of the sampling and of the held-out prompts")
    add("--out", type=Path, help="JSON file to write the record to")


def to_settings(options: argparse.Namespace) -> BenchSettings:
    """Return the settings of a command. Raise UserError if they contradict each other."""
    given = {field.name: getattr(options, field.name) for field in fields(BenchSettings) if field.name in options}
    for name in SAMPLED if options.sampling else ():
        if name in given:
            option = name.removesuffix("s").replace("_", "-")
            raise UserError(f"--{option}: --sampling {SERVED} takes it from the target; leave one of the two out")
    if not options.sampling and not any(given.get("temperatures", ())):
        for name in ("rule", "top_k", "top_p", "min_p"):
            if given.get(name, getattr(BenchSettings, name)) != getattr(BenchSettings, name):
                raise UserError(f"--{name.replace('_', '-')}: has no effect at --temperature 0; leave it out")
    if AUTO in options.trees and not options.timing:
        raise UserError(f"--tree {AUTO}: searches by time; leave --no-timing out, or name trees")
    given |= {"batch_size": options.batch_sizes[0], "repeats": options.repeats if options.timing else 1}
    settings = BenchSettings(**given | {"batch_sizes": options.batch_sizes if len(options.batch_sizes) > 1 else ()})
    for temperature in settings.temperatures:
        settings.sampling_at(temperature)  # raises for a filter out of its range
    return settings
