"""Write what is generated of the pages: recipes/KEYS.md, and the tables of measurements between their marks.

    python scripts/write_pages.py

A page marks a table with `<!-- table: FORM FILES -->` and `<!-- end -->`. FORM is a key of `FORMS`; FILES is a pattern
below eval/results of files that eval/bench.py wrote. The name of a file with one head says which variant it is, after a
hyphen and up to a dot: eagle3.json, eagle3.ratio.json, eagle3-large.json.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from eval.measure.command import Parser
from eval.measure.prompts import suite_name
from eval.measure.results import Results
from eval.pages import format
from train.entry import run_script
from train.recipe import Recipe
from train.recipe_help import keys_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval/results"
PAGES = [ROOT / "README.md", RESULTS / "README.md", RESULTS / "LAB.md"]
MARK = re.compile(r"(<!-- table: (\w+) (\S+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
METHODS = {
    "eagle3": "EAGLE-3",
    "mtp": "MTP",
    "draft": "draft model",
    "medusa": "Medusa",
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "lilicorr": "LiLiCorr",
    "xpress": "XPress",
    "lookup": "prompt lookup",
    "early_exit": "early exit",
}
"""Kind of head -> its name, in the order of the tables."""
SUITES = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench", "python-heldout": "Python"}
"""Start of a suite's name -> its title."""
GREEDY, MEAN = "greedy", "mean"


class Found:
    """The figures of some records: by method, draft, way of choosing tokens, and suite."""

    def __init__(self, pattern: str) -> None:
        self.records: list[Results] = []
        self.heads: dict[str, Results] = {}
        self.figures: dict[tuple[str, str, str], dict[str, Results]] = {}
        for path in sorted(RESULTS.glob(pattern)):
            record = json.loads(path.read_text(encoding="utf-8"))
            self.records.append(record)
            variant = path.stem.partition(".")[0].partition("-")[2] if "head" in record else ""
            heads = {head.get("name"): head for head in record.get("heads") or [record["head"]]}
            suites = [suite_name(name) for name in record["settings"]["suites"]]
            parts = [(name, part | {"pooled": record}) for name, part in record.get("suites", {}).items()]
            for m in record["measurements"]:
                own = m.get("suites") or (dict.fromkeys(suites, m) if len(suites) == 1 else {})
                parts += [(name, m | part | {"pooled": m}) for name, part in own.items()]
            for name, m in ((name, m) for name, m in parts if name in suites):  # not categories
                head = heads[m.get("head")]
                method = METHODS[head["kind"]] + f", {variant}" * bool(variant)
                self.heads.setdefault(method, head)
                way = format.sampling_text(m["temperature"])
                way += ", ratio" * (m["rule"] == "ratio" and m["temperature"] > 0)
                way += ", served" * ("server" in record)
                title = next((title for start, title in SUITES.items() if name.startswith(start)), name)
                self.figures.setdefault((method, m["tree"], way), {}).setdefault(title, m)
        self.suites = list(dict.fromkeys(title for of_suites in self.figures.values() for title in of_suites))
        self.suites.sort(key=lambda title: [*SUITES.values(), title].index(title))
        self.average = MEAN if len(self.suites) > 1 else self.suites[0]
        order = list(METHODS.values())
        rows = dict.fromkeys((method, draft) for method, draft, _ in self.figures)
        self.rows = sorted(rows, key=lambda row: (order.index(row[0].partition(",")[0]), row[0]))

    @property
    def longest(self) -> list[tuple[str, str]]:
        """The rows without those of a chain that is shorter than another of the same method."""
        chains: dict[str, int] = {}
        for method, draft in self.rows:
            if draft.startswith("chain:"):
                chains[method] = max(chains.get(method, 0), chain_length(draft))
        return [row for row in self.rows if chain_length(row[1]) in (0, chains.get(row[0]))]

    def tau(self, row: tuple[str, str], suite: str, way: str) -> str:
        """Return tau on a suite, with its interval, or under `MEAN` the mean of all suites."""
        of_suites = self.figures.get((*row, way), {})
        if suite == MEAN and of_suites.keys() == {*self.suites}:
            return format.number(fmean(m["tau"]["mean"] for m in of_suites.values()))
        return format.tau_text(of_suites[suite]) if suite in of_suites else format.MISSING

    def speedup(self, row: tuple[str, str]) -> str:
        """Return the greedy speedup over all prompts."""
        of_suites = self.figures.get((*row, GREEDY))
        return format.speedup_cell(next(iter(of_suites.values()))["pooled"]) if of_suites else format.MISSING

    def caption(self) -> str:
        """Return the sentence below a table: how many prompts, where, and how many outputs were the target's own."""
        settings = [record["settings"] for record in self.records]
        commits = sorted({record["versions"]["draftsmith"][:7] for record in self.records})
        here = [record for record in self.records if "server" not in record]
        exact = [record["exact"] for record in here if record["exact"]["identical"] is not None]
        counts = [sum(part[key] for part in exact) for key in ("identical", "prompts")]
        near = sum(len(part.get("near_ties", ())) for part in exact)
        ranges = [sorted({own[key] for own in settings}) for key in ("num_prompts", "max_new_tokens")]
        sizes = [f"{found[0]:,} to {found[-1]:,}" if len(found) > 1 else f"{found[0]:,}" for found in ranges]
        return (
            f"{sizes[0]} prompts of {', '.join(self.suites)}, {sizes[1]} new tokens; "
            f"{'; '.join(sorted(set(map(format.device_text, here))))}; commit {', '.join(commits)}; 95% intervals. "
            f"Identical to plain decoding: {counts[0]:,} of {counts[1]:,} outputs"
            f"{f', {near} of them but for near-ties' if near else ''}."
        )


def chain_length(draft: str) -> int:
    return int(draft.removeprefix("chain:")) if draft.startswith("chain:") else 0


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without the columns in which nothing was measured."""
    kept = [n for n in range(len(columns)) if any(row[n] != format.MISSING for row in rows)]
    lines = [[cells[n] for n in kept] for cells in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def first_table(pattern: str) -> str:
    """Return each method's longest chain, without intervals of tau."""
    found = Found(pattern)
    columns = ["method", "draft", *(f"tau, {suite}" for suite in found.suites), f"tau, {found.average}, T = 1"]
    rows = []
    for row in filter(lambda row: chain_length(row[1]), found.longest):
        taus = [found.tau(row, suite, GREEDY) for suite in found.suites] + [found.tau(row, found.average, "T = 1")]
        rows.append([*row, *(tau.partition(" ")[0] for tau in taus), found.speedup(row)])
    return f"{markdown([*columns, 'speedup'], rows)}\n\n{found.caption()}"


def all_table(pattern: str, *, speeds: bool = True) -> str:
    """Return every draft of every method; without speedups, of chains the longest."""
    found = Found(pattern)
    cells = [(suite, GREEDY) for suite in found.suites if found.average == MEAN]
    cells += [(found.average, way) for way in (GREEDY, "T = 1", "T = 1, ratio", "greedy, served", "T = 1, served")]
    columns = ["method", "draft", *(f"tau, {suite}, {way}" for suite, way in cells)]
    drafts = found.rows if speeds else found.longest
    rows = [[*row, *(found.tau(row, *cell) for cell in cells), *[found.speedup(row)] * speeds] for row in drafts]
    return f"{markdown(columns + ['speedup, greedy'] * speeds, rows)}\n\n{found.caption()}"


def cost_table(pattern: str) -> str:
    """Return the size of each method's head, how long its rounds take, and on how many tokens it was trained."""
    found = Found(pattern)
    rows = []
    for method, draft in found.longest:
        if figures := found.figures.get((method, draft, GREEDY)):
            first, head = next(iter(figures.values())), found.heads[method]
            read, tokens = first.get("draft_bytes"), head.get("budget_tokens")
            took = first["speculative"]["round_ms"]["median"] / first["baseline"]["step_ms"]["median"]
            sizes = [format.count(head["parameters"]), format.number(read and read / 1e6, 1), format.number(took)]
            rows.append([method, draft, *sizes, format.count(tokens) if tokens else format.MISSING])
    columns = ["method", "draft", "parameters", "MB read a round", "a round, in plain steps", "training tokens"]
    return markdown(columns, rows)


def engine_table(pattern: str) -> str:
    """Return the heads that vLLM ran, and what it accepted, which is what was accepted here."""
    (path,) = RESULTS.glob(pattern)
    rows = []
    for found in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        theirs, ours = (found["accepted_by_position"][who] for who in ("vllm", "draftsmith"))
        assert theirs == ours and len(set(found["rounds"].values())) == 1 and found["identical"] == found["prompts"]
        counts = ", ".join(f"{count:,}" for count in ours)
        rows.append([found["family"], str(found["depth"]), f"{found['rounds']['vllm']:,}", counts])
    return markdown(["head", "K", "rounds", "accepted by position"], rows)


FORMS: dict[str, Callable[[str], str]] = {
    "first": first_table,
    "all": all_table,
    "tau": lambda pattern: all_table(pattern, speeds=False),
    "costs": cost_table,
    "engine": engine_table,
}


def pages() -> dict[Path, str]:
    """Return the pages with all that is generated of them."""

    def fill(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{FORMS[mark[2]](mark[3])}\n\n"

    texts = {page: MARK.sub(fill, page.read_text(encoding="utf-8")) for page in PAGES}
    return {**texts, ROOT / "recipes/KEYS.md": keys_page(Recipe)}


def main(arguments: Sequence[str]) -> int:
    Parser("Write KEYS.md and the tables of measurements in pages.").parse_args(arguments)
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_script(main)
