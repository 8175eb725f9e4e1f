"""Every command in the README exists and is understood."""

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from eval.settings import to_settings
from train.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [
    command.strip()
    for block in BLOCKS
    for line in block.splitlines()
    for command in line.split("&&")
    if command.strip().startswith(("accelerate launch ", "python "))
]


def test_there_are_commands() -> None:
    assert any(command.startswith("accelerate launch train/eagle.py recipes/quickstart.yaml") for command in COMMANDS)
    assert any(command.startswith("python eval/bench.py") for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    program, *arguments = words[2:] if words[0] == "accelerate" else words[1:]
    assert (ROOT / program).is_file(), f"the README runs {program}, which is not there"
    if program.startswith("train/"):
        assert load_recipe(arguments[0], arguments[1:])
        return
    module: Any = import_module(program.removesuffix(".py").replace("/", "."))
    options = module.parse_arguments(arguments)
    if program in ("eval/bench.py", "eval/compare.py"):
        assert to_settings(options)


def test_the_tree_of_files_is_true() -> None:
    tree = next(block for block in BLOCKS if block.startswith("heads/"))
    folder = ""
    for line in tree.splitlines():
        if match := re.match(r"(\w+/)", line):
            folder = match[1]
            assert (ROOT / folder).is_dir()
        for name in re.findall(r"\b(\w+\.py)\b", line):
            places = [ROOT / folder / name, ROOT / folder / "runtime" / name]
            assert any(place.is_file() for place in places), f"{folder}{name} is in the README's tree and nowhere else"
