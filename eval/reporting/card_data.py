"""The front matter of a model card, which the Hub reads: target, training data, tau and speedup."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from eval.benchmark.results import Results
from eval.reporting.format import busy_warning, sampling_text, short_name
from heads.target.hub import is_hub_id, repo_and_revision

LIBRARY = "draftsmith"
LIBRARY_LINE = f"library_name: {LIBRARY}"
"""A line in every model card."""
RIGHTS = ("license", "license_name", "license_link")
"""The license keys of a model card on the Hub."""
TASK = "text-generation"


def front_matter(
    kind: str,
    target: str,
    *,
    rights: Mapping[str, Any] | None = None,
    datasets: Sequence[str] = (),
    name: str | None = None,
    results: Results | None = None,
) -> str:
    """Return YAML between two rules. A target that is a local folder is not named. `rights` are its license keys, and
    `name` is the model name of the figures."""
    repo, _ = repo_and_revision(target)
    figures = [] if results is None else eval_results(results)
    data = ModelCardData(
        base_model=repo if is_hub_id(target) else None,
        datasets=list(datasets) or None,
        library_name=LIBRARY,
        model_name=(name or f"{kind} on {short_name(target)}") if figures else None,
        eval_results=figures or None,
        pipeline_tag=TASK,
        tags=["speculative-decoding", kind],
        **(rights or {}),
    )
    return f"---\n{data.to_yaml()}\n---"


def eval_results(results: Results) -> list[EvalResult]:
    """The tau of every setting over all prompts, and its speedup where that is exact and reliable."""
    prompts = ", ".join(short_name(name) for name in results["settings"]["prompts"].split(","))
    undisturbed = busy_warning(results["measurements"]) is None
    found = []
    for m in results["measurements"]:
        setting = f"{m['tree']}, {sampling_text(m['temperature'])}"
        speedup = m["speedup"] if undisturbed else None
        for metric, value in (("tau", m["tau"]["mean"]), ("speedup", speedup and speedup["measured"])):
            if value is not None:
                found.append(
                    EvalResult(
                        task_type=TASK,
                        dataset_type=prompts,
                        dataset_name=prompts,
                        metric_type=metric,
                        metric_name=f"{metric} ({setting})",
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
