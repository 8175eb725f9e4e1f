"""report.html: one self-contained page, light and dark, without scripts and without anything fetched."""

from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from eval.curves import depth_curves, kinds, latency_chart, speedup_chart
from eval.wording import (
    Results,
    adaptive_line,
    audit_line,
    count,
    device_text,
    divergence_text,
    exact_cell,
    heading,
    is_exact,
    number,
    percent,
    reached,
    sampling_text,
    search_line,
    setting_line,
    short_name,
    speedup_text,
    warnings,
    with_interval,
)

TEMPLATE = Path(__file__).with_name("report.html.j2")
CHART_HEIGHT, BAR_PITCH, BAR_WIDTH = 150, 64, 40
ROUND_WIDTH = 720  # of the time bars, in the SVG's units
PLOT_WIDTH = 130  # of a speedup's point and interval


def render_page(results: Results) -> str:
    """The page's HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "percent": percent, "sampling": sampling_text}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    curves = depth_curves(results)
    return template.render(
        r=results,
        heading=heading(results),
        exact=is_exact(results),
        audit=audit_line(results),
        in_law="kind" in results["exact"],
        setting=setting_line(results),
        divergences=[divergence_text(divergence) for divergence in results["exact"]["divergences"]],
        acceptance=acceptance_bars(results),
        histogram=histogram_bars(results),
        time=time_bars(results) if results["speedup"] else None,
        speeds=speedup_chart(curves) if curves else None,
        latencies=latency_chart(curves) if curves else None,
        drawn=kinds(curves) if curves else [],
        searches=[search_line(search) for search in results.get("auto", ()) if search["chosen"]]
        + [adaptive_line(m) for m in results["measurements"] if "adaptive" in m],
        warnings=warnings(results),
        settings=setting_rows(results),
        suites=suite_rows(results),
        samples=[sample_rounds(sample) for sample in results["samples"]],
        facts=facts(results),
        chart={"height": CHART_HEIGHT, "pitch": BAR_PITCH, "bar": BAR_WIDTH, "round": ROUND_WIDTH, "plot": PLOT_WIDTH},
    )


def acceptance_bars(results: Results) -> list[Results]:
    """alpha_k, and beside it the share of rounds that came so far."""
    bars, reach = [], 1.0
    for depth, alpha in enumerate(reached(results["alpha"]), start=1):
        reach *= alpha or 0.0
        bars.append(
            {
                "label": str(depth),
                "share": alpha or 0.0,
                "text": percent(alpha),
                "mark": reach,
                "title": f"depth {depth}: accepted in {percent(alpha, 1)} of the rounds that put it to the test; "
                f"reached by {percent(reach, 1)} of all",
            }
        )
    return bars


def histogram_bars(results: Results) -> list[Results]:
    """Rounds by tokens emitted, the bonus token included."""
    counts = results["accepted_histogram"]
    total, most = max(sum(counts), 1), max([*counts, 1])
    return [
        {
            "label": str(tokens),
            "share": n / most,
            "text": percent(n / total),
            "title": f"{n:,} of {total:,} rounds emitted {tokens} token{'s' if tokens > 1 else ''}",
        }
        for tokens, n in enumerate(counts, start=1)
    ]


def time_bars(results: Results) -> Results:
    """A round by phase, and plain decoding's time for as many tokens, on one scale."""
    tau, step = results["tau"]["mean"], results["speculative"]["plain_step_ms"]
    breakdown: dict[str, float] = results["speculative"]["breakdown_ms"]
    plain, phases = tau * step, sum(breakdown.values())
    scale = ROUND_WIDTH / max(plain, phases)
    parts, left = [], 0.0
    for phase, milliseconds in breakdown.items():
        width = milliseconds * scale
        share = milliseconds / phases
        parts.append({"phase": phase, "left": left, "width": width, "ms": milliseconds, "share": share})
        left += width
    ticks = [k * step * scale for k in range(1, int(tau) + 1) if k * step * scale < plain * scale - 1]
    return {
        "plain_ms": plain,
        "plain_width": plain * scale,
        "ticks": ticks,
        "parts": parts,
        "round_ms": phases,
        "tau": tau,
    }


def setting_rows(results: Results) -> list[Results]:
    """Every setting measured, its speedup as a point with its interval on a common axis."""
    spans = [speed_span(m["speedup"]) for m in results["measurements"] if m["speedup"]]
    least = 0.95 * min([1.0, *(low for _, low, _ in spans)])
    most = 1.05 * max([1.0, *(high for _, _, high in spans)])

    def place(speed: float) -> float:
        return PLOT_WIDTH * (speed - least) / (most - least)

    rows = []
    for m in results["measurements"]:
        speed: Results | None = m["speedup"]
        rows.append(
            {
                "name": f"{m['tree']}, {sampling_text(m['temperature'])}",
                "best": (m["tree"], m["temperature"]) == (results["tree"], results["temperature"]),
                "tau": with_interval(m["tau"]["mean"], m["tau"]["ci95"]),
                "plain": number(m["baseline"]["tokens_per_second"], 1),
                "fast": number(m["speculative"]["tokens_per_second"], 1) if speed else "withheld",
                "speedup": speedup_text(m),
                "predicted": f"{number(speed['predicted'])}x" if speed else "",
                "identical": exact_cell(m),
                "dot": dict(zip(("at", "low", "high"), map(place, speed_span(speed)), strict=True)) if speed else None,
                "one": place(1.0),
            }
        )
    return rows


def speed_span(speed: Results) -> tuple[float, float, float]:
    """A speedup and the ends of its interval; the point itself where there is no interval."""
    low, high = speed["ci95"] or (speed["measured"], speed["measured"])
    return speed["measured"], low, high


def suite_rows(results: Results) -> list[Results]:
    """Suites and their categories; none where there is one suite without categories."""
    if len(results["suites"]) < 2:
        return []
    return [
        {
            "name": short_name(name) if "/" not in name else name.split("/", 1)[1],
            "inner": "/" in name,
            "prompts": m["exact"]["prompts"],
            "tau": with_interval(m["tau"]["mean"], m["tau"]["ci95"]),
            "speedup": speedup_text(m),
            "loops": percent(m["loop_share"]),
        }
        for name, m in results["suites"].items()
    ]


def sample_rounds(sample: Results) -> Results:
    """A sample's text, round by round, neighbours of one kind joined."""
    rounds = []
    for number_, group in groupby(sample["pieces"], key=lambda piece: piece["round"]):
        pieces = list(group)
        runs = [
            {"drafted": drafted, "text": "".join(piece["text"] for piece in run)}
            for drafted, run in groupby(pieces, key=lambda piece: piece["drafted"])
        ]
        drafted = sum(piece["drafted"] for piece in pieces)
        title = f"round {number_}: {drafted} drafted and accepted, {len(pieces) - drafted} from the target"
        rounds.append({"title": title if number_ else "first token, from the prompt's own pass", "runs": runs})
    return {**sample, "rounds_shown": rounds}


def adapter_facts(adapter: Results | None) -> list[tuple[str, Any]]:
    """The line that says that the target is an adapted one."""
    if not adapter:
        return []
    size = count(adapter["parameters"])
    return [("adapter", f"LoRA of rank {adapter['rank']}, {size} parameters; the audit is of the adapted target")]


def facts(results: Results) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Everything a reader needs to measure the same again."""
    target, head, settings = results["target"], results["head"], results["settings"]
    return [
        (
            "Target",
            [
                ("name", target["name"]),
                *([("grown from", grown)] if (grown := target.get("grown_from")) else []),
                ("architecture", target["architecture"]),
                (
                    "size",
                    f"{count(target['parameters'])} parameters, {target['layers']} layers of {target['hidden_size']}",
                ),
                ("vocabulary", f"{target['vocab_size']:,}"),
                *([("weights", f"{size / 1e6:,.1f} MB")] if (size := target.get("weight_bytes")) else []),
                ("fingerprint", target["fingerprint"]),
                *adapter_facts(target.get("adapter")),
            ],
        ),
        (
            "Head",
            [
                ("kind", head["kind"]),
                ("path", head["path"]),
                ("size", f"{count(head['parameters'])} parameters"),
                ("taps", ", ".join(map(str, head["taps"])) or "none"),
            ],
        ),
        (
            "Measurement",
            [
                ("prompts", f"{settings['num_prompts']} of {settings['prompts']}"),
                ("prompt hash", settings["prompts_hash"]),
                ("new tokens", f"{settings['max_new_tokens']} at most"),
                ("rule", results.get("rule", "match")),
                ("batch", settings["batch_size"]),
                ("repeats", settings["repeats"]),
                ("seed", settings["seed"]),
            ],
        ),
        ("Machine", [("device", device_text(results)), *results["versions"].items()]),
    ]
