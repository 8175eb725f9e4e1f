"""The tables of a report, which the terminal, the page and the card render each in its own way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.measure.results import Results
from eval.pages import format
from eval.pages.format import BRACKETS, MISSING, TURNS


@dataclass(frozen=True)
class Table:
    """Rows of cells. The first cell of a row is its name. A cell that contains NOT_RELIABLE is highlighted."""

    title: str
    notes: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    """Indices of rows in bold."""

    def markdown(self) -> str:
        cells = [self.columns, ["---"] * len(self.columns), *([format.as_markdown(r[0]), *r[1:]] for r in self.rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def headline_table(results: Results) -> Table:
    rows = [["tau, tokens per target pass", format.tau_text(results)]]
    if (each := results["tau"].get("per_request")) is not None:
        rows.append(["mean of each prompt's tau", format.number(each)])
    for depth, alpha in enumerate(format.reached(results["alpha"]), start=1):
        rows.append([f"accepted at depth {depth}", format.percent(alpha, 1)])
    if results["baseline"] is not None:
        rows.append(["plain tokens/s", format.number(results["baseline"]["tokens_per_second"], 1)])
    elif results["speedup"] is None:
        rows.append(["tokens/s", format.speculative_text(results)])
    if "server" in results:
        rows.append(["time to first token, median", first_token_text(results)])
    if results["speedup"] is not None:
        rows.append(["speculative tokens/s", format.speculative_text(results)])
        rows.append(["speedup over plain decoding", format.short_speedup(results)])
        if format.why_unreliable(results) is None and results["speedup"]["predicted"] is not None:
            rows.append(["speedup predicted by costs", f"{results['speedup']['predicted']:.2f}x"])
    rows.append(["outputs that end in a loop", format.percent(results["loop_share"])])
    bold = frozenset(n for n, (name, _) in enumerate(rows) if name.startswith(("tau", "speedup over")))
    return Table("", [], ["", format.setting_text(results)], rows, bold)


def first_token_text(figures: Results) -> str:
    return f"{format.number(figures['first_token_ms']['p50'], 1)} ms"


def settings_table(results: Results) -> Table:
    served, rows = "server" in results, []
    predicts = format.is_exact(results) and not served
    for m in results["measurements"]:
        predicted = MISSING
        if predicts and format.why_unreliable(m) is None:
            predicted = f"{format.number(m['speedup']['predicted'])}x"
        plain = m["baseline"] and m["baseline"]["tokens_per_second"]
        cells = [format.setting_text(m), format.speedup_cell(m), format.tau_text(m), format.number(plain, 1)]
        cells.append(format.speculative_text(m))
        last = [first_token_text(m)] if served else [predicted] * predicts
        rows.append([*cells, *last, format.exact_cell(m)])
    searches = [format.sentence(format.search_line(search)) for search in results.get("auto", ()) if predicts]
    turns = "Plain and speculative decoding took turns on the same prompts." if results["baseline"] else ""
    places = [(m["tree"], m["temperature"], format.point_text(m)) for m in (results, *results["measurements"])]
    return Table(
        "Settings measured",
        [*searches, f"{turns} {BRACKETS} {format.left_out_text(results)}".strip()],
        [
            *("draft", "speedup", "tau", "plain tok/s", "speculative tok/s"),
            *(["first token"] if served else ["predicted"] * predicts),
            "exact" if "kind" in results["exact"] else "identical",
        ],
        rows,
        frozenset(n for n, place in enumerate(places[1:]) if place == places[0]),
    )


def beside_table(results: Results, others: Sequence[Results]) -> list[Table]:
    """Return measurements of one head here and in servers, at the settings that were measured in several places: the
    newest of each place, where `others` has the newest first. No table if there are none."""
    found: dict[tuple[Any, ...], dict[str, tuple[Results, Results]]] = {}
    for part in (results, *others):
        for m in part["measurements"]:
            points = (format.point_of(part, m, name) for name in ("batch_size", "context"))
            places = found.setdefault((m["tree"], m["temperature"], *points), {})
            places.setdefault(format.where_text(part), (part, m))
    pairs = [pair for places in found.values() if len(places) > 1 for pair in places.values()]
    rows = []
    for part, m in pairs:
        accepted = " ".join(format.percent(alpha, 1) for alpha in m["alpha"])
        speedup = format.short_speedup(m)
        cells = [format.tau_text(m), accepted, format.speculative_text(m), speedup]
        rows.append([f"{format.where_text(part)}: {format.setting_text(m)}", *cells])
    same = len({part["settings"]["prompts_hash"] for part, _ in pairs}) == 1
    prompts = "The prompts are the same." if same else "The prompts are not the same, which changes the figures."
    days = {f"{format.where_text(part)} on {part['measured_at'][:10]}" for part, _ in pairs}
    columns = ["", "tau", "accepted by depth", "tokens/s", "speedup"]
    note = f"{prompts} Measured {', '.join(sorted(days))}. {BRACKETS}"
    return [Table("Here and in the server", [note], columns, rows)] if rows else []


def latency_table(results: Results) -> list[Table]:
    """Return the times between tokens of every setting, or no table if the audit failed."""
    times: dict[str, Results] = {}
    for m in results["measurements"] if format.is_exact(results) else ():
        if m["baseline"] is not None:
            times.setdefault(format.setting_text(m | {"tree": "plain"}), m["baseline"]["token_ms"])
        times[format.setting_text(m)] = m["speculative"]["token_ms"]
    rows = [[name, *(format.number(spread[p]) for p in ("p50", "p95", "p99"))] for name, spread in times.items()]
    note = "Milliseconds. A round's time is shared among its tokens, so rounds that accept little have slow tokens."
    return [Table("Time between tokens", [note], ["", "median", "95%", "99%"], rows)] if rows else []


def suites_table(results: Results) -> list[Table]:
    """Return the table of suites and their categories, or no table if there is one suite without categories."""
    if len(results["suites"]) < 2:
        return []
    rows = []
    for name, m in results["suites"].items():
        shown = format.short_name(name) if "/" not in name else f"\N{EN SPACE}{name.split('/', 1)[1]}"
        cells = [shown, format.speedup_cell(m), format.tau_text(m)]
        rows.append([*cells, str(m["exact"]["prompts"]), format.percent(m["loop_share"])])
    note = f"{format.setting_text(results)}. Loops: outputs whose end repeats itself, which are easy to draft."
    return [Table("By suite", [note], ["suite", "speedup", "tau", "prompts", "loops"], rows)]


def comparison_table(results: Results) -> Table:
    heads, differs = {head["name"]: head for head in results["heads"]}, format.trained_otherwise(results)
    rows = []
    for m in format.listed(results):
        head = heads[m["head"]]
        tokens = MISSING if (seen := head.get("trained_tokens")) is None else format.count(seen)
        trained = ", ".join([tokens, *differs.get(m["head"], [])])
        read = format.number(m["draft_bytes"] / 1e6, 1) if m.get("draft_bytes") is not None else MISSING
        names = [m["head"], head["kind"], format.count(head["parameters"]), trained, format.setting_text(m), read]
        accepted = " ".join(format.percent(alpha) for alpha in m["alpha"] if alpha is not None) or MISSING
        cells = [format.speedup_cell(m), format.tau_text(m), accepted, format.exact_cell(m)]
        rows.append([*names, *cells])
    columns = ["head", "kind", "parameters", "trained on", "draft", "MB a round"]
    columns += ["speedup", "tau", "accepted by depth", "identical"]
    turns = f"{TURNS} {format.left_out_text(results['measurements'][0])}".rstrip()
    return Table("Heads and drafts", [turns], columns, rows)


def audit_table(results: Results) -> Table:
    columns = ["head"] * ("heads" in results) + ["draft", "identical", "tau", "loops"]
    rows = []
    for m in results["measurements"]:
        cells = [format.setting_text(m), format.exact_cell(m), format.number(m["tau"]["mean"])]
        rows.append([*([m["head"]] if "heads" in results else []), *cells, format.percent(m["loop_share"])])
    return Table("Audit", [], columns, rows)
