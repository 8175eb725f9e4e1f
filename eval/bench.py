"""Measure one head: tau, acceptance, speed against plain decoding, and whether every token is the target's.

    python eval/bench.py runs/quickstart
    python eval/bench.py HEAD_DIR_OR_HUB_ID --prompts mt_bench,humaneval --tree chain:5,tree:5x8x24 --temperature 0,1

Writes results.json, report.html, plots and a model card's section into --out. Exit status 0; 1 if an output was not the
target's own (then no speedup is printed); 2 with one line for what the caller can mend.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from eval.command import (
    Parser,
    add_head_options,
    count,
    draft_shapes,
    exit_status,
    open_head,
    prompt_room,
    seed,
    temperatures,
    trees,
)
from eval.files import check_folder
from eval.measure import Entry, find_divergences, race
from eval.prompts import HELD_OUT_SUITE, HUB_SUITES, Prompt, follow_up, load_prompts, prompts_hash
from eval.report import print_report, write_report
from eval.results import (
    SCHEMA_VERSION,
    Results,
    by_suite,
    environment,
    figures,
    head_facts,
    headline,
    pooled_exactness,
    samples,
    target_facts,
    write_results,
)
from eval.runtime.engine import Engine, Request
from eval.runtime.sampling import Sampling
from heads.base import Drafter
from heads.checkpoint import find_head
from heads.errors import UserError
from heads.registry import HEADS, UNTRAINED, untrained_kind
from heads.target import FrozenTarget


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured; all of it goes into results.json."""

    prompts: str = HELD_OUT_SUITE
    """Suites or files, commas between."""
    num_prompts: int | None = None
    """Of each suite; all of a suite if None, 64 held-out modules."""
    max_prompt_tokens: int | None = None
    """As many as the target's context leaves room for if None."""
    skip_long: bool = False
    trees: tuple[str, ...] = ("chain:5",)
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    batch_size: int = 1
    repeats: int = 2
    """How often each contender decodes each prompt."""
    seed: int = 0


def run_bench(
    target: FrozenTarget,
    head: Drafter,
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    *,
    head_path: str,
    out: Path | None = None,
    console: Console | None = None,
) -> Results:
    """Measure a head on a target, write and print the report, and return what results.json holds."""
    shapes = draft_shapes(settings.trees, head)
    prompts = choose_prompts(target, tokenizer, settings, max(shape.nodes for shape in shapes))
    measurements, suites, shown, unrepeatable = [], [], [], []
    steps = len(settings.temperatures) * settings.repeats * (1 + len(shapes)) * len(prompts)
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=steps)
        for temperature in settings.temperatures:
            sampling = Sampling(temperature, settings.top_k, settings.top_p, settings.min_p, settings.seed)
            result = race(
                target,
                [Entry(head, shape) for shape in shapes],
                prompts,
                sampling,
                max_new_tokens=settings.max_new_tokens,
                batch_size=settings.batch_size,
                repeats=settings.repeats,
                on_unit=lambda count: bar.advance(task, count),
            )
            unrepeatable += find_divergences(result, result.plain, target, tokenizer)
            for contender in result.drafting:
                divergences = find_divergences(result, contender, target, tokenizer)
                measurements.append(figures(result, contender, divergences, range(len(result.units))))
                suites.append(by_suite(result, contender, divergences))
                shown.append(samples(result, contender, tokenizer))
    best = headline(measurements)
    exact = pooled_exactness(measurements, unrepeatable)
    if exact["divergences"]:
        withhold_speed([*measurements, *(figure for suite in suites for figure in suite.values())])
    results: Results = {
        "schema_version": SCHEMA_VERSION,
        "target": target_facts(target),
        "head": head_facts(head, kind_of(head), head_path),
        **environment(target),
        "settings": {**asdict(settings), "num_prompts": len(prompts), "prompts_hash": prompts_hash(prompts)},
        **measurements[best],
        "exact": exact,
        "suites": suites[best],
        "measurements": measurements,
        "samples": shown[best],
    }
    if out is not None:
        write_results(results, out / "results.json")
        write_report(results, out)
    print_report(results, console or Console())
    return results


def withhold_speed(measurements: Sequence[Results]) -> None:
    """Where the audit failed, no speedup is stated anywhere."""
    for measurement in measurements:
        measurement["speedup"] = None


def choose_prompts(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, settings: BenchSettings, most_nodes: int
) -> list[Prompt]:
    """The prompts of every suite, each with room for a tree of `most_nodes`, later turns of conversations included:
    those follow the target's own greedy answers."""
    room = prompt_room(target, settings.max_new_tokens, most_nodes)
    limit = min(settings.max_prompt_tokens or room, room)
    prompts = []
    for suite in settings.prompts.split(","):
        prompts += load_prompts(
            suite.strip(),
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


def kind_of(head: Drafter) -> str:
    """The head's name in the registry."""
    return next(kind for kind, cls in {**HEADS, **UNTRAINED}.items() if isinstance(head, cls))


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


def bench_command(options: argparse.Namespace) -> int:
    """Load what the command line names, and measure: the exit status."""
    settings = to_settings(options)
    untrained = untrained_kind(options.head)
    out = options.out or default_out(Path(options.head.replace(":", "-")) if untrained else find_head(options.head))
    check_folder(out, "--out")
    opened = open_head(options)
    results = run_bench(opened.target, opened.head, opened.tokenizer, settings, head_path=options.head, out=out)
    print(f"written to {out}", file=sys.stderr)
    return 1 if results["exact"]["divergences"] else 0


def default_out(folder: Path) -> Path:
    """bench/ in the run the head is of, else bench-NAME here; never the run's own results."""
    run = folder.resolve().parent
    if folder.name == "head" and (run / "recipe.yaml").is_file():
        return run / "bench"
    return Path(f"bench-{folder.resolve().name}")


def to_settings(options: argparse.Namespace) -> BenchSettings:
    """The command's settings, checked together."""
    for temperature in options.temperatures:
        Sampling(temperature, options.top_k, options.top_p, options.min_p, options.seed)
    if not any(options.temperatures):
        for name in ("top_k", "top_p", "min_p"):
            if getattr(options, name) != getattr(BenchSettings, name):
                raise UserError(f"--{name.replace('_', '-')}: has no effect at --temperature 0; leave it out")
    return BenchSettings(**{field.name: getattr(options, field.name) for field in fields(BenchSettings)})


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    known = BenchSettings()
    parser = Parser("Measure a draft head: tau, speed, and whether every token is the target's.")
    add = parser.add_argument
    add_head_options(parser)
    add(
        "--prompts",
        default=known.prompts,
        help=f"suites or files, commas between: {HELD_OUT_SUITE}, {', '.join(HUB_SUITES)}",
    )
    add("--num-prompts", type=count, help="of each suite, evenly spread; all by default (64 held-out modules)")
    add("--max-prompt-tokens", type=count, help="longer prompts are an error; what the context leaves by default")
    add("--skip-long", action="store_true", help="leave longer prompts out instead")
    add(
        "--tree",
        dest="trees",
        type=trees,
        default=",".join(known.trees),
        help="drafts to measure, commas between: chain:5,tree:5x8x24,static:3.2.1; head is the head's own static tree",
    )
    add(
        "--temperature",
        dest="temperatures",
        type=temperatures,
        default="0",
        help="0 is greedy; several with commas between",
    )
    add("--top-k", type=int, default=known.top_k, help="0 keeps all")
    add("--top-p", type=float, default=known.top_p, help="1 keeps all")
    add("--min-p", type=float, default=known.min_p, help="0 keeps all")
    add("--max-new-tokens", type=count, default=known.max_new_tokens, help="of each prompt")
    add("--batch-size", type=count, default=known.batch_size, help="prompts decoded together")
    add("--repeats", type=count, default=known.repeats, help="how often each setting decodes each prompt")
    add("--seed", type=seed, default=known.seed, help="of the sampling and of the choice of held-out prompts")
    add("--out", type=Path, help="where results.json, report.html, plots/ and README.md go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: bench_command(parse_arguments())))
