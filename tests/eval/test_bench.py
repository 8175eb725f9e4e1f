"""The bench as a function: its results.json, its report, and what it withholds."""

import copy
import json
import math
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt
from markupsafe import escape
from rich.console import Console
from transformers import GenerationConfig

from eval.bench import default_out, main, parse_arguments
from eval.core.command_line import exit_status
from eval.measure.bench_heads import bench_heads
from eval.measure.compare import Variant
from eval.pages.card import model_card
from eval.pages.report_tables import settings_table
from eval.pages.run_report import print_report, save_and_print, write_report
from eval.pages.texts import audit_line, heading, setting_line, subtitle
from eval.pages.verdicts import serve_command, verdicts, verdicts_on, warnings
from eval.records.draft_schedule import ABOVE, draft_schedule
from eval.records.figures_schema import Measurement
from eval.records.measure_settings import SAMPLED, BenchSettings, served_sampling, to_settings
from eval.records.results import read_results
from eval.records.schema import Results
from eval.records.speedup_checks import why_unreliable
from eval.runtime.sampling_params import Sampling
from heads.methods.two_drafts import LookupFirst
from heads.targets.frozen_target import FrozenTarget
from tests.eval.conftest import Bench, Measured, altered
from tests.support.annotations import Patch
from tests.support.curves import learning_curve
from tests.support.measurements import measurement, results_of
from tests.support.refusals import refused


def test_a_run_leaves_results_plots_page_and_card(measured: Measured) -> None:
    results, text, out = measured
    read = json.loads((out / "results.json").read_text())
    assert read["exact"] == {"prompts": 16, "identical": 16, "divergences": []}
    assert "output identical to plain decoding: 16 of 16 prompts (4 prompts x 4 settings)" in text
    assert len(read["measurements"]) == 4 and set(read["suites"]) == {"code", "code/def", "code/import"}
    assert all(m["suites"].keys() == read["suites"].keys() for m in read["measurements"])
    assert read["speedup"]["measured"] > 0 and read["speedup"]["predicted"] > 0 and read["temperature"] == 0
    page = (out / "report.html").read_text()
    assert "16 of 16 prompts" in page and "## Measured" in (out / "README.md").read_text()
    names = {"acceptance"}  # drafts of one depth are no curve
    names |= {"round"} if why_unreliable(read_results(out / "results.json").headline) is None else set()
    assert {file.name for file in (out / "plots").iterdir()} == {f"{n}.{e}" for n in names for e in ("png", "svg")}
    assert page.count("<svg ") == len(names)
    assert results["settings"]["num_prompts"] == 4  # the second turn follows the target's own answer
    assert setting_line(Results.model_validate(results)).startswith("3 conversations, 4 turns of code.jsonl, ")


def test_a_measurement_that_cannot_be_saved_is_shown(
    tmp_path: Path, tiny_target: FrozenTarget, tiny_tokenizer: Any, pair_head: Any, prompt_file: Path
) -> None:
    (tmp_path / "full").touch()
    console, settings = Console(record=True, width=180), BenchSettings(prompts=str(prompt_file), repeats=1)
    results = bench_heads(tiny_target, {"x": pair_head}, tiny_tokenizer, settings)
    assert "could not be written" in refused(save_and_print, results, tmp_path / "full/out", console)
    assert "tau, tokens per target pass" in console.export_text()


def test_a_rule_that_is_exact_in_distribution_is_reported_as_such(tmp_path: Path, bench: Bench) -> None:
    _, text = bench(tmp_path, trees=("static:2.1",), temperatures=(1.0, 0.0), rule="ratio")
    read = json.loads((tmp_path / "results.json").read_text())
    sampled, greedy = read["measurements"]
    assert read["rule"] == sampled["rule"] == greedy["rule"] == "ratio"
    drawn = {"kind": "distribution", "prompts": 4, "identical": None, "divergences": []}
    assert sampled["exact"] == drawn | {"greedy": {"prompts": 4, "identical": 4}}
    assert greedy["exact"] == {"prompts": 4, "identical": 4, "divergences": []}
    assert read["exact"] == drawn | {"prompts": 8, "greedy": {"prompts": 8, "identical": 8}}
    page, card = (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()
    for shown in (" ".join(text.split()), page.replace("&#39;", "'").lower(), card.lower()):
        assert "exact in distribution under rule ratio" in shown and "own tokens: 8 of 8 prompts" in shown
        assert "identical" not in shown
    assert read["speedup"] is not None


@pytest.mark.usefixtures("lenient_limits")
def test_auto_records_what_it_measured_and_its_choice(tmp_path: Path, bench: Bench, pair_head: Any) -> None:
    results, text = bench(tmp_path, altered(pair_head, deepest=2), trees=("auto", "static:2.1"))
    (search,) = json.loads((tmp_path / "results.json").read_text())["auto"]
    assert search["proposed"] == ["chain:1", "chain:2", "tree:2x2x7"]
    measured = {m["tree"]: m["speedup"]["measured"] for m in results["measurements"]}
    assert search["measured"] == measured and measured.keys() == {"static:2.1", *search["proposed"]}
    assert (results["tree"], results["speedup"]["measured"]) == (search["chosen"], measured[search["chosen"]])
    verdict = f"{search['chosen']} is {'next' if search['plain_is_faster'] else 'chosen'}"
    assert verdict in text and verdict in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("lenient_limits")
def test_a_search_also_finds_the_match_from_which_a_lookup_drafts(tmp_path: Path, bench: Bench, pair_head: Any) -> None:
    head = LookupFirst(3, altered(pair_head, deepest=2))
    results, text = bench(tmp_path, {"lookup:3+runs/x/head": head}, trees=("auto",), max_new_tokens=40)
    (search,) = results["auto"]
    looks = {look["least_match"]: look["speedup"] for look in search["matches"]}
    best = max(looks, key=lambda match: looks[match])
    assert [*looks] == [1, 2, 3, 4, 6] and results["head"]["kind"] == "lookup+pairs"
    for m in results["measurements"]:
        assert m["least_match"] == best and m["exact"]["identical"] == m["exact"]["prompts"]
        used, parts = m["lookup"], [suite["lookup"] for suite in m["suites"].values()]
        assert used["rounds"] == parts[0]["rounds"] < sum(m["accepted_histogram"])
        assert min(used["accepted"], used["rounds"]) > 0 or best > 2  # the clock chooses it, and few matches are long
        assert used["accepted"] <= sum(n * count for n, count in enumerate(m["accepted_histogram"]))
        assert m["speedup"]["predicted"] > 0
    said = f"at a lookup after matches of 1, 2, 3, 4, 6 tokens, of which {best} was the fastest"
    shown = f"rounds drafted by the lookup, after matches of {best}"
    for page in (text, (tmp_path / "report.html").read_text()):
        assert said in page and shown in page
    assert f"{results['lookup']['rounds']} of {sum(results['accepted_histogram'])}" in text


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("tree", ["chain:2,chain:1", "auto"])
def test_an_interrupted_measurement_goes_on(
    tree: str, tmp_path: Path, tiny_target_dir: Path, prompt_file: Path, monkeypatch: Patch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    run, made, most = Variant.run, 0, math.inf

    def counted(*arguments: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            signal.raise_signal(signal.SIGTERM if tree == "auto" else signal.SIGINT)
        run(*arguments)

    monkeypatch.setattr(Variant, "run", counted)
    command = ["lookup:2", "--target", str(tiny_target_dir), "--prompts", str(prompt_file), "--tree", tree]
    command += ["--max-new-tokens", "12", "--repeats", "2"]
    totals, folders = [], list[Path]()
    for most in (math.inf, 20, math.inf):
        made = 0
        status = exit_status(lambda: main(command))
        totals.append(made)
        said = capsys.readouterr().err
        assert status == (130 if most == 20 else 0), said
        folders.append(next(folder for folder in Path("runs").glob("*/*") if folder not in folders[:1]))
    whole, _, rest = totals
    assert whole - 20 <= rest < whole - 8 and "going on with the measurement that was interrupted" in said
    assert folders[1] == folders[2] and not list(folders[1].glob("unfinished*"))
    first, second = (read_results(folder / "results.json") for folder in (folders[0], folders[2]))
    assert second.exact == first.exact and second.is_exact
    assert tree == "auto" or [m.tau for m in second.measurements] == [m.tau for m in first.measurements]


def test_the_model_samples_as_its_server_does(
    tmp_path: Path, bench: Bench, tiny_target: FrozenTarget, monkeypatch: Any, capsys: Any, caplog: Any
) -> None:
    asked: Any = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    config = GenerationConfig(**asked, no_repeat_ngram_size=3)
    monkeypatch.setattr(tiny_target.model, "generation_config", config)
    results, _ = bench(tmp_path, trees=("chain:2",), sampling="model")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sampling of ")]
    assert line.endswith("temperature 0.6, top_k 20, top_p 0.95, min_p 0, repetition_penalty 1.05")
    (left,) = [line for line in caplog.messages if "generation_config.json asks for" in line]
    assert left.endswith("no_repeat_ngram_size 3: not applied here")
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert [settings[name] for name in SAMPLED] == [[0.6], 20, 0.95, 0.0, 1.05] and settings["sampling"] == "model"
    assert results["temperature"] == 0.6
    assert "top-p 0.95, repetition penalty 1.05, batch" in setting_line(Results.model_validate(results))
    again = to_settings(parse_arguments(results["command"][2:]))
    assert again.sampling_at(0.6) == Sampling(**asked) and again.temperatures == (0.6,)
    monkeypatch.setattr(tiny_target.model, "generation_config", GenerationConfig(top_k=-1))
    assert served_sampling(tiny_target) == Sampling(temperature=1.0)


def test_tokens_that_a_head_cannot_draft_are_counted(bench: Bench, pair_head: Any) -> None:
    small = altered(pair_head, draft_to_target=torch.arange(0, 128, 2))
    results, text = bench(None, small, trees=("chain:2",))
    assert 0.1 < results["undraftable"] < 1 and f"{results['undraftable']:.1%} of the texts' tokens are none" in text
    every = altered(pair_head, draft_to_target=torch.arange(128))
    assert "undraftable" not in bench(None, every, trees=("chain:2",))[0]


def test_every_batch_size_and_context_is_a_setting(tmp_path: Path, bench: Bench, pair_head: Any) -> None:
    """One that does not fit into memory is left out: three rows of more than a hundred tokens."""
    hungry_head = altered(pair_head, memory=300)
    chosen: dict[str, Any] = dict(prompts="python-heldout", trees=("chain:2",), batch_sizes=(1, 3), contexts=(16, 80))
    results, text = bench(tmp_path, hungry_head, num_prompts=3, max_new_tokens=8, **chosen)
    read = read_results(tmp_path / "results.json")
    points = [(m.context, m.batch_size) for m in read.measurements]
    assert points == [(16, 1), (16, 3), (80, 1)] and results["exact"]["identical"] == 9
    assert "chain:2, batch 3, context 16, greedy" in text and ", batch 1, 3; " in setting_line(read)
    read.heads *= 2
    assert subtitle(read).count(" tokens/s (greedy, batch 1, context ") == 2
    assert not {"batch-size.svg", "context.svg"} & {path.name for path in (tmp_path / "plots").iterdir()}
    again = to_settings(parse_arguments(read.command[2:]))
    assert again.points == [(16, 1), (16, 3), (80, 1), (80, 3)]


def test_an_audit_alone_times_nothing_and_finds_what_differs(tmp_path: Path, bench: Bench, pair_head: Any) -> None:
    chosen: dict[str, Any] = dict(trees=("chain:2",), batch_sizes=(1, 2), temperatures=(0.0, 1.0), timing=False)
    results, text = bench(tmp_path, **chosen)
    assert [path.name for path in tmp_path.iterdir()] == ["audit.json"]
    assert results["exact"] == {"prompts": 16, "identical": 16, "divergences": []} and "16 of 16 prompts" in text
    assert not {"speedup", "baseline"} & results["measurements"][0].keys()
    faulty, _ = bench(None, altered(pair_head, is_faulty=True), trees=("chain:2",), timing=False)
    assert faulty["exact"]["divergences"]


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_a_failed_audit_withholds_every_speed(rule: str, tmp_path: Path, bench: Bench, pair_head: Any) -> None:
    """Of a rule that is exact in distribution, too, which is then wrong at temperature 0."""
    faulty_head, temperature = altered(pair_head, is_faulty=True), 0.0 if rule == "match" else 1.0
    results, text = bench(tmp_path, faulty_head, rule=rule, temperatures=(temperature,))
    exact = results["exact"]
    assert exact["divergences"] and all(d["temperature"] == 0 for d in exact["divergences"])
    assert exact.get("greedy", exact)["identical"] == 4 - len(exact["divergences"])
    assert results["speedup"] is None and all(m["speedup"] is None for m in results["suites"].values())
    page, card = ((tmp_path / name).read_text() for name in ("report.html", "README.md"))
    assert all("no speedup is stated" in shown for shown in (text, page))
    assert all("withheld" in shown for shown in (text, page, card))
    assert not (tmp_path / "plots" / "round.png").exists()


NASTY = "</title><img src=x onerror=y> a|b `c` $d$ *e* _f_ [g](h) &amp; <b>\x1b[31m\n# i"


def test_names_of_folders_are_shown_as_they_are(measured: Measured, tmp_path: Path) -> None:
    results = Results.model_validate(copy.deepcopy(measured[0]))
    results.target.name = NASTY.replace("/", "")
    results.settings.suites = [results.target.name]
    name = NASTY.replace("/", "").replace("\x1b", "\ufffd").replace("\n", "\ufffd")
    assert heading(results) == f"pairs on {name}" and name in setting_line(results)
    card = model_card(results, plots=["plots/acceptance.png"])
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(card.split("---\n", 2)[2])
    inline = [child for token in tokens for child in token.children or ()]
    assert not [child for child in inline if child.type in ("html_inline", "link_open", "em_open", "strong_open")]
    assert [child.attrs["src"] for child in inline if child.type == "image"] == ["plots/acceptance.png"]
    assert not [token for token in tokens if token.type == "html_block"]
    shown = ["".join(child.content for child in token.children or ()) for token in tokens if token.type == "inline"]
    assert shown[0] == heading(results) and setting_line(results) in shown
    assert f" for {name}: tau " in shown[1]
    console = Console(record=True, width=400)
    print_report(results, console)
    said = console.export_text()
    assert heading(results) in said and audit_line(results) in said and "\x1b" not in said
    write_report(results, tmp_path)
    page, drawn = ((tmp_path / name).read_text() for name in ("report.html", "plots/acceptance.svg"))
    assert "<img" not in page + drawn and f"<b>{escape(heading(results))}</b>" in page and "$d$" in drawn


def speed(tree: str, temperature: float, speedup: float, low: float | None, **changes: Any) -> Measurement:
    return measurement(tree, temperature, speedup=speedup, low=low, **{"tau": 3.0, **changes})


GREEDY = [speed("chain:3", 0, 1.2, 1.1), speed("chain:5", 0, 1.36, 1.24)]
IMPOSSIBLE = speed("chain:3", 0, 3.9, 3.8)
SLOW, HOT = (speed("chain:5", temperature, 0.85, 0.8) for temperature in (0, 1))
PAYS = "chain:5 pays: 1.36x [1.24, 1.46] on 2 prompts, greedy"
VERDICTS: list[tuple[list[Measurement], str]] = [
    ([*GREEDY, HOT], f"{PAYS}; no draft pays, T = 1 (chain:5: 0.85x [0.80, 0.95] on 2 prompts)"),
    ([speed("chain:3", 0, 1.05, 0.9)], "chain:3 may pay: 1.05x [0.90, 1.15] on 2 prompts, greedy"),
    ([speed("chain:3", 0, 1.05, None)], "chain:3 may pay: 1.05x on 2 prompts, greedy"),
    (  # the interval holds 1 on this side as on the other
        [speed("chain:3", 0, 0.85, 0.8), speed("chain:2", 0, 0.97, 0.82)],
        "whether a draft pays is not decided, greedy (chain:2: 0.97x [0.82, 1.07] on 2 prompts)",
    ),
    (  # one that surely pays comes before a faster one that may
        [speed("chain:5", 0, 1.4, 0.9), speed("chain:3", 0, 1.3, 1.2)],
        "chain:3 pays: 1.30x [1.20, 1.40] on 2 prompts, greedy",
    ),
    ([IMPOSSIBLE, SLOW], "no draft of the 1 measured pays, greedy (chain:5: 0.85x [0.80, 0.95] on 2 prompts)"),
    (
        [IMPOSSIBLE, speed("chain:5", 1, 3.9, 1.2, tau=2.0)],
        "speedup not measured: the machine was busy; tau 3.00 [2.80, 3.30] with chain:3, greedy; tau 2.00 [1.80, 2.30] "
        "with chain:5, T = 1",
    ),
    ([speed("chain:5", 0, 1.36, 1.24, head="eagle", batch_size=4)], f"eagle {PAYS}, batch 4"),
    (
        [
            *(speed("chain:5", 1, 1.2 - size / 10, 0.4, batch_size=size) for size in (1, 2, 4, 6)),
            speed("chain:3", 1, 3.9, 3.8, batch_size=16),
        ],
        "chain:5 may pay: 1.10x [0.40, 1.20] on 2 prompts, T = 1, batch 1; whether a draft of the 4 measured pays is "
        "not decided, T = 1, batch 2 (chain:5, batch 2: 1.00x [0.40, 1.10] on 2 prompts); no draft of the 4 measured "
        "pays, T = 1, batch 4 and batch 6 (best: chain:5, batch 4: 0.80x [0.40, 0.90] on 2 prompts)",
    ),
]


def test_the_verdict_is_of_the_fastest_that_is_reliable() -> None:
    for measurements, verdict in VERDICTS:
        assert "; ".join(verdicts_on(measurements, [])) == verdict
    unserved = results_of(*GREEDY, head={"unserved": "no engine serves it"})
    assert verdicts(unserved) == ["chain:5 pays, in this runtime only: 1.36x [1.24, 1.46] on 2 prompts, greedy"]
    for speedup, low in ((0.85, 0.8), (0.97, 0.82)):
        lines = warnings(results_of(speed("chain:3", 0, speedup, low)))
        assert any("plain decoding is faster" in line for line in lines) == (speedup == 0.85)


def test_a_prediction_that_contradicts_the_measurement_is_withheld_with_its_reason() -> None:
    for predicted, tau, why in ((0.9, 3.0, ""), (1.1, 3.0, "reach 1.10x"), (1.28, 1.23, "tau, 1.23, is the most")):
        m = speed("chain:3", 0, 0.86, 0.82, tau=tau)
        assert m.speedup is not None
        m.speedup.predicted = predicted
        results = results_of(m)
        said = [line for line in warnings(results) if line.startswith("no prediction is stated for 1 setting")]
        assert len(said) == bool(why) and all(why in line and "0.86x [0.82, 0.96]" in line for line in said)
        assert (f"{predicted:.2f}x" in settings_table(results).markdown()) == (not why)


PARTS = ((1024, 2048, 2.0, 30), (2048, 4096, 1.2, 10), (4096, 8192, 1.0, 10))
BINS = [dict(zip(("from", "to", "mean", "rounds"), part, strict=True)) | {"ci95": None} for part in PARTS]
ROWS = "trained on rows of 2,048 tokens, and a text has 5,000: tau 2.00 within, 1.10 beyond (chain:3, greedy)"
BEYOND = "made for 4,096 of the target's 8,192 positions, beyond which"
PLACES: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"context_length": 2048}, 2048, []),
    ({"positions": 8192}, 9000, []),
    ({"context_length": 2048}, 5000, [ROWS]),
    ({"context_length": 8192}, 9000, ["trained on rows of 8,192 tokens, and a text has 9,000: tau 1.64 within"]),
    ({"positions": 4096, "origin": {"form": "raw EAGLE-3", "differs": []}}, 4096, [BEYOND]),
    ({"positions": 4096}, 5000, [f"{BEYOND} engines may stop drafting or fail: tau 1.80 within"]),
]


def test_figures_beyond_the_positions_of_a_head_are_told_apart() -> None:
    target = {"name": "org/target", "context_length": 8192}
    for head, longest, lines in PLACES:
        m = measurement("chain:3", longest=longest, tau_by_position=BINS)
        said = [line for line in warnings(results_of(m, head=head, target=target)) if "made" in line or "rows" in line]
        assert len(said) == len(lines) and all(map(str.startswith, said, lines))


def at_load(requests: int, tree: str, measured: float, low: float | None, **changes: Any) -> Measurement:
    return speed(tree, 0, measured, low, batch_size=requests, **changes)


FALLING = [
    *(at_load(1, f"chain:{depth}", measured, measured - 0.1) for depth, measured in ((5, 1.9), (2, 1.5))),
    *(at_load(4, f"chain:{depth}", measured, measured - 0.1) for depth, measured in ((5, 1.3), (2, 1.2))),
    *(at_load(16, tree, measured, 1.02) for tree, measured in (("chain:2", 1.12), ("tree:5x4x16", 1.4))),
    at_load(64, "chain:2", 1.05, 0.95),
]
NO_SCHEDULE = "no schedule, which needs a chain that pays"
LOADS: list[tuple[list[Measurement], list[tuple[int, int, int]], str]] = [
    (
        FALLING,
        [(1, 4, 5), (5, 16, 2), (17, ABOVE, 0)],
        "5 up to 4 requests (1.30x [1.20, 1.40] at 4), 2 up to 16 (1.12x [1.02, 1.22] at 16), none above",
    ),
    (  # the smaller number between two sizes, and none where the machine was busy above
        [at_load(1, "chain:5", 0.9, 0.8), at_load(8, "chain:2", 1.3, 1.2), at_load(9, "chain:3", 3.9, 3.8)],
        [(1, 7, 0), (8, 8, 2), (9, ABOVE, 0)],
        "none up to 7 requests, 2 up to 8 (1.30x [1.20, 1.40] at 8), none above",
    ),
    (
        [at_load(2, "chain:1", 1.2, 1.1), at_load(4, "chain:3", 1.3, 1.2), at_load(5, "chain:3", 1.4, 1.3)],
        [(1, 3, 1), (4, 5, 3), (6, ABOVE, 0)],
        "1 up to 3 requests (1.20x [1.10, 1.30] at 2), 3 up to 5 (1.30x [1.20, 1.40] at 4), none above",
    ),
    ([at_load(1, "chain:5", 1.5, 1.4), at_load(1, "chain:3", 1.4, 1.3)], [], ""),
    ([at_load(1, "chain:5", 1.1, 0.9), at_load(4, "chain:5", 0.9, 0.8)], [], NO_SCHEDULE),
    ([at_load(1, "chain:5", 0.95, 0.9), at_load(4, "chain:5", 0.9, 0.8)], [], ""),
    ([at_load(1, "chain:5", 1.5, 1.4), at_load(4, "chain:5", 1.2, 1.1, drafted=2.5)], [], NO_SCHEDULE),
    ([at_load(1, "chain:5", 1.5, 1.4), at_load(8, "chain:5", 1.2, None)], [], NO_SCHEDULE),  # one group at 8
]


def test_a_draft_is_served_at_the_loads_at_which_it_was_shown_to_pay() -> None:
    hot = speed("chain:5", 1, 1.9, 1.8, batch_size=64)
    for measurements, schedule, line in LOADS:
        assert [step[:3] for step in draft_schedule(measurements, measurements[0])] == schedule
        lines = [said.partition(", and reliable")[0] for said in verdicts(results_of(*measurements, hot))[2:]]
        at = "" if line == NO_SCHEDULE else ", greedy"
        assert lines == [f"draft tokens by load{at}: {line}"] * bool(line)


def test_an_interval_of_few_batches_is_said_to_be_too_narrow() -> None:
    exact = {"prompts": 32, "identical": 32, "divergences": []}
    for size, said in ((4, False), (5, True)):
        lines = warnings(results_of(at_load(size, "chain:3", 1.2, 1.1, exact=exact)))
        assert any(f"at batch {size}, fewer than 8 batches" in line for line in lines) == said


SERVE = """vllm serve TARGET --speculative-config '{"method": "eagle3", "model": "HEAD"}'\n# HEAD of TARGET"""


def test_the_serving_command_names_the_folder_with_the_head(tmp_path: Path) -> None:
    """Whatever it is called: the command is split as a shell splits it."""
    folder = tmp_path / 'a TARGET\'s "HEAD"'
    head = folder / "head"
    head.mkdir(parents=True)
    for path, model in ((folder, head), (head, head), ("org/head@v2", "org/head"), (f"lookup:2+{folder}", head)):
        results = results_of(GREEDY[0], head={"path": str(path), "serve": SERVE}, target={"name": str(folder)})
        command, _, notes = (serve_command(results) or "").partition("\n")
        program, _, target, _, config = shlex.split(command)
        revision = {"revision": "v2"} if model == "org/head" else {}
        assert (program, target, notes) == ("vllm", str(folder), "# HEAD of TARGET")
        assert json.loads(config) == {"method": "eagle3", "model": str(model), **revision}
    results.target.name = "org/target@main"
    assert " org/target --revision main " in (serve_command(results) or "")
    results.head.path = str(tmp_path / "gone")
    assert serve_command(results) is None


def test_the_command_is_that_of_the_draft_in_the_verdict() -> None:
    """Of several heads, and of the first temperature at which one pays."""
    head = results_of(GREEDY[0]).head.model_dump()
    heads = [head | {"name": name, "path": f"org/{name}", "serve": f"serve {name}"} for name in ("one", "two")]
    slow = speed("chain:7", 0, 0.8, 0.7, head="one")
    for measurements, served in (
        ([slow, speed("chain:3", 0, 1.03, 0.86, head="two")], "serve two"),
        ([slow, speed("chain:3", 1, 1.2, 1.1, head="two")], "serve two"),
        ([speed("chain:7", 0, 1.1, 1.05, head="one"), speed("chain:3", 0, 1.3, 0.9, head="two")], "serve one"),
        ([slow, speed("chain:3", 0, 0.97, 0.86, head="two")], None),
    ):
        assert serve_command(results_of(*measurements, heads=heads)) == served


def test_measurements_lie_with_the_run_or_below_runs(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    for head in (Path("run/head"), Path("alone"), Path("disk/kept")):
        head.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (head / name).touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/head").symlink_to("../disk/kept")
    for run in ("run", "linked"):
        (tmp_path / run / "recipe.yaml").touch()
        for named in (run, f"{run}/head", f"./{run}/"):
            assert default_out(named) == tmp_path / run / "bench"
    assert default_out("alone") == Path("runs/bench-alone") and default_out("lookup:3") == Path("runs/bench-lookup-3")
    assert default_out("lookup:3+x/runs/alone/head") == Path("runs/bench-lookup-3+alone-head")


def test_a_runs_training_is_drawn_beside_its_results(measured: Measured, tmp_path: Path) -> None:
    records: list[Any] = [{"kind": "train", "step": step, "loss": 3 / step} for step in range(1, 6)]
    spoiled: list[Any] = [*({"kind": "train", "step": 9} | loss for loss in ({}, {"loss": math.inf}))]
    spoiled += [{"kind": "train", "step": "9", "loss": 1}, {"kind": [], "step": {}}, 3]
    text = "".join(json.dumps(record) + "\n" for record in [*records, *spoiled])
    (tmp_path / "metrics.jsonl").write_text(f'{text}{{"kind": "train", "step": 6, "lo')
    curve = learning_curve(lambda share: 1.5 + share / 2, count=3)
    write_report(Results.model_validate(measured[0] | {"head": measured[0]["head"] | {"curve": curve}}), tmp_path)
    page, card = ((tmp_path / name).read_text() for name in ("report.html", "README.md"))
    assert "<h2>Training loss</h2>" in page and "<h2>tau over training tokens</h2>" in page
    assert "The learning curve has 3 points, a fit needs 4" in page and "The learning curve has 3 points" in card
    assert "![tau over training tokens](plots/curve.png)" in card
    assert {"loss.svg", "curve.png", "curve-depth.svg"} < {path.name for path in (tmp_path / "plots").iterdir()}
