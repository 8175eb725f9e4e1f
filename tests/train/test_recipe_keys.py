"""Every key of a recipe stands in recipes/README.md, with type, default and meaning, and in --help."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.benchmark.prompts import HELD_OUT_SUITE, HUB_SUITES
from heads.losses import LOSSES
from heads.mtp import LAYOUTS
from heads.registry import HEADS
from train.entry import KINDS, attempt
from train.recipe import Recipe
from train.recipe_keys import Key, Section, recipe_sections, with_tables
from train.usage import PAGE, RECIPE_PART, find_part, target_recipe_keys

TEXT = PAGE.read_text(encoding="utf-8")


def rows(part: str) -> dict[str, list[str]]:
    """Key -> the cells of its row in a part of the page; of several rows the last."""
    found = (line[2:-2].split(" | ") for line in find_part(TEXT, part)[0].splitlines() if line.startswith("| `"))
    return {name.strip("`"): cells for name, *cells in found}


def given_keys(tree: Any, at: str = "") -> Iterator[str]:
    """Every dotted key of a recipe's file; each entry of a list counts as its first."""
    if isinstance(tree, dict) and at != "head.fresh":
        for name, inner in tree.items():
            yield f"{at}.{name}" if at else name
            yield from given_keys(inner, f"{at}.{name}" if at else name)
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for inner in tree:
            yield from given_keys(inner, f"{at}.0")


def every_key() -> list[tuple[Section, Key]]:
    return [(section, key) for section in recipe_sections(Recipe) for key in section.keys]


def test_the_committed_tables_are_the_schema() -> None:
    assert with_tables(TEXT) == TEXT, "recipes/README.md: out of date; run python scripts/recipe_keys.py"


@pytest.mark.parametrize("kind", HEADS)
def test_every_setting_of_a_head_has_a_row_under_its_kind(kind: str) -> None:
    (section,) = (section for section in recipe_sections(Recipe) if section.title == f"`head`, kind `{kind}`")
    names = [field.name for field in fields(HEADS[kind].Settings)]
    assert [key.name for key in section.keys] == ["head.kind", "head.init_from", *(f"head.{name}" for name in names)]


def test_every_key_has_a_type_a_default_and_a_meaning_in_a_sentence() -> None:
    for section, key in every_key():
        assert key.type and key.default and re.fullmatch(r"[A-Z`].*\.", key.meaning), (section.title, key)


def test_every_key_of_every_recipe_is_on_the_page() -> None:
    recipes = [*PAGE.parent.glob("*.yaml")]
    used = {key for path in recipes for key in given_keys(yaml.safe_load(path.read_text()))}
    assert recipes and {key for key in used if not key.startswith("data.template.")} <= rows(RECIPE_PART).keys()


def test_types_and_defaults_are_those_of_the_schema() -> None:
    cells = rows(RECIPE_PART)
    assert cells["train.betas"][:2] == ["list of 2 numbers >= 0, < 1", "`[0.9, 0.95]`"]
    assert cells["eval.report.trees"][:2] == ["list of texts or null", "`null`"]
    assert cells["data.sources"][:2] == ["list of sections", "required"]
    assert cells["head.aux_layer_ids"][:2] == ["list of integers or null", "`null`"]
    assert cells["head.lora.rank"][:2] == ["integer", "`16`"]


def test_choices_in_words_are_all_of_them() -> None:
    losses = [key.meaning for _, key in every_key() if key.name == "head.loss"]
    assert len(losses) == len(HEADS) - 1  # DSpark has factors of its own instead
    assert all(f"`{name}`" in meaning for name in LOSSES for meaning in losses)
    assert all(f"`{name}`" in rows(RECIPE_PART)["eval.prompts"][2] for name in (HELD_OUT_SUITE, *HUB_SUITES))
    assert all(f"`{name}`" in rows(RECIPE_PART)["head.layout"][2] for name in LAYOUTS)


@pytest.mark.parametrize("entry", KINDS)
def test_help_lists_the_keys_of_the_entry_s_kind(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert attempt(entry, ["--help"]) == 0
    listed = re.findall(r"^  (\S+) \(", capsys.readouterr().out, flags=re.MULTILINE)
    kind = KINDS[entry]
    expected = [key.name for section, key in every_key() if kind in section.title or "`head" not in section.title]
    assert listed == expected


def test_help_of_a_target_s_recipe_lists_its_keys() -> None:
    assert "model.hidden_size (integer >= 1; required)" in target_recipe_keys()


def test_help_needs_no_torch() -> None:
    program = "import sys, train.usage as usage; usage.recipe_keys('mtp'); print('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
