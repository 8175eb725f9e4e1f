"""A measurement as a wandb run: its figures, charts and page, and the head as an artifact."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval.core.command_line import OFF
from eval.records.measure_settings import SAMPLED, to_settings
from eval.records.result_folders import short_name
from eval.records.results import named_figures, plain
from eval.records.schema import Results
from eval.records.speedup_checks import why_unreliable
from heads.core.errors import UserError, expect, first_line

MAX_TAG = 64
"""Number of letters of a tag that wandb allows."""


def wandb_mode(asked: str) -> str:
    """Return the mode of wandb, off, offline or online, where --wandb or a recipe asks for one. Clusters set WANDB_MODE
    for all jobs: it wins over any but off."""
    modes = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": OFF}
    if asked == OFF or not (named := os.environ.get("WANDB_MODE")):
        return asked
    expect(named in modes, "WANDB_MODE", f"one of {', '.join(modes)}", named)
    return modes[named]


@contextmanager
def wandb_starts(mode: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the options of `wandb.init` for a run in `folder`, which starts in the `with` block. They keep wandb from
    uploading the code, the git remote and all output, which may contain tokens. UserError if it does not start."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True)
    try:
        yield {"mode": mode, "dir": str(folder), "settings": settings}
    except wandb.errors.Error as error:
        raise UserError(
            f"--wandb {mode}: wandb does not start ({first_line(error)}); log in, or use --wandb offline"
        ) from None


@contextmanager
def tracked(options: argparse.Namespace, out: Path) -> Iterator[Callable[[Results], None]]:
    """Yield a function that logs the results in `out` to a wandb run of this command, if `--wandb` asks for one. The
    run is new, or the one of wandb's agent if it started this process."""
    if (mode := wandb_mode(options.wandb)) == OFF:
        yield lambda results: None
        return
    import wandb

    in_sweep = "WANDB_SWEEP_ID" in os.environ
    (head,) = options.heads
    with wandb_starts(mode, out) as shared:
        run: Any = wandb.init(
            project=None if in_sweep else os.environ.get("WANDB_PROJECT") or "draftsmith",
            name=os.environ.get("WANDB_NAME") or f"{short_name(head)} {' '.join(options.trees)}",
            config=None if in_sweep else {"head": head, **to_settings(options).model_dump()},
            **shared,
        )
    status = 1

    def log(results: Results) -> None:
        nonlocal status
        status = 0 if results.is_exact else 1
        if "sampling" in options and not in_sweep:
            run.config.update({name: plain(results.settings)[name] for name in SAMPLED}, allow_val_change=True)
        log_outcome(run, results, out)

    try:
        yield log
    finally:
        run.finish(exit_code=status)
        print(run_place(run), file=sys.stderr)


def log_outcome(run: Any, results: Results, folder: Path, *, head: Path | None = None) -> None:
    """Log a report in `folder` to a wandb run: the figures as its summary, which a sweep can optimise, the page, a
    table with a row for every setting, the charts, and the head, if given, as an artifact."""
    import wandb

    figures = named_figures(results.headline)
    names = ["tau", "tau_low", "tau_high", *("speedup", "speedup_low", "speedup_high")]
    names += ["tokens_per_second", "plain_tokens_per_second"]
    rows = [
        [m.tree, float(m.temperature), *map(named_figures(m).get, names), why_unreliable(m) is None]
        for m in results.measurements
    ]
    media: dict[str, Any] = {
        f"plots/{file.stem}": wandb.Image(str(file)) for file in sorted((folder / "plots").glob("*.png"))
    }
    page = folder / "report.html"
    if page.is_file():
        media["report"] = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
    run.log({"measurements": wandb.Table(["draft", "temperature", *names, "reliable"], rows), **media})
    run.summary.update(
        {
            **figures,
            "prompts": results.exact.prompts,
            "divergences": len(results.exact.divergences),
            "reliable": why_unreliable(results.headline) is None,
        }
    )
    run.tags = tags(results.head.kind, results.target.name)
    if head is not None:
        about = {"kind": results.head.kind, "draft": results.headline.tree, **figures}
        artifact = wandb.Artifact(f"head-{run.id}", type="model", metadata=about)
        for file in sorted(path for path in head.rglob("*") if path.is_file()):  # add_dir would print to the terminal
            artifact.add_file(str(file), name=str(file.relative_to(head)))
        run.log_artifact(artifact)


def tags(kind: str, target: str) -> tuple[str, ...]:
    return kind, short_name(target)[-MAX_TAG:]


def run_place(run: Any) -> str:
    """Return the address of a run or, offline, the command that uploads it. A run that was resumed has several parts,
    which wandb uploads in the order of their names."""
    if not run.offline:
        return f"wandb: {run.url}"
    folder = Path(run.sync_dir).parent
    parts = [part for part in sorted(folder.glob(f"offline-run-*-{run.id}")) if not [*part.glob("*.synced")]]
    here = [part.relative_to(Path.cwd()) if part.is_relative_to(Path.cwd()) else part for part in parts]
    return f"wandb: offline; upload the run with: wandb sync {shlex.join(map(str, here))}"
