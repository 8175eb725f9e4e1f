"""Docstrings are noun phrases or imperatives, as in PyTorch's documentation."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("folder", ["heads", "eval", "train", "scripts", "tests"])
def test_no_docstring_begins_as_a_question(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:  # a docstring, also one below a field
                case ast.Expr(value=ast.Constant(value=str(text))) if text.split()[:1]:
                    if text.split()[0] in ("What", "Whether", "How", "Which"):
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text[:60]}")
    assert not found
