"""Commands as processes: --help imports nothing heavy, no library prints, and a run that was killed goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, form_launcher, start, wait_for
from tests.support.runs import forget_accelerator, lines, same, weights
from train.entry import attempt

HEAVY = ("torch", "transformers", "matplotlib", "wandb", "accelerate", "datasets", "deepspeed", "peft")
ENTRIES = [
    str(path.relative_to(ROOT))
    for folder in ("train", "eval", "scripts")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]
MISTYPED = [
    ["eval/bench.py", "--nonsense"],
    ["eval/bench.py"],
    ["train/eagle.py", "no.yaml"],
    ["train/eagle.py", "--model", "x", "--data", "x.jsonl", "train.sead=3"],
    ["train/eagle.py", "recipes/quickstart.yaml", "train.max_steps"],
    ["train/eagle.py", "recipes/quickstart.yaml", "train.sead=3"],
]
LOOK = """
import contextlib, io, json, os, runpy, sys
found, root = [], os.getcwd()
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
others = [place for place in sys.path[1:] if os.path.realpath(place) != root]
for words in json.loads(sys.argv[1]):
    if os.path.dirname(words[0]) != sys.path[0]:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("heads", "eval", "train")]:
            del sys.modules[name]
    sys.argv, sys.path[:] = words, [os.path.dirname(words[0]), *others]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            found.append([ended.code or 0, out.getvalue(), err.getvalue()])
    sys.path[0] = os.path.dirname(words[0])
print(json.dumps([found, [name for name in json.loads(HEAVY) if sys.modules.get(name)]]))
"""
TABLE = """
from rich.console import Console
from eval.core.command_line import exit_status

def show() -> int:
    for _ in range(9999):
        Console().print("a row of a table")
    return 0

raise SystemExit(exit_status(show))
"""


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    given: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.run([sys.executable, *words], env=environment, **given | options)  # type: ignore[call-overload, no-any-return]


def test_neither_help_nor_a_mistyped_command_imports_anything_heavy() -> None:
    """Nor do they need to be installed: a clone is enough, as the first command of each folder shows."""
    for entry in ENTRIES:
        assert "\nsys.path.insert(0, " in (ROOT / entry).read_text(), entry
    commands = [[entry, "--help"] for entry in ENTRIES] + MISTYPED
    done = run("-c", LOOK.replace("HEAVY", repr(json.dumps(HEAVY))), json.dumps(commands))
    found, heavy = json.loads(done.stdout)
    assert done.stderr == "" and heavy == [] and len(found) == len(commands)
    for (entry, *_), (status, out, err) in zip(commands, found, strict=True):
        if [entry, *_] in MISTYPED:
            assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
        else:
            assert status == 0 and "usage: " in out and err == "", entry
            assert not any(f"(default: {value})" in out for value in ("", "True", "False", "()", "None")), entry


def test_what_a_run_may_do_without_is_imported_where_it_is_used() -> None:
    files = [path for folder in ("heads", "eval", "train", "scripts") for path in (ROOT / folder).rglob("[!_]*.py")]
    own = [path for path in files if path.parent.name != "inside"]  # which run in the environments of engines
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in own]
    look = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print(*sys.modules)"
    done = run("-c", look, *names)
    assert done.returncode == 0 and not {"wandb", "deepspeed", "openai"} & set(done.stdout.split()), done.stderr


@pytest.mark.parametrize("words", [["train/eagle.py", "--help"], ["-c", TABLE]], ids=["help", "a table"])
def test_output_that_nobody_reads_ends_a_command_quietly(words: list[str]) -> None:
    """`rich` would end the command with status 1, which means that an output was not the target's own."""
    read, write = os.pipe()
    os.close(read)
    done = run(*words, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_launched_run_that_was_killed_goes_on_to_the_same_weights(tiny_run: Path, tmp_path: Path) -> None:
    """By `accelerate launch` and the configuration that comes with it, which says nothing itself."""
    settings = ["train.max_steps=24", "train.checkpoint_every=2", "eval.max_new_tokens=4"]
    shutil.copytree(tiny_run, tmp_path, dirs_exist_ok=True)
    launch = form_launcher("local", "-q")
    killed = start(Path("recipe.yaml"), "output_dir=broken", *settings, launcher=launch, folder=tmp_path)
    wait_for(tmp_path / "broken", 3, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    said, _ = killed.communicate()
    assert "usage" not in said and "Warning" not in said
    assert max(line["step"] for line in lines(tmp_path / "broken")) < 24
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for folder in ("broken", "whole"):
            forget_accelerator()
            assert attempt("eagle", ["recipe.yaml", f"output_dir={folder}", *settings]) == 0
        forget_accelerator()
    assert same(weights(tmp_path / "broken", 24), weights(tmp_path / "whole", 24))


@pytest.mark.slow
def test_no_library_speaks_before_a_command_does(tmp_path: Path) -> None:
    """The command loads a model. Both streams have only our own lines."""
    (tmp_path / "prompts.jsonl").write_text('{"text": "import os"}\n{"text": "def main("}\n')
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--repeats", "1"]
    done = run(
        *("eval/bench.py", "lookup:2", "--target", "recipes/quickstart/target"),
        *("--out", str(tmp_path / "out"), "--tree", "chain:2", *options),
    )
    assert done.returncode == 0, done.stderr
    ours = ("written to", "this machine", "measuring chain:2")
    assert all("decodes in" in line or line.startswith(ours) for line in done.stderr.splitlines())
