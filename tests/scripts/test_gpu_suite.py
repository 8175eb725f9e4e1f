"""Every part of the GPU suite but those of the device's own clocks runs through on a CPU, on small shapes."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.benchmark import roofline
from eval.runtime.request import Request
from eval.runtime.sampling import Sampling
from heads.backends.triton.timing import device_seconds
from heads.errors import UserError
from scripts import gpu_suite
from scripts.gpu import parts, suite
from scripts.gpu.models import Models
from scripts.grown.shapes import ModelShape
from tests.small_targets import make_head, make_target
from tests.switches import kernels_on_cpu

CPU = torch.device("cpu")
PARTS = {part.__name__: part for group in parts.GROUPS.values() for part in group}
ON_A_CPU = [name for name in PARTS if name not in ("checks", "kernels", "draft_steps")]
INTERPRETED = ["plain", "drafting", "kernels"]
"""By kernels. `scaling` times what these do, and tests/heads/backends/triton/test_recurrent.py has `draft_steps`."""
no_triton = pytest.mark.skipif(
    torch.cuda.is_available() or not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"
)


@pytest.fixture(autouse=True)
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of one try, for none of them is looked at but for its sign."""
    monkeypatch.setitem(roofline.TRIES, "cpu", 1)
    monkeypatch.setattr(roofline, "device_seconds", partial(device_seconds, repeats=1))


class SmallBench(parts.Bench):
    """A bench of a random target whose prompts are made up."""

    def requests(self, count: int, new_tokens: int, temperature: float = 0.0) -> list[Request]:
        ways = [Sampling(temperature, seed=i) if temperature else Sampling() for i in range(min(count, 2))]
        return [
            Request([3 + (5 * i + j) % 90 for j in range(6)], new_tokens, way, (), True) for i, way in enumerate(ways)
        ]


@pytest.fixture(scope="module")
def small() -> parts.Bench:
    """The quickstart's target, grown a little."""
    sizes = parts.Sizes(
        new=8, prompt=24, long=12, batches=(1, 2), contexts=(64,), prompts=2, timed_prompts=2, draft_vocab=2500
    )
    shape = ModelShape(256, 21, 8, 2, 64, 640, 4200)
    bench = parts.Bench(CPU, shape, None, sizes)
    bench.bandwidth = 1e9
    return bench


@pytest.fixture(scope="module")
def interpreted_bench() -> Iterator[parts.Bench]:
    """One small size of everything, with every kernel on: what a first run on a card would trip over."""
    sizes = parts.Sizes(
        ("chain:2", "tree:2x2x5"), new=3, prompt=6, long=3, length=70, context=16, verified=(4,), batches=(2,),
        contexts=(20,), rows=(1, 16), prompts=1, timed_prompts=1,
    )  # fmt: skip
    with kernels_on_cpu():
        seconds = partial(device_seconds, repeats=1)
        shape = ModelShape(64, 2, 4, 2, 16, 64, 300)
        bench = SmallBench(CPU, shape, None, sizes, seconds=seconds, cold=1 << 10)
        widths: Any = dict(hidden_size=64, intermediate_size=64, vocab_size=128, num_attention_heads=4)
        target = make_target("llama", torch.bfloat16, **widths)
        head: Any = make_head(target)
        bench.small = bench.grown = Models(target, head, "random")
        bench.bandwidth = 1e9
        yield bench


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_part_runs_through(name: str, small: parts.Bench) -> None:
    found: dict[str, Any] = {}
    suite.run_part(PARTS[name], small, found)
    assert "error" not in found, found["error"]
    numbers = json.loads(json.dumps(found))
    if name == "drafting":
        for tree in small.sizes.trees:
            assert numbers[tree]["tau"] >= 1 and numbers[tree]["glue_us"] > 0 and numbers[tree]["draft_over_floor"] > 0
    if name == "identity":
        configs = [value for value in numbers.values() if isinstance(value, dict)]
        assert len(configs) == 6 and all(config["identical"] == config["prompts"] == 2 for config in configs)
    if name == "plain":
        assert set(numbers["verify_over_one"]) == {"8", "16", "32", "64"} and numbers["share"] > 0


@pytest.mark.slow
@no_triton
@pytest.mark.parametrize("name", INTERPRETED)
def test_a_part_runs_through_by_kernels(name: str, interpreted_bench: parts.Bench) -> None:
    found: dict[str, Any] = {}
    suite.run_part(PARTS[name], interpreted_bench, found)
    assert not suite.failed(found), found
    numbers = json.loads(json.dumps(found))
    if name == "kernels":
        timed = {part["part"].split(",")[0].split(" by ")[0] for part in numbers["16"]}
        named = {"qkv", "choose with noise", "tree_attention strict at 70", "compact 7", "take_path 7", "commit"}
        assert named <= timed
    if name == "drafting":
        assert numbers["tree:2x2x5"]["glue_us"] > 0


@pytest.mark.slow
@no_triton
def test_chains_are_the_references_bit_for_bit(interpreted_bench: parts.Bench) -> None:
    """Work of the part `identity` for each of its settings."""
    bench = interpreted_bench
    found = parts.compare(bench.engine(bench.small, "chain:2"), bench.requests(2, 4, 1.0))
    assert found["identical"] == found["prompts"] == 2 and found["flips"] == 0


def test_a_part_that_breaks_leaves_what_it_had(small: parts.Bench) -> None:
    def part(bench: Any, found: dict[str, Any]) -> None:
        found["one"] = 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    found: dict[str, Any] = {}
    suite.run_part(part, small, found)
    assert found == {"one": 1, "error": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    assert suite.failed(found) and not suite.failed({"one": 1})


def test_the_record_grows_as_the_run_goes(tmp_path: Path, small: parts.Bench) -> None:
    """Tests that fail are marked as such, beside what commands before wrote."""
    out = tmp_path / "record.json"
    out.write_text('{"device": {"name": "Some GPU"}}')
    seen: list[dict[str, Any]] = []

    def checked(bench: parts.Bench, found: dict[str, Any]) -> None:
        recorder = parts.Recorder(bench, found)
        for name, passed in (("good", True), ("bad", False)):
            report = dict(when="call", passed=passed, nodeid=f"tests/gpu/x.py::{name}", longreprtext="rows differ")
            recorder.pytest_runtest_logreport(SimpleNamespace(**report))
            seen.append(json.loads(out.read_text())["checked"])

    suite.run_parts(parts.Bench(CPU, small.shape, None), (checked,), out)
    assert seen == [{"failed": 0, "good": "passed"}, {"failed": 1, "good": "passed", "bad": "rows differ"}]
    record = json.loads(out.read_text())
    assert record["checked"] == seen[1] and record["device"] == {"name": "Some GPU"}
    assert suite.failed(record["checked"])


def test_a_group_that_dies_is_written_down_beside_the_others(tmp_path: Path) -> None:
    """Two groups, one of them killed after its first part."""
    script = tmp_path / "group.py"
    script.write_text(
        "import sys, json, os\n"
        "group, out = sys.argv[1], sys.argv[4]\n"
        "record = json.load(open(out)) | {group + ' part': {'share': 0.8}}\n"
        "json.dump(record, open(out, 'w'))\n"
        "os.kill(os.getpid(), 9) if group == 'rounds' else None\n"
    )
    out = tmp_path / "record.json"
    options = gpu_suite.parse_arguments(["rounds", "--out", str(out)])
    for groups, status in (("rounds", "kernels"), 1), (("kernels",), 0):
        assert suite.run_suite(options, script, groups, {"name": "Some GPU"}) == status
        record = json.loads(out.read_text())
        assert all(record[f"{group} part"] == {"share": 0.8} for group in groups)
    assert record["rounds error"] == "ended with status -9" and "kernels error" not in record


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    options = ["checks", "--out", str(tmp_path / "record.json")]
    with pytest.raises(UserError, match="no GPU"):
        gpu_suite.main(options)


def test_a_warning_of_a_card_fails_no_check(tmp_path: Path) -> None:
    """As torch's CUDA build gives at the first use of a prototype; elsewhere a warning is an error."""
    shutil.copy(parts.ROOT / "tests/gpu/conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text("import warnings\n\n\ndef test_it():\n    warnings.warn('a prototype')\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-c",
        "pyproject.toml",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=parts.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed, 1 warning" in done.stdout, done.stdout[-2000:]
