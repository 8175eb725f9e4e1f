"""Token maps: the file that SGLang reads, the same texts over any vocabulary, and the bytes that a small one saves."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.targets.target_files import load_tokenizer
from scripts.token_map import main
from tests.conftest import TEXT, make_tiny_tokenizer, small_recipe
from tests.support.native_mtp import D, V, write_native
from tests.support.refusals import refused
from tests.support.runs import forget_accelerator, write_recipe


@pytest.fixture
def words(tmp_path: Path, without_charts: None) -> list[str]:
    """Arguments of the command for a target with one module, whose files are in the test's folder."""
    write_native(tmp_path / "target", "mimo")
    make_tiny_tokenizer().save_pretrained(tmp_path / "target")
    recipe = small_recipe(tmp_path, tmp_path / "target")
    recipe["head"] = {"kind": "mtp", "native": True}
    recipe["eval"] |= {"tree": "chain:3", "report": {"repeats": 1}}
    forget_accelerator()
    return [str(write_recipe(recipe))]


def test_a_target_s_own_module_drafts_over_the_most_frequent_labels(words: list[str], tmp_path: Path) -> None:
    seen = Counter(load_tokenizer(str(tmp_path / "target"))(TEXT)["input_ids"])
    given = tmp_path / "mine.pt"
    torch.save([7, 5, 9, 5], given)
    assert main([*words, "--sizes", "4", "train.seed=1", "--token-map", str(given)]) == 0
    ids = torch.load(tmp_path / "run/token-map-4.pt", weights_only=True)
    assert type(ids) is list and len(ids) == 4 and {type(token) for token in ids} == {int}
    assert min(seen[token] for token in ids) >= max(count for token, count in seen.items() if token not in ids)
    made = json.loads((tmp_path / "run/compare.json").read_text())
    assert made["exact"]["identical"] == made["exact"]["prompts"] == 6
    figures: dict[str, Any] = {m["head"]: m for m in made["measurements"]}
    read = {name: m["draft_bytes"] for name, m in figures.items()}
    assert figures.keys() == {"mtp-whole", "mtp-mine", "mtp-4"}
    for name, size in (("mtp-mine", 3), ("mtp-4", 4)):
        assert read["mtp-whole"] - read[name] == 3 * 4 * D * (V - size)  # chain:3, in float32


@pytest.mark.parametrize(
    ("option", "held", "named"),
    [
        ("--token-map=map.pt", [5, V], f"map.pt: token {V} is none of the target's {V}: it is the map of another"),
        ("--token-map=map.pt", {"a": 1}, "map.pt: expected a list of token ids"),
        (f"--sizes={V + 1}", [], f"--sizes: expected at most {V}"),
        ("head.kind=medusa", [], "head.kind: expected mtp"),
    ],
)
def test_what_is_refused(option: str, held: Any, named: str, words: list[str], tmp_path: Path) -> None:
    torch.save(held, tmp_path / "map.pt")
    native = ["head.native=null"] * option.startswith("head.kind")
    assert named in refused(main, [*words, option.replace("map.pt", str(tmp_path / "map.pt")), *native])
