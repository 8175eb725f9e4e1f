"""The model card of a head: front matter that the Hub reads, and the measured figures in Markdown (card.md.j2)."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from eval.pages import texts
from eval.pages.report_tables import headline_table, settings_table
from eval.pages.texts import LOCAL_MODEL
from eval.pages.verdicts import load_lines, pays, reliable_speedup, serve_label, warnings
from eval.records.acceptance_profile import acceptance_profile, load_test
from eval.records.learning_curve import learning_line
from eval.records.schema import Results
from eval.records.speedup_checks import why_unreliable
from heads.core.errors import UserError
from heads.targets.hub import is_hub_id, repo_and_revision

CARD = "README.md"
PLOTS = {"plots/acceptance.png": "Acceptance by depth", "plots/curve.png": "tau over training tokens"}
"""Charts that a card shows, with their titles."""
TEMPLATE = Path(__file__).with_name("card.md.j2")
LIBRARY = "draftsmith"
PROJECT = "the draftsmith project"
"""The project, as a card names it."""
TASK = "text-generation"


def check_card(folder: Path, name: str) -> None:
    """Refuse a folder with a README.md that is not a report: the model card would replace it."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # there is none, or the path is invalid, which the writer reports
        return
    if f"library_name: {LIBRARY}" not in text:
        raise UserError(f"{name} {folder}: holds a {CARD} of something else, which is not to be replaced; name another")


def model_card(results: Results, *, serve: str | None = None, plots: Sequence[str] = ()) -> str:
    """Return the card of a measured head. `plots`: files of `PLOTS` that lie beside it."""
    head = results.head
    return render_card(head.kind, results.target.name, head.parameters, results, serve=serve, plots=plots)


def render_card(
    kind: str,
    target: str,
    parameters: int,
    results: Results | None,
    *,
    name: str | None = None,
    plots: Sequence[str] = (),
    rights: Mapping[str, Any] | None = None,
    datasets: Sequence[str] = (),
    **more: Any,
) -> str:
    """Return the card of a head. `name`: name of the model in the front matter. `plots`: files of `PLOTS` that lie
    beside the card. `rights`: the target's license keys; if it is empty, the card says so. `more`: the template's names
    that are not figures. A target in a local folder is not named in the front matter."""
    repo, _ = repo_and_revision(target)
    figures = [] if results is None else eval_results(results)
    data = ModelCardData(
        base_model=repo if is_hub_id(target) else None,
        datasets=list(datasets) or None,
        library_name=LIBRARY,
        model_name=(name or f"{kind} on {texts.short_name(target)}") if figures else None,
        eval_results=figures or None,
        pipeline_tag=TASK,
        tags=["speculative-decoding", kind],
        **(rights or {}),
    )
    opening = f"A draft head (`{kind}`, {parameters:,} parameters) for {quoted(target)}"
    values = {
        "title": texts.as_markdown(f"{kind} on {texts.short_name(target)}"),
        "opening": f"{opening}." if results is None else f"{opening}: {gain(results)}",
        "project": PROJECT,
        "unlicensed": rights == {},
        **({} if results is None else measured_values(results)),
        "plots": [(PLOTS[file], file) for file in plots],
        **more,
    }
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), **values)
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def gain(results: Results) -> str:
    """Return what a head gains, and that the text stays the target's own."""
    m = results.headline
    text = f"tau {texts.tau_text(m)}"
    if why_unreliable(m) is None:
        text += f" and {texts.speedup_text(m)} the speed of plain decoding"
    sameness = "in distribution" if results.exact.kind else "token for token"
    return (
        f"{text} ({texts.as_markdown(texts.setting_text(m))}). The head drafts tokens that the target verifies, so "
        f"the text is the target's own, {sameness}."
    )


def measured_values(results: Results) -> dict[str, object]:
    """Return the template's figures."""
    table = settings_table(results)
    profile = acceptance_profile(results)
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return {
        "headline": headline_table(results).markdown(),
        "pays": pays(results),
        "serve_label": serve_label(results),
        "by_load": [texts.as_markdown(texts.sentence(line)) for line in load_lines(results)],
        "setting": texts.as_markdown(texts.setting_line(results)),
        "versions": f"{versions} ({results.measured_at[:10]})",
        "command": texts.command_text(results),
        "measured": table.markdown(),
        "notes": " ".join(table.notes),
        "audit": texts.sentence(texts.audit_line(results)),
        "learning": (line := learning_line(results.head.curve)) and texts.sentence(line),
        "load_test": profile and load_test(profile, results.target),
        "warnings": [texts.as_markdown(warning) for warning in warnings(results)],
    }


def quoted(target: str) -> str:
    return target if target == LOCAL_MODEL else texts.code_span(texts.short_name(target))


def eval_results(results: Results) -> list[EvalResult]:
    """Return the tau of every setting over all prompts, and its speedup if that is exact and reliable."""
    prompts = ", ".join(texts.short_name(name) for name in results.settings.prompts.split(","))
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=prompts,
            dataset_name=prompts,
            metric_type=metric,
            metric_name=f"{metric} ({texts.setting_text(m)})",
            metric_value=round(value, 3),
        )
        for m in results.measurements
        for metric, value in (("tau", m.tau.mean), ("speedup", reliable_speedup(m)))
        if not math.isnan(value)
    ]
