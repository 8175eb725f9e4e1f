"""The tables of a report. The terminal, the page and the card render each in its own way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from eval.pages import texts
from eval.pages.texts import BRACKETS, MISSING, NOT_RELIABLE
from eval.pages.verdicts import fastest, search_line, training_differences
from eval.records.figures_schema import Measurement
from eval.records.head_schema import Head
from eval.records.schema import Results, Roofline
from eval.records.speedup_checks import NO_BASELINE, is_believable, why_unreliable

MAX_SHARE = 1.25
"""Maximum plausible bandwidth of a plain step, relative to copying: it only reads, which may be faster than copying."""


@dataclass(frozen=True)
class Table:
    """Rows of cells. The first cell of a row is its name. A cell that contains NOT_RELIABLE is highlighted. Columns in
    which nothing was measured are left out."""

    title: str
    notes: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Sequence[int] = ()
    """Indices of rows in bold."""

    def __post_init__(self) -> None:
        cells = [*zip(*self.rows, strict=True)] or [()] * len(self.columns)
        measured = [n == 0 or bool({*column} - {MISSING}) for n, column in enumerate(cells)]
        object.__setattr__(self, "columns", [*compress(self.columns, measured)])
        object.__setattr__(self, "rows", [[*compress(row, measured)] for row in self.rows])

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns)]
        for name, *cells in self.rows:
            lines.append([texts.as_markdown(name), *(cell.replace("\n", "<br>") for cell in cells)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def headline_table(results: Results) -> Table:
    """Return the figures of the headline setting. The main ones, which a page shows as tiles, are marked."""
    m = results.headline
    rows = [["tau, tokens per target pass", texts.tau_text(m)]]
    if m.speedup is not None or m.baseline is not None:
        rows.append(["speedup over plain decoding", texts.speedup_cell(m)])
    if m.baseline is not None:
        rows.append(["plain tokens/s", texts.number(m.baseline.tokens_per_second, 1)])
    rows.append(["speculative tokens/s", texts.speculative_text(m)])
    if results.server:
        rows.append(["time to first token, median", texts.first_token_text(m)])
    main = len(rows)
    rows.append(["outputs as plain decoding's", texts.exact_cell(results.exact)])
    if m.baseline is not None and m.speedup is not None and why_unreliable(m) is None:
        rows.append(["speedup predicted by costs", texts.predicted_text(m)])
        rows.append(["ms of plain decoding a token", texts.number(m.baseline.ms_per_token)])
        rows.append(["ms a round", texts.number(m.speculative.ms_per_round)])
    rows.append(["mean of each prompt's tau", texts.number(m.tau.per_request)])
    rows += [[f"rounds drafted by {name}", text] for name, text in texts.draft_uses(m).items()]
    rows += [
        [f"accepted at depth {depth}", texts.percent(alpha, 1)]
        for depth, alpha in enumerate(texts.reached(m.alpha), start=1)
    ]
    rows.append(["outputs that end in a loop", texts.percent(m.loop_share)])
    return Table("Figures", [], ["", texts.setting_text(m)], rows, range(main))


def settings_table(results: Results) -> Table:
    rows = []
    for m in results.measurements:
        rows.append(
            [
                texts.setting_text(m),
                texts.speedup_cell(m),
                texts.tau_text(m),
                texts.lookup_cell(m),
                texts.number(m.baseline.tokens_per_second, 1) if m.baseline else MISSING,
                texts.speculative_text(m),
                texts.first_token_text(m) if results.server else MISSING,
                texts.predicted_text(m),
                texts.exact_cell(m.exact),
            ]
        )
    searches = [texts.sentence(search_line(search)) for search in results.auto if results.is_exact]
    turns = "Plain and speculative decoding took turns on the same prompts. " if results.headline.baseline else ""
    columns = ["draft", "speedup", "tau", "by lookup", "plain tok/s", "speculative tok/s", "first token", "predicted"]
    columns.append("exact" if results.exact.kind else "identical")
    notes = [*searches, f"{turns}{BRACKETS} {texts.left_out_text(results.headline)}".strip()]
    return Table("Settings measured", notes, columns, rows, [results.chosen])


def beside_table(results: Results, others: Sequence[Results]) -> Table:
    """Return measurements of one head here and in servers, at the settings that were measured in several places: the
    newest of each place, where `others` has the newest first. No rows if there are none."""
    places: dict[str, dict[str, tuple[Results, Measurement]]] = {}
    for part in (results, *others):
        for m in part.measurements:
            point = texts.point_text(m.batch_size or part.settings.batch_size, m.context)
            setting = f"{m.tree}, {texts.sampling_text(m.temperature)}{point}"
            places.setdefault(setting, {}).setdefault(texts.where_text(part), (part, m))
    pairs = [pair for by_place in places.values() if len(by_place) > 1 for pair in by_place.values()]
    rows = []
    for part, m in pairs:
        name = f"{texts.where_text(part)}: {texts.setting_text(m)}"
        alphas = " ".join(texts.percent(alpha, 1) for alpha in m.alpha)
        rows.append([name, texts.tau_text(m), alphas, texts.speculative_text(m), short_speedup(m)])
    same = "the same" if len({part.settings.prompts_hash for part, _ in pairs}) == 1 else "not the same"
    days = sorted({f"{texts.where_text(part)} on {part.measured_at[:10]}" for part, _ in pairs})
    note = f"The prompts are {same}. Measured {', '.join(days)}. {BRACKETS}"
    return Table("Here and in the server", [note], ["", "tau", "accepted by depth", "tokens/s", "speedup"], rows)


def latency_table(results: Results) -> Table:
    """Return the times between tokens of every setting."""
    times = {}
    for m in results.measurements if results.is_exact else ():
        if m.baseline is not None:
            times[f"plain{texts.point_of(m)}, {texts.sampling_text(m.temperature)}"] = m.baseline.token_ms
        times[texts.setting_text(m)] = m.speculative.token_ms
    rows = [[name, *map(texts.number, (at.p50, at.p95, at.p99))] for name, at in times.items()]
    note = "Milliseconds. A round's time is shared among its tokens, so rounds that accept little have slow tokens."
    return Table("Time between tokens", [note], ["", "median", "95%", "99%"], rows)


def suites_table(results: Results) -> Table:
    """Return the suites and their categories. No rows for one suite without categories."""
    suites = results.headline.suites
    rows = [
        [
            texts.short_name(name) if "/" not in name else f"\N{EN SPACE}{name.split('/', 1)[1]}",
            texts.speedup_cell(m),
            texts.tau_text(m),
            str(m.exact.prompts),
            texts.percent(m.loop_share),
        ]
        for name, m in suites.items()
        if len(suites) > 1
    ]
    note = f"{texts.setting_text(results.headline)}. Loops: outputs whose end repeats itself, which are easy to draft."
    return Table("By suite", [note], ["suite", "speedup", "tau", "prompts", "loops"], rows)


def roofline_table(record: Roofline) -> Table:
    rows = []
    for name, parts, floor_us, us in (
        ("plain", record.plain, record.plain_floor_us, record.plain_us),
        ("round", record.round, record.round_floor_us, record.round_us),
    ):
        for part in parts:
            figures = [texts.number(part.bytes / 1e6, 1), texts.number(part.floor_us, 1), texts.number(part.us, 1)]
            rows.append([f"{name}: {part.part}", *figures, texts.number(part.over_floor)])
        rows.append([f"{name}: whole", MISSING, texts.number(floor_us, 1), texts.number(us, 1), MISSING])
    now, floor = (
        f"{value:.2f}" if is_believable(value, record.tau) else NOT_RELIABLE
        for value in (record.speedup.now, record.speedup.floor)
    )
    share = record.plain_share_of_bandwidth
    notes = [
        f"Copy bandwidth {record.copy_bandwidth / 1e9:.1f} GB/s, {record.length} tokens of context, "
        f"batch {record.batch_size}, draft {record.tree}, tau {record.tau:.2f}.",
        f"Speedup now {now}, at the floor {floor}; plain decoding at {share:.0%} of the bandwidth.",
    ]
    if share > MAX_SHARE:
        notes.append(
            "Plain decoding reads faster than memory was copied: the target lies in the processor's cache, or others "
            "used the memory while it was copied; the floors say little here."
        )
    return Table("Roofline", notes, ["", "MB", "floor us", "us", "ratio"], rows)


# Several heads


@dataclass(frozen=True)
class Row:
    """A setting of one head, of several."""

    results: Results
    head: Head
    figures: Measurement

    @property
    def model(self) -> str:
        target = self.results.target
        return (target.fingerprint or target.name).partition("-")[0]

    @property
    def method(self) -> str:
        """The head's kind and name, and the server that drafted with it."""
        kind, name = self.head.kind, texts.short_name((self.head.name or self.head.path).removesuffix("/head"))
        served = f", in {self.results.server.name}" if self.results.server else ""
        return f"{name if name.startswith(kind) else f'{kind}, {name}'}{served}"

    @property
    def suites(self) -> dict[str, Measurement]:
        """The figures of each of several suites, without categories."""
        suites = {texts.short_name(name): m for name, m in self.figures.suites.items() if "/" not in name}
        return suites if len(suites) > 1 else {}


def rows_of(results: Results, *, whole: bool = False) -> list[Row]:
    """Return the fastest setting of each head at each temperature, batch size and context, or all (`whole`)."""
    measurements = results.measurements if whole else fastest(results.measurements)
    return [Row(results, results.head_of(m), m) for m in measurements]


def comparison_table(title: str, rows: Sequence[Row], *, with_suites: bool = False) -> Table:
    """Return the table of the settings of several heads. `with_suites`: with a column for each suite if there are
    several."""
    suites = list(dict.fromkeys(name for row in rows for name in row.suites)) if with_suites else []
    differs = training_differences([row.head.model_copy(update={"name": row.method}) for row in rows])
    cells = []
    for row in rows:
        m, head = row.figures, row.head
        tokens = texts.count(head.trained_tokens) if head.trained_tokens else MISSING
        cells.append(
            [
                row.method,
                texts.setting_text(m),
                texts.speedup_cell(m),
                texts.tau_text(m),
                *(suite_cell(row.suites.get(suite)) for suite in suites),
                " ".join(texts.percent(alpha) for alpha in m.alpha if alpha is not None) or MISSING,
                texts.lookup_cell(m),
                texts.exact_cell(m.exact),
                MISSING if m.draft_bytes is None else texts.number(m.draft_bytes / 1e6, 1),
                texts.count(head.parameters),
                ", ".join([tokens, *differs.get(row.method, [])]),
            ]
        )
    columns = ["head", "draft", "speedup", "tau", *suites, "accepted by depth", "by lookup", "identical", "MB a round"]
    note = f"Plain decoding and all heads of a measurement took turns on the same prompts. {BRACKETS}"
    notes = [note, *dict.fromkeys(texts.left_out_text(row.results.headline) for row in rows)]
    if suites:
        notes.append("Of each suite: tau above the speedup.")
    return Table(title, notes, [*columns, "parameters", "trained on"], cells)


def suite_cell(m: Measurement | None) -> str:
    """Return tau above the speedup."""
    if m is None:
        return MISSING
    return f"{texts.tau_text(m)}\n{MISSING if why_unreliable(m) == NO_BASELINE else short_speedup(m)}"


def short_speedup(m: Measurement) -> str:
    """Return the speedup without the reason why it is not reliable, which stands elsewhere."""
    text = texts.speedup_text(m)
    return NOT_RELIABLE if text.startswith(NOT_RELIABLE) else text
