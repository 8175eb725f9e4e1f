"""--help is one screen, and --help all lists every key of the schema, with what a user needs to know of it."""

import re
from typing import get_args

import pytest

from eval.data.prompts import HELD_OUT_SUITE, HUB_SUITES
from heads.methods.method_settings import METHODS, TITLES
from heads.methods.mtp_names import LAYOUTS
from heads.parts.losses import LOSSES
from heads.parts.part_settings import Divergence
from heads.registry import HEADS, UNTRAINED
from tests.support.processes import ROOT
from train.entry import attempt
from train.recipe.recipe import KINDS, Recipe
from train.recipe.recipe_help import keys_of

KEY = re.compile(r"^  (\S+) \((.+); (required|default .+)\)\n((?: {6}.+\n)+)", flags=re.MULTILINE)


def listed(kind: str) -> dict[str, tuple[str, str, str]]:
    """Key -> its type, default and meaning."""
    found = KEY.findall(keys_of(Recipe, kind) + "\n")
    return {name: (type_, default, " ".join(meaning.split())) for name, type_, default, meaning in found}


def test_every_kind_of_head_has_settings_and_an_entry() -> None:
    assert {*KINDS.values()} == HEADS.keys() and all((ROOT / f"train/{name}.py").is_file() for name in KINDS)
    assert METHODS.keys() == HEADS.keys() and LOSSES.keys() == set(get_args(Divergence))
    untrained = {kind for kind, cls in UNTRAINED.items() if cls.__module__.startswith("heads.")}
    assert TITLES.keys() == HEADS.keys() | untrained


@pytest.mark.parametrize(("entry", "kind"), KINDS.items())
def test_help_lists_the_settings_of_the_entry_s_kind(entry: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert attempt(entry, ["--help"]) == 0
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 40 and "--help all lists" in screen and not KEY.findall(screen)
    assert attempt(entry, ["--help", "all"]) == 0
    assert {key[0] for key in KEY.findall(capsys.readouterr().out)} == listed(kind).keys()
    own = {"kind", "init_from", "serve", *METHODS[kind].settings.model_fields}
    assert {key.split(".")[1] for key in listed(kind) if key.startswith("head.")} == own


def test_every_key_has_a_meaning_in_sentences_and_the_schema_s_type_and_default() -> None:
    keys = listed("draft")
    assert all(re.fullmatch(r"[A-Za-z].*\.", meaning) for _, _, meaning in keys.values())
    assert keys["train.betas"][:2] == ("list of 2 numbers >= 0, < 1", "default [0.9, 0.95]")
    assert keys["eval.report.tree"][:2] == ("list of texts or null", "default null")
    assert keys["data.sources"][:2] == ("list of sections", "required")
    assert keys["head.lora.rank"][:2] == ("integer >= 1", "default 16")
    assert keys["eval.rule"][:2] == ("match or ratio or block or likeliest", "default match")


def test_choices_in_words_are_all_of_them() -> None:
    assert all(name in listed("mtp")["eval.prompts"][2] for name in (HELD_OUT_SUITE, *HUB_SUITES))
    assert all(name in listed("mtp")["head.layout"][2] for name in LAYOUTS)
