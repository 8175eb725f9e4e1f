"""Every part of the GPU suite but those of the kernels' own clocks runs through on a CPU, on a small shape."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.gpu import parts, suite
from eval.gpu.idle import idle_of
from scripts import gpu_suite
from scripts.model_shapes import SHAPES, ModelShape

CPU_PARTS = {part.__name__: part for group in parts.GROUPS.values() for part in group}
for without in ("checks", "kernels", "draft_steps", "idle"):  # of the device alone: see test_dry_run.py
    del CPU_PARTS[without]


@pytest.fixture(scope="module")
def bench() -> Iterator[parts.Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small", ModelShape(256, 21, 8, 2, 64, 640, 4200))
        for name, value in (("NEW", 8), ("PROMPT", 24), ("LONG", 12), ("BATCHES", (1, 2)), ("CONTEXTS", (64,))):
            patch.setattr(parts, name, value)
        patch.setattr("eval.benchmark.roofline.COPY_BYTES", {"cpu": 1 << 20})
        patch.setattr("eval.benchmark.roofline.TRIES", {"cpu": 1})
        patch.setattr("eval.gpu.models.DRAFT_VOCAB", 2500)
        yield parts.Bench(torch.device("cpu"), "small", None, time.monotonic() + 600, prompts=2, timed_prompts=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CPU_PARTS)
@pytest.mark.filterwarnings("ignore")  # the library's, of its own ways
def test_a_part_runs_through(name: str, bench: parts.Bench) -> None:
    found: dict[str, Any] = {}
    suite.run_part(CPU_PARTS[name], bench, found)
    assert "error" not in found, found["error"]
    numbers = json.loads(json.dumps(found))
    if name == "drafting":
        for tree in parts.TREES:
            assert numbers[tree]["tau"] >= 1 and numbers[tree]["glue_us"] > 0 and numbers[tree]["draft_over_floor"] > 0
    if name == "identity":
        assert len(numbers) == 6 and all(config["identical"] == config["prompts"] == 2 for config in numbers.values())
    if name == "plain":
        assert set(numbers["verify_over_one"]) == {"8", "16", "32", "64"} and numbers["share"] > 0


def test_a_part_that_breaks_leaves_what_it_had() -> None:
    def part(bench: Any, found: dict[str, Any]) -> None:
        found["one"] = 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    found: dict[str, Any] = {}
    suite.run_part(part, parts.Bench(torch.device("cpu"), "small", None, 0.0), found)
    assert found == {"one": 1, "error": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    assert suite.failed(found) and not suite.failed({"one": 1})


def test_a_group_writes_down_what_it_finds_as_it_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that fail and checks that no time is left for are told apart, and are there before the last has ended."""
    out, now = tmp_path / "group.json", [100.0]
    seen: list[dict[str, Any]] = []

    def good() -> None:
        now[0] += 80

    def bad() -> None:
        seen.append(json.loads(out.read_text()))
        now[0] += 80
        raise AssertionError("rows differ")

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(parts, "CHECKS", {"good": good, "bad": bad, "late": good})
    options = gpu_suite.parse_arguments(["--out", str(out), "--group", "checks"])
    assert suite.run_group(options) == 0
    assert seen == [{"checks": {"failed": 0, "good": "passed"}}]
    found = {"failed": 1, "good": "passed", "bad": "AssertionError: rows differ", "left_out": ["late"]}
    assert json.loads(out.read_text()) == {"checks": found}
    assert suite.failed(found) and suite.failed({"left_out": ["late"]})


def test_a_group_that_dies_is_written_down_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, one of them killed after its first part."""
    script = tmp_path / "group.py"
    script.write_text(
        "import sys, json, os\n"
        "group, out = sys.argv[2], sys.argv[4]\n"
        "json.dump({group + ' part': {'share': 0.8}}, open(out, 'w'))\n"
        "os.kill(os.getpid(), 9) if group == 'grown' else None\n"
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(suite, "device_facts", lambda device: {})
    out = tmp_path / "record.json"
    for groups, status in (["grown", "checks"], 1), (["checks"], 0):
        options = gpu_suite.parse_arguments(["--out", str(out), "--groups", *groups])
        assert suite.run_suite(options, script) == status
        record = json.loads(out.read_text())
        assert all(record[f"{group} part"] == {"share": 0.8} for group in groups)
        assert record.get("grown error") == ("ended with status -9" if status else None)


def test_idle_time_within_rounds_and_between_them() -> None:
    """Two rounds of three kernels, given out of order: 6 of 10 microseconds busy, 4 between the rounds."""
    one = [(0.0, 2.0), (3.0, 5.0), (8.0, 10.0)]
    found = idle_of([*one[::-1], *((start + 14, end + 14) for start, end in one)], 2)
    assert (found["kernels"], found["round_us"], found["gap_us"]) == (3, 10, 4)
    assert found["idle_share"] == pytest.approx(0.4)
    with pytest.raises(ValueError, match="5 kernels are no 2 equal rounds"):
        idle_of([*one, *one[:2]], 2)
