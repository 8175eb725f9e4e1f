"""The pages: what they show, that they ask for nothing from the net, and that no text of a file becomes markup."""

import base64
import copy
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval import report
from eval.core.command_line import exit_status
from eval.pages.html import render_page, render_several, tone
from eval.records.schema import Results
from tests.eval.conftest import Bench
from tests.support.annotations import Capture
from tests.support.curves import learning_curve

ROOT = Path(__file__).resolve().parents[3]
NASTY = "</span></pre><script>alert(1)</script><img src=https://x.org/y>"


def check_alone(page: str, scripts: int) -> None:
    """Check that a page asks for nothing, and that its script is the one that its policy names."""
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["']?(?!["']?#)|url\((?!#)|@import""", page.replace("&lt;", ""))
    found = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert page.count("<script") == len(found) == scripts
    for script in found:
        named = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{named}'" in page


@pytest.mark.usefixtures("lenient_limits")
def test_both_texts_appear_at_their_measured_pace(results: dict[str, Any]) -> None:
    for sample in results["samples"]:
        texts = ["".join(piece["text"] for piece in side["pieces"]) for side in (sample, sample["plain"])]
        assert texts[0] == texts[1] == sample["output"]
        assert len(sample["round_ms"]) == sample["rounds"] and min(sample["round_ms"]) > 0
        assert len(sample["plain"]["round_ms"]) == len(sample["plain"]["pieces"]) - 1
    page = render_page(Results.model_validate(results), [], None)
    check_alone(page, scripts=1)
    shown = sorted(results["samples"], key=lambda s: abs(s["tau"] - results["tau"]["mean"]))[0]
    for name, side in (("Plain", shown["plain"]), ("Drafted", shown)):
        (text,) = re.findall(rf"<h3>{name} <output>(.*?)</div>", page, re.DOTALL)[:1]
        ends = list(map(float, re.findall(r'data-ends="([\d.]+)"', text)))
        assert ends == sorted(ends) and len(ends) == len(side["round_ms"]) + 1
        assert ends[-1] == pytest.approx(sum(side["round_ms"]), abs=0.1)
        assert sum(map(int, re.findall(r'data-tokens="(\d+)"', text))) == len(side["pieces"])
        assert text.startswith(f"{len(side['pieces'])} tokens, {sum(side['round_ms']) / 1e3:.2f} s")


def test_without_times_or_samples_nothing_is_replayed(results: dict[str, Any], failed_results: dict[str, Any]) -> None:
    without = copy.deepcopy(results)
    for sample in without["samples"]:
        del sample["round_ms"], sample["plain"]
    for given in (without, {**results, "samples": []}, failed_results):
        page = render_page(Results.model_validate(given), [], None)
        check_alone(page, scripts=0)
        assert ("More samples" in page) == bool(given["samples"]) and "data-ends" not in page


def test_texts_are_no_markup(results: dict[str, Any]) -> None:
    sample = results["samples"][0]
    sample["prompt"] = sample["pieces"][0]["text"] = sample["plain"]["pieces"][0]["text"] = NASTY
    results["target"]["name"] = results["command"][0] = NASTY.replace("/", "")
    measured = Results.model_validate(results)
    for page in (render_page(measured, [], None), render_several([measured, measured])):
        assert "alert(1)" in page and "<img" not in page and "<script>alert" not in page
        assert page.count("<script") == page.count("</script>") <= 1


@pytest.mark.usefixtures("lenient_limits")
def test_several_results_are_one_page(
    results: dict[str, Any], tmp_path: Path, bench: Bench, pair_head: Any, capsys: Capture
) -> None:
    out, target = tmp_path / "both", tmp_path / "a"
    target.mkdir()
    bench(out, {"pairs": pair_head, "again": copy.copy(pair_head)}, trees=("chain:2",))
    results["head"] |= {"trained_tokens": 442681, "parameters": 12345, "path": "/runs/mine/head"}
    results["settings"]["suites"] = ["code", "other"]
    for m in results["measurements"]:
        m["suites"]["other"] = {**m["suites"]["code"], "tau": {"mean": 1.987, "ci95": None}}
    results["settings"]["prompts_hash"] = "another"
    results["head"]["curve"] = learning_curve(lambda share: 1.5 + share / 4, count=3)
    (target / "results.json").write_text(json.dumps(results))
    given = [str(out / "compare.json"), str(target)]
    assert exit_status(lambda: report.main([*given, "--out", str(tmp_path / "page")])) == 0
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["report.html"]
    page = (tmp_path / "page/report.html").read_text()
    check_alone(page, scripts=0)
    columns = re.findall(r'<th scope="col">(.*?)</th>', page)[:11]
    expected = "head,draft,speedup,tau,code,other,accepted by depth,identical,MB a round,parameters,trained on"
    assert columns == expected.split(",")
    rows = re.findall(r"<tr><td>(.*?)</tr>", page, re.DOTALL)
    mine = [row for row in rows if row.startswith("pairs, mine<")]
    assert len(mine) == 2 and all("1.99\n" in row and "<td>12.3k</td><td>442.7k</td>" in row for row in mine)
    assert "greedy" in mine[0] and "T = 1" in mine[1] and all("4 of 4" in row for row in mine)
    assert any(row.startswith(("pairs<", "pairs, again<")) for row in rows)
    assert "different prompts" in page and page.count("<svg") == 2
    assert "<h2>tau over training tokens</h2>" in page and "<h2>Acceptance by depth over training tokens</h2>" in page
    capsys.readouterr()
    assert exit_status(lambda: report.main([str(target), "--out", str(tmp_path)])) == 2
    assert "--out: is of several" in capsys.readouterr().err


def test_verdicts_of_several_targets_stand_with_their_names_and_colours(results: dict[str, Any]) -> None:
    other = copy.deepcopy(results)
    other["target"] |= {"name": "org/other", "fingerprint": "other"}
    page = render_several([Results.model_validate(each) for each in (results, other)])
    blocks = re.findall(r'<section class="model"><h2>(.*?)</h2>\s*<p class="box (\w+)">', page)
    assert len({name for name, _ in blocks}) == 2 and {tone for _, tone in blocks} <= {"good", "warn", "plain"}
    lines = "a chain:3 pays, in this runtime only: 2x", "a may pay: 1x", "whether a draft pays is not decided"
    assert [*map(tone, (*lines, "no draft pays"))] == ["good", "warn", "warn", "plain"]


def test_a_run_that_is_not_measured_yet_is_a_page_of_its_curves(tmp_path: Path, capsys: Capture) -> None:
    losses = [{"kind": "train", "step": step, "loss": 9 / step} for step in range(100, 700, 100)]
    lines = [*losses, *learning_curve(lambda share: 1.5 + share)[:-3]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.main([str(tmp_path)]) == 0
    page, said = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    check_alone(page, scripts=0)
    assert all(f"<h2>{title}</h2>" in page for title in ("tau over training tokens", "Training loss"))
    for text in (page, said):
        assert "600 steps, no final measurement yet" in text and "tau 1.75 [1.65, 1.85] after 250,000 training" in text


def test_a_report_imports_no_model_code(tmp_path: Path) -> None:
    shutil.copy(ROOT / "eval/results/quickstart/eagle3.json", tmp_path / "results.json")
    program = (
        "import sys; from eval import report\n"
        "status = report.main(sys.argv[1:])\n"
        "heavy = [name for name in sys.modules if name.startswith(('torch.', 'heads.methods', 'heads.formats'))]\n"
        "sys.exit(str(heavy) if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "chain:3 pays: 1.41x [1.25, 1.58] on 16 prompts, greedy" in done.stdout
