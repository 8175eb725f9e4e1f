"""One loop: it learns, it is the same however a step is cut up, and it goes on bit for bit."""

import json
import math
import re
import shutil
import signal
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eval.records.head_schema import TauFigures
from heads.core.errors import UserError
from heads.saved import load_head
from tests.conftest import small_recipe
from tests.support.annotations import Capture, Patch
from tests.support.chats import talk, write_chats
from tests.support.closeness import assert_close
from tests.support.faults import full_disk, nan_at, signal_at
from tests.support.published_heads import RAW, ZLAB, dflash, eagle3, write
from tests.support.refusals import refused
from tests.support.runs import Settings, lines, same, train, weights, write_recipe
from tests.support.runs import train_in as run
from train.core.interrupts import Interrupted
from train.recipe.recipe import load_recipe
from train.run.checkpoints import list_checkpoints, read_state
from train.run.tau_measurement import Evaluation

TIMINGS = dict.fromkeys(("seconds", "measuring_seconds", "tokens_per_second"), 0)
"""Figures of metrics.jsonl that no two runs share."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Settings:
    """The settings of a run that was made unbroken, by which others are judged."""
    settings = small_recipe(tmp_path_factory.mktemp("whole"), tiny_target_dir)
    run(settings)
    return settings


def goes_on_to(whole: Settings, settings: Settings) -> bool:
    """Go on with a run. True if it then has the weights of the unbroken one."""
    return same(weights(run(settings), 6), weights(Path(whole["output_dir"]), 6))


def kept(settings: Settings) -> list[str]:
    return sorted(path.name for path in Path(settings["output_dir"], "checkpoints").iterdir())


def test_it_learns_one_row_by_heart(settings: Settings) -> None:
    settings["data"]["sources"][0]["limit"] = 1
    settings["train"] |= {"max_steps": 24, "lr": 0.05, "checkpoint_every": 100, "log_every": 8}
    folder = run(settings)
    losses = [line["loss"] for line in lines(folder, "train")]
    assert losses[-1] < 0.2 * losses[0], losses


def test_a_run_says_which_share_of_the_labels_its_draft_vocabulary_holds(
    settings: Settings, tmp_path: Path, capsys: Capture
) -> None:
    """Four of five labels: a letter three times in each answer, and the answer's end; the fifth is another letter."""
    settings["data"]["sources"] = [write_chats(tmp_path / "chats.jsonl", [{"messages": talk("the sea", "zzzq")}] * 8)]
    settings["head"]["draft_vocab_size"] = 2
    settings["train"]["max_steps"] = 1
    run(settings)
    assert "\n2 of 128 tokens can be drafted, 80.0% of the labels\n" in capsys.readouterr().err


def test_accumulation_is_the_same_step_cut_up(settings: Settings, tmp_path: Path) -> None:
    """Answers have very different lengths, so that the rows of a step hold different numbers of labels."""
    records = [{"instruction": "say " + "so " * (n % 3), "response": "the sea " * (1 + 3 * (n % 4))} for n in range(16)]
    settings["data"] = {"sources": [write_chats(tmp_path / "chats.jsonl", records)], "context_length": 128}
    settings["train"] |= {"max_steps": 3, "batch_size": 4, "weight_decay": 0.1, "max_grad_norm": 0.5, "log_every": 1}
    whole = run(settings)
    settings["train"] |= {"batch_size": 1, "tokens_per_step": 4 * 128}
    cut = run(settings | {"output_dir": str(tmp_path / "cut")})
    torch.testing.assert_close(weights(cut, 3), weights(whole, 3), rtol=1e-3, atol=1e-4)
    norms = [[line["grad_norm"] for line in lines(folder, "train")] for folder in (whole, cut)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_what_is_saved_is_what_was_measured_and_changes_no_step(
    settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    measure, measured = Evaluation.measure, {}

    def spy(self: Evaluation, head: Any) -> TauFigures:
        measured.update({name: value.clone() for name, value in head.state_dict().items()})
        return measure(self, head)

    monkeypatch.setattr(Evaluation, "measure", spy)
    losses, trained = [], []
    for dtype in ("bfloat16", "float32"):
        settings["output_dir"] = str(tmp_path / dtype)
        settings["train"] |= {"save_dtype": dtype} if dtype == "float32" else {}  # bfloat16 is the default
        folder = run(settings)
        (file,) = (folder / "head").glob("*.safetensors")
        saved = {name: value for name, value in load_file(file).items() if value.is_floating_point()}
        assert {value.dtype for value in saved.values()} == {getattr(torch, dtype)}
        assert json.loads((folder / "head/config.json").read_text())["torch_dtype"] == dtype
        assert same(load_head(folder, dtype=torch.float32).state_dict(), measured)
        losses.append([line["loss"] for line in lines(folder, "train")])
        trained.append(weights(folder, 6))
    assert losses[0] == losses[1] and same(*trained) and same(measured, trained[1])


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP has its default action, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(
    ("number", "optimizer"), [(signal.SIGTERM, "adamw"), (signal.SIGINT, "muon"), (signal.SIGHUP, "adamw")]
)
def test_an_interrupted_run_goes_on_bit_for_bit(
    number: signal.Signals, optimizer: str, settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("train.recipe.recipe.MIN_POINT", 1)  # tau is measured after steps 2, 4 and 6
    settings["train"] |= {"eval_points": 3, "warmup_steps": 2, "schedule": "wsd", "optimizer": optimizer}
    unbroken = run(settings)
    settings["output_dir"] = str(tmp_path / "broken")
    with signal_at(3, number), pytest.raises(Interrupted):
        run(settings)
    assert "step-3" in kept(settings)
    broken = run(settings)
    for name in ("head", "optimizer"):
        assert same(*(weights(folder, 6, name) for folder in (unbroken, broken)))
    states = [json.loads((folder / "checkpoints/step-6/state.json").read_text()) for folder in (unbroken, broken)]
    assert {**states[0], "seconds": 0} == {**states[1], "seconds": 0}
    for ours, whole in zip(lines(broken), lines(unbroken), strict=True):  # one of them is of an interval cut in two
        assert ours | TIMINGS == whole | TIMINGS


@pytest.mark.usefixtures("hangups")
def test_a_run_under_nohup_goes_on(settings: Settings) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signal_at(3, signal.SIGHUP):
        run(settings)


@pytest.mark.parametrize(("step", "text"), [(4, None), (6, '{"measured_step": 9}')])
def test_a_measurement_that_was_not_recorded_is_made_again_and_counts_once(
    step: int, text: str | None, settings: Settings, monkeypatch: Patch
) -> None:
    """A run is killed after its measurement at `step`; measured.json is absent or says nothing."""
    monkeypatch.setattr("train.recipe.recipe.MIN_POINT", 1)
    settings["train"] |= {"eval_points": 2, "keep_checkpoints": 9}
    folder = run(settings)

    def made() -> tuple[list[Any], list[Any]]:
        states = map(read_state, list_checkpoints(folder / "checkpoints"))
        best = [(state.best_tau, state.best_step, state.measured_step) for state in states]
        return [line | TIMINGS for line in lines(folder)], best

    before, final = made(), weights(folder, 6)
    for path in list_checkpoints(folder / "checkpoints"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    measurement = folder / f"checkpoints/step-{step}/measured.json"
    measurement.unlink() if text is None else measurement.write_text(text)
    run(settings)
    assert made() == before and same(weights(folder, 6), final)
    assert read_state(measurement.parent).measured_step == step


def test_epochs_are_as_many_steps(settings: Settings, capsys: Capture) -> None:
    """Three epochs in steps of 2 rows, with a warm-up for a long run; also for a run that is begun again."""
    epochs = settings | {"data": settings["data"] | {"context_length": 256}}
    epochs["train"] |= {"max_steps": "3 epochs", "warmup_steps": 600}
    folder = run(epochs)
    said = capsys.readouterr().err
    steps = load_recipe(folder / "recipe.yaml").train.steps
    rows = int(re.findall(r"(\d+) rows", said)[0])
    assert steps == math.ceil(3 * rows / 2) > 5
    assert re.search(rf"\n{rows} rows: {steps} steps of 512 tokens are 3(\.\d+)? epochs\n", said), said
    assert f"train.warmup_steps: 600 are more than a fifth of the run; the warm-up takes {steps // 5} step" in said
    run(epochs)
    assert f"finished already, {steps} steps" in capsys.readouterr().err
    with pytest.raises(UserError, match=rf"train\.max_steps was {steps}, is "):
        run(epochs | {"train": epochs["train"] | {"max_steps": "5 epochs"}})


def test_more_than_a_thousand_epochs_are_a_mistake(settings: Settings) -> None:
    settings["data"] |= {"sources": [settings["data"]["sources"][0] | {"limit": 1}], "context_length": 256}
    settings["train"]["max_steps"] = 501
    words = r"501 steps of 512 tokens read 1 text 1,002 times, .* give train\.max_steps='10 epochs', or 500 at"
    with pytest.raises(UserError, match=words):
        run(settings)


def test_the_recipe_as_resolved_has_the_heads_defaults(whole: Settings) -> None:
    folder = Path(whole["output_dir"])
    assert kept(whole) == ["step-4", "step-6"]
    resolved = load_recipe(folder / "recipe.yaml")
    assert (resolved.head.depth, resolved.head.draft_vocab_size, resolved.head.loss) == (2, 128, "labels")
    assert train(folder / "recipe.yaml").recipe == resolved, "the same run"
    assert "head.depth_decay was 0.8, is 0.5" in refused(run, whole | {"head": whole["head"] | {"depth_decay": 0.5}})


def test_other_data_is_refused(settings: Settings) -> None:
    with signal_at(1), pytest.raises(Interrupted):
        run(settings)
    data = Path(settings["data"]["sources"][0]["path"])
    data.write_text(data.read_text().replace("sea", "tea", 1))
    assert "other data" in refused(run, settings)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(
    log_every: int, settings: Settings, whole: Settings
) -> None:
    settings["train"]["log_every"] = log_every
    with nan_at(5), pytest.raises(UserError, match=r"not finite at step 5: .* the same command goes on"):
        run(settings)
    assert kept(settings) == ["step-2", "step-4"] and goes_on_to(whole, settings)


def test_a_full_disk_loses_nothing(settings: Settings, whole: Settings) -> None:
    with full_disk(4), pytest.raises(UserError, match=r"no space left .* step 4; step-2 is intact"):
        run(settings)
    assert kept(settings) == ["step-2"] and goes_on_to(whole, settings)


@pytest.mark.parametrize("name", ["head.safetensors", "manifest.json"])
def test_a_broken_checkpoint_is_passed_over(name: str, whole: Settings, tmp_path: Path, capsys: Capture) -> None:
    folder = Path(shutil.copytree(whole["output_dir"], tmp_path / "broken"))
    shutil.rmtree(folder / "head")
    file = folder / "checkpoints/step-6" / name
    file.write_bytes(file.read_bytes()[:-10])
    assert goes_on_to(whole, whole | {"output_dir": str(folder)})
    said = capsys.readouterr().err
    assert "warning:" in said and "step-6" in said and "resumed from" in said


def test_a_measurement_has_what_the_learning_curve_needs(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "birds.jsonl").write_text('{"text": "there are birds"}\n')
    settings["eval"]["prompts"] += f",{tmp_path}/birds.jsonl"
    folder = run(settings)
    (point,) = lines(folder, "eval")
    assert point["tokens"] == lines(folder, "train")[-1]["tokens"] and 0 < point["lr"] < 0.01 and point["seconds"] > 0
    assert {name: len(suite["prompts"]) for name, suite in point["suites"].items()} == {"prompts": 2, "birds": 1}
    tokens, rounds = map(sum, zip(*(p for suite in point["suites"].values() for p in suite["prompts"]), strict=True))
    assert point["tau"] == tokens / rounds and point["ci95"][0] <= point["tau"] <= point["ci95"][1]


def test_bf16_keeps_float32_weights_and_trackers_have_the_figures(
    settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Those that are installed."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    there = {name: find_spec(name) is not None for name in ("tensorboard", "trackio")}
    settings["train"] |= {"precision": "bf16", "max_steps": 2}
    folder = run(settings | {"tracking": there})
    assert {tensor.dtype for tensor in weights(folder, 2).values()} == {torch.float32}
    assert any((folder / "tensorboard").rglob("events.out.tfevents.*")) == there["tensorboard"]
    if there["trackio"]:
        storage = import_module("trackio.sqlite_storage").SQLiteStorage
        assert {"train/loss", "eval/tau"} <= {*storage.get_all_metrics_for_run("draftsmith", folder.name)}


@pytest.fixture
def small(settings: Settings, tmp_path: Path) -> Settings:
    """A run of two steps from a published EAGLE-3 head."""
    path = write(tmp_path / "published", RAW, eagle3().to_checkpoint())
    settings["head"] = {"kind": "eagle3", "depth": 2, "init_from": path}
    settings["train"] |= {"max_steps": 2, "log_every": 1, "lr": 1e-6}
    return settings


def test_a_run_from_a_published_head_and_one_from_that_run(small: Settings, capsys: Capture) -> None:
    folder = run(small)
    made = load_recipe(folder / "recipe.yaml").head
    assert made.init_from == small["head"]["init_from"]
    assert (made.draft_vocab_size, made.intermediate_size, made.depth) == (48, 40, 2)
    start, head = eagle3(), load_head(folder)
    saved = weights(folder, 2)
    for name, value in start.state_dict().items():
        assert_close(saved[name], value, roundings=256)
    assert not torch.equal(saved["fc.weight"], start.fc.weight)
    assert torch.equal(head.draft_to_target, start.draft_to_target)
    train(folder / "recipe.yaml", f"output_dir={folder.parent / 'again'}")
    train(write_recipe(small), f"output_dir={folder.parent / 'from-run'}", f"head.init_from={folder}")
    assert "newest checkpoint" not in capsys.readouterr().err
    (folder / "checkpoints/step-2").rename(folder / "checkpoints/step-7")
    head_folder = f"{folder}/head"
    train(write_recipe(small), f"output_dir={folder.parent / 'from-best'}", f"head.init_from={head_folder}")
    said = f"head.init_from: {head_folder}: its head is of step 2, its newest checkpoint of step 7"
    assert said in capsys.readouterr().err


def test_a_run_from_a_head_of_another_kind_says_what_it_took(small: Settings, tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "dflash", ZLAB, dflash().to_checkpoint())
    small["head"] = {"kind": "xpress", "init_from": path, "num_anchors": 8}
    small["eval"] |= {"tree": "chain:3"}
    folder = run(small)
    said = capsys.readouterr().err
    assert f"head.init_from: {path} holds a dflash; taken: fc, hidden_norm, layers.*.input_layernorm, " in said
    assert "norm; new: xpress_head; left out: none" in said
    assert_close(weights(folder, 2)["fc.weight"], dflash().fc.weight, roundings=256)
