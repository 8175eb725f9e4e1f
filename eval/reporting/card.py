"""The model card of a head: front matter that the Hub reads, and the measured figures in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from eval.benchmark.results import Results
from eval.reporting import format
from eval.reporting.format import BRACKETS, LOCAL_MODEL
from heads.errors import UserError
from heads.target.hub import is_hub_id, repo_and_revision

CARD = "README.md"
LIBRARY = "draftsmith"
RIGHTS = ("license", "license_name", "license_link")
"""The license keys of a model card on the Hub."""
TASK = "text-generation"


def check_card(folder: Path, name: str) -> None:
    """Refuse a folder with a README.md that is not a report: the model card would replace it."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # there is none, or the path is invalid, which the writer reports
        return
    if f"library_name: {LIBRARY}" not in text:
        raise UserError(f"{name} {folder}: holds a {CARD} of something else, which is not to be replaced; name another")


def model_card(
    results: Results,
    *,
    serve: str = "",
    trained: Sequence[str] = (),
    about: str = "",
    data: Mapping[str, Any] | None = None,
) -> str:
    """Return the model card: front matter, a sentence, how to serve the head (`serve`, Markdown), the headline's
    figures, how the head was trained (`trained`, lines of Markdown), how it was measured, and `about` (Markdown).
    `data` holds further arguments of `front_matter`."""
    name, kind = results["target"]["name"], results["head"]["kind"]
    parts = [
        front_matter(kind, name, results=results, **(data or {})),
        f"# {format.as_markdown(format.heading(results))}",
        opening(results),
        serve,
        headline_rows(results),
        "\n".join(["## Trained on", "", *(f"- {line}" for line in trained)]) if trained else "",
        measured_section(results),
        about.strip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def opening(results: Results) -> str:
    """Return the first sentences of a card: which head, for which target, and what it gains."""
    name, kind = results["target"]["name"], results["head"]["kind"]
    size = f"A draft head (`{kind}`, {results['head']['parameters']:,} parameters) for {quoted(name)}"
    gain = f"tau {format.tau_text(results)}"
    if format.why_unreliable(results) is None:
        gain += f" and {format.speedup_text(results)} the speed of plain decoding"
    sameness = "in distribution" if "kind" in results["exact"] else "token for token"
    text = (
        f"{size}: {gain} ({format.as_markdown(format.setting_text(results))}). The head drafts tokens that the target "
        f"verifies, so the text is the target's own, {sameness}."
    )
    return text


def fenced(command: str | None) -> str:
    """Return a command as a block of code, or an empty string if there is none."""
    return f"```\n{command}\n```" if command else ""


def headline_rows(results: Results) -> str:
    """Return the table of the headline setting."""
    compared = "outputs" if "kind" in results["exact"] else "outputs identical to plain decoding"
    rows = [
        ("", format.as_markdown(format.setting_text(results))),
        ("---", "---"),
        ("tau, tokens per target pass", format.tau_text(results)),
        ("speedup over plain decoding", format.speedup_text(results)),
        (compared, format.exact_cell(results)),
    ]
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def quoted(target: str) -> str:
    """Return the name of a target in Markdown."""
    return target if target == LOCAL_MODEL else format.code_span(format.short_name(target))


def measured_section(results: Results) -> str:
    """Return all measured figures, and what they were measured with, in Markdown."""
    rows = []
    for m in results["measurements"]:
        plain = format.number(m["baseline"]["tokens_per_second"], 1)
        cells = [format.as_markdown(m["tree"]), format.sampling_text(m["temperature"]), format.tau_text(m), plain]
        rows.append(f"| {' | '.join([*cells, format.speculative_text(m), format.speedup_cell(m)])} |")
    alpha = ", ".join(format.percent(value) for value in format.reached(results["alpha"]))
    lines = [
        "## Measured with",
        "",
        f"- {format.as_markdown(format.setting_line(results))}",
        f"- {', '.join(f'{name} {version}' for name, version in results['versions'].items())} "
        f"({results['measured_at'][:10]})",
        *([] if (command := format.command_text(results)) is None else ["", fenced(command)]),
        "",
        "| draft | sampling | tau | plain tok/s | speculative tok/s | speedup |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        format.sentence(format.audit_line(results)),
        "",
        f"Acceptance by depth ({format.as_markdown(format.setting_text(results))}): {alpha}.",
        "",
        *(line for warning in format.warnings(results) for line in (f"Note: {format.as_markdown(warning)}.", "")),
        "tau is tokens emitted per target pass, the bonus token included. Plain decoding is the same runtime's, on the "
        f"same prompts, in turns with the speculative runs. {BRACKETS} {format.left_out_text(results)}".rstrip(),
        "",
        "![Acceptance by depth](plots/acceptance.png)",
    ]
    return "\n".join(lines)


def front_matter(
    kind: str,
    target: str,
    *,
    rights: Mapping[str, Any] | None = None,
    datasets: Sequence[str] = (),
    name: str | None = None,
    results: Results | None = None,
) -> str:
    """Return the front matter, YAML between two rules. A target in a local folder is not named. `rights` are the
    target's license keys, and `name` is the model name for the figures."""
    repo, _ = repo_and_revision(target)
    figures = [] if results is None else eval_results(results)
    data = ModelCardData(
        base_model=repo if is_hub_id(target) else None,
        datasets=list(datasets) or None,
        library_name=LIBRARY,
        model_name=(name or f"{kind} on {format.short_name(target)}") if figures else None,
        eval_results=figures or None,
        pipeline_tag=TASK,
        tags=["speculative-decoding", kind],
        **(rights or {}),
    )
    return f"---\n{data.to_yaml()}\n---"


def eval_results(results: Results) -> list[EvalResult]:
    """Return the tau of every setting over all prompts, and its speedup if that is exact and reliable."""
    prompts = ", ".join(format.short_name(name) for name in results["settings"]["prompts"].split(","))
    found = []
    for m in results["measurements"]:
        speedup = m["speedup"] if format.why_unreliable(m) is None else None
        for metric, value in (("tau", m["tau"]["mean"]), ("speedup", speedup and speedup["measured"])):
            if value is not None:
                found.append(
                    EvalResult(
                        task_type=TASK,
                        dataset_type=prompts,
                        dataset_name=prompts,
                        metric_type=metric,
                        metric_name=f"{metric} ({format.setting_text(m)})",
                        metric_value=round(value, 3),
                    )
                )
    return found


def hub_datasets(provenance: Any) -> list[str]:
    """Return the Hub ids among the data paths in a head's provenance."""
    data = provenance.get("data") if isinstance(provenance, dict) else None
    return list(dict.fromkeys(repo_and_revision(path)[0] for path in paths(data) if is_hub_id(path)))


def paths(value: Any) -> Iterator[str]:
    """Yield every string under a key `path`, at any depth."""
    match value:
        case dict():
            for key, item in value.items():
                if key == "path" and isinstance(item, str):
                    yield item
                else:
                    yield from paths(item)
        case list():
            for item in value:
                yield from paths(item)
