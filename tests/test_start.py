"""Tests of the start of a command: --help imports no heavy package, and no library prints anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "matplotlib", "wandb", "accelerate", "datasets", "deepspeed", "peft")


ENTRIES = [
    path.relative_to(ROOT)
    for folder in ("train", "eval", "scripts")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]
LOOK = """
import json, runpy, sys
script, heavy = sys.argv[1], sys.argv[2].split(",")
sys.argv = [script, "--help"]
sys.path[0] = script.rpartition("/")[0]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as ended:
    print(json.dumps([ended.code or 0, [name for name in heavy if sys.modules.get(name)]]))
"""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_help_imports_nothing_heavy(entry: Path) -> None:
    done = run("-c", LOOK, entry, ",".join(HEAVY))
    assert done.stderr == ""
    assert "usage: " in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


MISTYPED = {
    "unknown option": ["eval/bench.py", "--nonsense"],
    "no argument": ["eval/bench.py"],
    "no recipe": ["train/eagle.py", "no.yaml"],
    "no value": ["train/eagle.py", "recipes/quickstart.yaml", "train.max_steps"],
}


@pytest.mark.parametrize("words", MISTYPED.values(), ids=MISTYPED)
def test_a_mistyped_command_is_refused_without_importing_anything_heavy(words: list[str]) -> None:
    done = run("-X", "importtime", *words)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: ")
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not names & {*HEAVY}


@pytest.mark.parametrize("entry", ["train/eagle.py", "eval/bench.py"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_a_command_quietly(entry: str, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, entry, "--help"]
    done = subprocess.run(words, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    swallowed = bool(unbuffered) and entry == "eval/bench.py"  # by argparse
    assert (done.returncode, done.stderr) == (0 if swallowed else 141, "")


TABLE = """
from rich.console import Console
from eval.command import exit_status

def show() -> int:
    for _ in range(9999):
        Console().print("a row of a table")
    return 0

raise SystemExit(exit_status(show))
"""


def test_a_table_that_nobody_reads_ends_a_command_quietly() -> None:
    """`rich` would end the command with status 1, which means that an output was not the target's own."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", TABLE], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=write,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_launch_by_the_configuration_that_comes_with_it_says_nothing_itself() -> None:
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file"]
    done = run(*launch, "recipes/accelerate/local.yaml", "train/eagle.py", "--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")


@pytest.mark.slow
def test_no_library_speaks_before_a_command_does(tmp_path: Path) -> None:
    """The command loads a model. Both streams have only our own lines, and torchao is not imported."""
    options = ["--prompts", "prompts.jsonl", "--max-new-tokens", "4", "--repeats", "1", "--tree", "chain:2"]
    (tmp_path / "prompts.jsonl").write_text('{"text": "import os"}\n{"text": "def main("}\n')
    options[1] = str(tmp_path / "prompts.jsonl")
    done = run(
        *("-X", "importtime", "eval/bench.py", "lookup:2", "--target", "recipes/quickstart/target"),
        *("--out", str(tmp_path / "out"), *options),
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    ours = ("written to", "this machine", "measuring chain:2")
    assert all("decodes in" in line or line.startswith(ours) for line in said)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "transformers" in names and "torchao.quantization" not in names
