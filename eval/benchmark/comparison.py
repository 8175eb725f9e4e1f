"""Comparisons by the settings of a command, from its prompts to the figures of every variant."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from eval.benchmark.audit import audit, find_divergences
from eval.benchmark.auto import LARGEST_TREE, Search, start_search
from eval.benchmark.figures import by_suite, figures, samples
from eval.benchmark.measure import Comparison, VariantSpec, check_decoded, compare
from eval.benchmark.opening import prompt_room
from eval.benchmark.prompts import Prompt, follow_up, load_prompts, split_prompts
from eval.benchmark.results import Results
from eval.benchmark.settings import BenchSettings
from eval.runtime.engine import Engine, Request
from eval.runtime.identity import is_narrow
from heads.base import Drafter
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from heads.tree import TreeShape


def check_target(settings: BenchSettings, target: FrozenTarget) -> None:
    """Raise UserError for a setting that has no effect on this target."""
    if settings.strict and not is_narrow(target):
        raise UserError(
            "--strict: has no effect but in bfloat16 or float16 on a GPU: elsewhere every output is plain "
            "decoding's bit for bit anyway; leave it out"
        )


def most_nodes(settings: BenchSettings, named: Sequence[TreeShape]) -> int:
    """The most nodes of any draft that is to be measured, one of the `named` or one that a search comes upon."""
    return max([shape.nodes for shape in named] + [LARGEST_TREE] * settings.is_auto)


def make_variant_spec(settings: BenchSettings, head: Drafter, shape: TreeShape) -> VariantSpec:
    """A head with one of the drafts."""
    return VariantSpec(head, shape, settings.rule, settings.adaptive, settings.strict)


def choose_prompts(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, settings: BenchSettings, most_nodes: int
) -> list[Prompt]:
    """The prompts of every suite, each with room for a tree of `most_nodes`, later turns of conversations included:
    those follow the target's own greedy answers."""
    room = prompt_room(target, settings.max_new_tokens, most_nodes)
    limit = min(settings.max_prompt_tokens or room, room)
    prompts = []
    for suite in split_prompts(settings.prompts):
        if not suite:
            raise UserError(f"--prompts {settings.prompts!r}: expected suites or files, commas between")
        prompts += load_prompts(
            suite,
            tokenizer,
            num_prompts=settings.num_prompts,
            max_prompt_tokens=limit,
            seed=settings.seed,
            skip_long=settings.skip_long,
        )
    open_turns = [prompt for prompt in prompts if prompt.later_turns]
    engine = Engine(target, batch_size=settings.batch_size, max_length=limit + settings.max_new_tokens + 1)
    while open_turns:
        answers = engine.generate([Request(list(p.ids), settings.max_new_tokens) for p in open_turns])
        texts = [str(tokenizer.decode(answer.tokens, skip_special_tokens=True)) for answer in answers]
        # A conversation that has grown past the room is left where it is: its later turns are no fault of the prompt
        # file.
        grown = [follow_up(prompt, text, tokenizer) for prompt, text in zip(open_turns, texts, strict=True)]
        grown = [prompt for prompt in grown if len(prompt.ids) <= limit]
        prompts += grown
        open_turns = [prompt for prompt in grown if prompt.later_turns]
    return prompts


def look_for_drafts(
    target: FrozenTarget,
    head: Drafter,
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
    fixed: Sequence[TreeShape],
    bar: Progress,
) -> Search:
    """The calibration of `--tree auto`; the shapes `fixed` are measured whatever it says."""
    show_task(bar, "looking for drafts", None)
    return start_search(
        target,
        head,
        prompts,
        settings.sampling(temperature),
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        fixed=fixed,
        rule=settings.rule,
    )


def run_comparison(
    target: FrozenTarget,
    entries: Sequence[VariantSpec],
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
    bar: Progress,
) -> Comparison:
    """One comparison by the settings."""
    task = show_task(bar, "measuring", settings.repeats * (1 + len(entries)) * len(prompts))
    return compare(
        target,
        entries,
        prompts,
        settings.sampling(temperature),
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        repeats=settings.repeats,
        on_unit=lambda count: bar.advance(task, count),
    )


@dataclass
class Judged:
    """The figures of comparisons, a place for each variant, and where plain decoding did not repeat itself."""

    measurements: list[Results] = field(default_factory=list)
    suites: list[dict[str, Results]] = field(default_factory=list)
    samples: list[list[Results]] = field(default_factory=list)
    unrepeatable: list[Results] = field(default_factory=list)

    def add(self, other: "Judged") -> None:
        """Take up what another comparison gave."""
        self.measurements += other.measurements
        self.suites += other.suites
        self.samples += other.samples
        self.unrepeatable += other.unrepeatable


def judge(result: Comparison, target: FrozenTarget, tokenizer: PreTrainedTokenizerBase) -> Judged:
    """Every variant's figures, audited. UserError where no output is longer than what the prefill gives."""
    suites = ", ".join(sorted({prompt.suite for prompt in result.prompts}))
    check_decoded(result.plain.outputs[0].values(), suites)
    judged = Judged(unrepeatable=find_divergences(result, result.plain, target, tokenizer))
    for variant, divergences in zip(result.drafting, audit(result, target, tokenizer), strict=True):
        judged.measurements.append(figures(result, variant, divergences, range(len(result.units))))
        judged.suites.append(by_suite(result, variant, divergences))
        judged.samples.append(samples(result, variant, tokenizer))
    return judged


def withhold_speed(measurements: Sequence[Results]) -> None:
    """Remove every speedup, because the audit failed."""
    for measurement in measurements:
        measurement["speedup"] = None


def show_task(bar: Progress, what: str, total: int | None) -> TaskID:
    """Show what is being done, in the place of what was shown before."""
    for task in bar.task_ids:
        bar.remove_task(task)
    return bar.add_task(what, total=total)


def progress_bar() -> Progress:
    """A bar on standard error, where that is a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
