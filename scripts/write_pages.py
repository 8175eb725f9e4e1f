"""Write what is generated of the pages: recipes/KEYS.md, the tables of measurements between their marks, the picture
of README, and that of ARCHITECTURE.md.

    python scripts/write_pages.py

A page marks a table, or the picture, with `<!-- table: FORM FILES -->` and `<!-- end -->`. FORM is a key of `FORMS`;
FILES is a pattern below eval/results of files that eval/bench.py wrote, or a training run; `trainers` also reads the
training.json beside its file. The name of a file with one head says which variant it is, after a hyphen and up to a
dot: eagle3.json, eagle3.ratio.json, eagle3-large.json.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser
from eval.data.prompts import suite_name
from eval.pages import texts
from eval.pages.report_tables import Table
from eval.records.figures_schema import Measurement
from eval.records.head_schema import Head, Point
from eval.records.results import read_results
from eval.records.schema import Results
from heads.methods.method_settings import TITLES
from scripts import draw_rooms
from train.entry import run_script
from train.recipe.recipe import Recipe
from train.recipe.recipe_help import keys_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from eval.pages.drawing import Chart

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval/results"
PAGES = [ROOT / "README.md", RESULTS / "README.md", RESULTS / "LAB.md"]
PICTURE = RESULTS / "curve.svg"
CURVES = "smollm2-long/*.json"
"""The records that the picture shows."""
MARK = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
DRAFTS = TITLES | {f"lookup+{kind}": f"prompt lookup or {title}" for kind, title in TITLES.items()}
"""Kind of draft -> its title, in the order of the tables."""
SUITES = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench", "python-heldout": "Python"}
"""Start of a suite's name -> its title."""
GREEDY, SAMPLED, MEAN = "greedy", "T = 1", "mean"


class Records:
    """The figures of some records: by method, draft and way of choosing tokens, over all prompts and by suite."""

    def __init__(self, pattern: str) -> None:
        self.records: list[Results] = []
        self.heads: dict[str, Head] = {}
        self.pooled: dict[tuple[str, str, str], Measurement] = {}
        self.by_suite: dict[tuple[str, str, str], dict[str, Measurement]] = {}
        for path in sorted(RESULTS.glob(pattern)):
            record = read_results(path)
            self.records.append(record)
            variant = "" if record.is_comparison else path.stem.partition(".")[0].partition("-")[2]
            suites = [suite_name(name) for name in record.settings.suites]
            for m in record.measurements:
                head = record.head_of(m)
                method = DRAFTS[head.kind] + f", {variant}" * bool(variant)
                self.heads.setdefault(method, head)
                way = texts.sampling_text(m.temperature)
                way += ", ratio" * (m.rule == "ratio" and m.temperature > 0) + ", served" * (record.server is not None)
                parts = dict.fromkeys(suites, m) if len(suites) == 1 else m.suites
                for name in (name for name in parts if name in suites):  # not categories
                    self.pooled.setdefault((method, m.tree, way), m)
                    self.by_suite.setdefault((method, m.tree, way), {}).setdefault(suite_title(name), parts[name])
        self.suites = list(dict.fromkeys(title for parts in self.by_suite.values() for title in parts))
        self.suites.sort(key=lambda title: [*SUITES.values(), title].index(title))
        self.average = MEAN if len(self.suites) > 1 else self.suites[0]
        order = list(DRAFTS.values())
        rows = dict.fromkeys((method, draft) for method, draft, _ in self.pooled)
        self.rows = sorted(rows, key=lambda row: (order.index(row[0].partition(",")[0]), row[0]))

    @property
    def longest(self) -> list[tuple[str, str]]:
        """The rows without those of a chain that is shorter than another of the same method."""
        chains: dict[str, int] = {}
        for method, draft in self.rows:
            chains[method] = max(chains.get(method, 0), chain_length(draft))
        return [row for row in self.rows if chain_length(row[1]) in (0, chains[row[0]])]

    def tau(self, row: tuple[str, str], suite: str, way: str) -> str:
        """Return tau on a suite, with its interval, or under `MEAN` the mean of all suites."""
        parts = self.by_suite.get((*row, way), {})
        if suite == MEAN and parts.keys() == {*self.suites}:
            return texts.number(fmean(m.tau.mean for m in parts.values()))
        return texts.tau_text(parts[suite]) if suite in parts else texts.MISSING

    def speedup(self, row: tuple[str, str], way: str = GREEDY) -> str:
        """Return the speedup over all prompts."""
        pooled = self.pooled.get((*row, way))
        return texts.speedup_cell(pooled) if pooled else texts.MISSING

    def caption(self) -> str:
        """Return the sentence below a table: how many prompts, where, and how many outputs were the target's own."""
        prompts = number_range(record.settings.num_prompts for record in self.records)
        tokens = number_range(record.settings.max_new_tokens for record in self.records)
        commits = sorted({record.versions["draftsmith"][:7] for record in self.records})
        here = [record for record in self.records if record.server is None]
        exact = [record.exact for record in here if record.exact.identical is not None]
        near = sum(len(part.near_ties) for part in exact)
        return (
            f"{prompts} prompts of {', '.join(self.suites)}, {tokens} new tokens; "
            f"{'; '.join(sorted(set(map(texts.device_text, here))))}; commit {', '.join(commits)}; 95% intervals. "
            f"Identical to plain decoding: {sum(part.identical or 0 for part in exact):,} of "
            f"{sum(part.prompts for part in exact):,} outputs{f', {near} of them but for near-ties' if near else ''}."
        )


def suite_title(name: str) -> str:
    return next((title for start, title in SUITES.items() if name.startswith(start)), name)


def number_range(numbers: Iterable[int]) -> str:
    least, *others = sorted(set(numbers))
    return f"{least:,} to {others[-1]:,}" if others else f"{least:,}"


def chain_length(draft: str) -> int:
    return int(draft.removeprefix("chain:")) if draft.startswith("chain:") else 0


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table("", [], columns, rows).markdown()


def first_table(pattern: str) -> str:
    """Return each method's fastest greedy chain, without intervals of tau."""
    records = Records(pattern)
    pooled = {row: records.pooled[*row, GREEDY] for row in records.rows if (*row, GREEDY) in records.pooled}
    speeds = {row: m.speedup.measured for row, m in pooled.items() if chain_length(row[1]) and m.speedup}
    fastest = {method: (method, draft) for method, draft in sorted(speeds, key=lambda row: speeds[row])}
    cells = [*((suite, GREEDY) for suite in records.suites), (records.average, SAMPLED)]
    columns = ["method", "draft", *(f"tau, {suite}" for suite in records.suites), f"tau, {records.average}, {SAMPLED}"]
    rows = []
    for row in records.rows:
        if row in fastest.values():
            taus = [records.tau(row, *cell).partition(" ")[0] for cell in cells]
            rows.append([*row, *taus, records.speedup(row), records.speedup(row, SAMPLED)])
    return f"{markdown([*columns, 'speedup', f'speedup, {SAMPLED}'], rows)}\n\n{records.caption()}"


def all_table(pattern: str, *, speeds: bool = True) -> str:
    """Return every draft of every method; without speedups, of chains the longest."""
    records = Records(pattern)
    cells = [(suite, GREEDY) for suite in records.suites if records.average == MEAN]
    cells += [
        (records.average, way) for way in (GREEDY, SAMPLED, f"{SAMPLED}, ratio", "greedy, served", "T = 1, served")
    ]
    columns = ["method", "draft", *(f"tau, {suite}, {way}" for suite, way in cells)]
    drafts = records.rows if speeds else records.longest
    rows = []
    for row in drafts:
        taus = [records.tau(row, *cell) for cell in cells]
        rows.append([*row, *taus, *(records.speedup(row, way) for way in (GREEDY, SAMPLED) if speeds)])
    columns += [f"speedup, {way}" for way in (GREEDY, SAMPLED) if speeds]
    return f"{markdown(columns, rows)}\n\n{records.caption()}"


def cost_table(pattern: str) -> str:
    """Return the size of each method's head, how long its rounds take, and on how many tokens it was trained."""
    records = Records(pattern)
    rows = []
    for method, draft in records.longest:
        m = next(iter(records.by_suite.get((method, draft, GREEDY), {}).values()), None)
        if m is None or m.baseline is None:
            continue
        head = records.heads[method]
        took = m.speculative.round_ms.median / m.baseline.step_ms.median
        read = texts.MISSING if m.draft_bytes is None else texts.number(m.draft_bytes / 1e6, 1)
        tokens = texts.count(head.budget_tokens) if head.budget_tokens else texts.MISSING
        rows.append([method, draft, texts.count(head.parameters), read, texts.number(took), tokens])
    columns = ["method", "draft", "parameters", "MB read a round", "a round, in plain steps", "training tokens"]
    return markdown(columns, rows)


def engine_table(pattern: str) -> str:
    """Return the heads that vLLM ran, and what it accepted, which is what was accepted here."""
    (path,) = RESULTS.glob(pattern)
    rows = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        theirs, ours = (row["accepted_by_position"][who] for who in ("vllm", "draftsmith"))
        assert theirs == ours and len(set(row["rounds"].values())) == 1 and row["identical"] == row["prompts"]
        counts = ", ".join(f"{count:,}" for count in ours)
        rows.append([row["family"], str(row["depth"]), f"{row['rounds']['vllm']:,}", counts])
    return markdown(["head", "K", "rounds", "accepted by position"], rows)


def printed_table(pattern: str) -> str:
    """Return the last of each draft's printed commands, and tau where it was measured and where it was typed."""
    (path,) = RESULTS.glob(pattern)
    rows = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        command = [line for line in row["command"].splitlines() if not line.startswith("#")][-1]
        taus = (texts.number(row[f"tau_{where}"]) for where in ("here", "there"))
        rows.append([row["draft"], row["engine"], f"`{command}`", *taus, f"{row['texts_equal']} of {row['texts']}"])
    return markdown(["draft", "engine", "printed command", "tau here", "tau there", "equal texts"], rows)


def parity_table(pattern: str) -> str:
    """Return what each kind of head did in each engine that ran it whole, and here."""
    (path,) = RESULTS.glob(pattern)
    rows = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        equal = f"{row['texts_equal']} of {row['texts']}"
        rows.append([row["draft"], row["engine"], equal, row["here"], row["there"]])
    return markdown(["head", "engine", "equal texts", "counts here", "counts there"], rows)


def speed_table(pattern: str) -> str:
    """Return the speeds of engines beside this runtime's, and how many drafted texts are those of plain decoding."""
    (path,) = RESULTS.glob(pattern)
    columns = ["weights, engine", "draft", "tokens/s", "bound", "tau", "over its plain", "as its plain", "as ours"]
    rows = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        draft = f"chain:{row['draft_tokens']}" if row["draft_tokens"] else "none"
        numbers = (texts.number(row[name], 1) for name in ("tokens_per_second", "bound_tokens_per_second"))
        equal = (f"{row[f'equal_to_{which}']} of {row['texts']}" for which in ("plain", "float32"))
        engine = row["engine"].replace("draftsmith", "this runtime")
        ratio = texts.with_interval(row["over_plain"], row["over_plain_interval"])
        rows.append([f"{row['weights']}, {engine}", draft, *numbers, texts.number(row["tau"]), ratio, *equal])
    return markdown(columns, rows)


def trainer_table(pattern: str) -> str:
    """Return heads that the code of several projects trained from the same rows, with the time that each took."""
    (path,) = RESULTS.glob(pattern)
    record = read_results(path)
    runs = json.loads(path.with_name("training.json").read_text(encoding="utf-8"))
    suites = [suite_name(name) for name in record.settings.suites]
    rows = []
    for m in record.measurements:
        run = runs[record.head_of(m).name]
        about = [run["trainer"], run["settings"], str(run["seed"]), texts.number(run["cpu_minutes"], 1)]
        rows.append([*about, *(texts.number(m.suites[suite].tau.mean) for suite in suites), texts.tau_text(m)])
    taus = [f"tau, {suite_title(suite)}" for suite in suites]
    return markdown(["trainer", "settings", "seed", "CPU minutes", *taus, "tau, all"], rows)


def curve_chart(pattern: str) -> "Chart":
    """Return the learning curves of heads above tau of prompt lookup, which was measured beside them."""
    from eval.pages.drawing import COLOURS, Chart
    from eval.pages.training_charts import draw_lines, line_of

    records = [read_results(path) for path in sorted(RESULTS.glob(pattern))]
    runs: dict[str, list[Point]] = {}  # of several runs of a method that of the last file
    for record in records:
        runs |= {DRAFTS[head.kind]: head.curve for head in record.heads if head.curve}
    lookups = (m for record in records for m in record.measurements if record.head_of(m).kind == "lookup")
    level = next(lookups).tau.mean
    ends = {method: (points[0], points[-1]) for method, points in runs.items()}
    said = [
        f"{method}, {first.tau:.2f} at {texts.count(first.tokens)}, {last.tau:.2f} at {texts.count(last.tokens)}"
        for method, (first, last) in ends.items()
    ]

    def draw(axes: "Axes") -> None:
        draw_lines(axes, series={method: line_of(points) for method, points in runs.items()})
        axes.axhline(level, color=COLOURS["verify"], ls="--", lw=1.8)
        place = axes.get_yaxis_transform()
        axes.text(0.01, level, " prompt lookup, no training", transform=place, color=COLOURS["verify"], va="bottom")
        axes.set_ylabel(f"tau of {' and '.join(runs)}")

    note = f"{'; '.join(said)}; prompt lookup, {level:.2f}"
    return Chart(PICTURE.stem, "tau over training tokens", note, draw)


def curve_picture(pattern: str) -> str:
    """Return the element of README that shows the picture, which says its figures to those who do not see it."""
    chart = curve_chart(pattern)
    return f'<img src="{PICTURE.relative_to(ROOT)}" width="460" alt="{chart.title}. {chart.note}">'


FORMS: dict[str, Callable[[str], str]] = {
    "first": first_table,
    "all": all_table,
    "tau": lambda pattern: all_table(pattern, speeds=False),
    "costs": cost_table,
    "engine": engine_table,
    "printed": printed_table,
    "parity": parity_table,
    "speed": speed_table,
    "trainers": trainer_table,
    "curve": curve_picture,
}


def pages() -> dict[Path, str]:
    """Return the pages with all that is generated of them."""

    def fill(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{FORMS[mark[2]](mark[3])}\n\n"

    texts = {page: MARK.sub(fill, page.read_text(encoding="utf-8")) for page in PAGES}
    return {**texts, ROOT / "recipes/KEYS.md": keys_page(Recipe)}


def main(arguments: Sequence[str]) -> int:
    Parser("Write KEYS.md, the tables of measurements in pages, and the pictures.").parse_args(arguments)
    from eval.pages.drawing import svg_file
    from eval.pages.html import DARK

    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
    PICTURE.write_text(svg_file(curve_chart(CURVES), DARK), encoding="utf-8")
    draw_rooms.PICTURE.write_text(draw_rooms.picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_script(main)
