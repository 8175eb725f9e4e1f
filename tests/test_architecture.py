"""Tests of the import order, of file names, so that `accelerate launch train/x.py` works, and of every recipe."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.draw_rooms import PACKAGES, ROOF, ROOMS, ROOT, file_names, imported_names, imports_of, in_order, modules
from train.core.strict_yaml import read_settings
from train.recipe.recipe import KINDS, load_recipe

ORDER = ("heads", "eval", "train", "scripts", "tests")  # each may import itself and the ones before it
LEAN = {"torch", "transformers", "safetensors", "numpy", "pydantic", "triton"}
"""What heads/ and eval/runtime/ may import."""
OPTIONAL = {
    "heads/targets/quantization.py": {"torchao"},
    "heads/targets/merge_adapter.py": {"peft"},
    "heads/targets/gguf_settings.py": {"gguf"},
}
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("folder", ORDER)
def test_imports_go_one_way(folder: str) -> None:
    later = set(ORDER[ORDER.index(folder) + 1 :]) | {"recipes"}
    for path in modules(folder):
        wrong = [name for name in imported_names(path) if name.split(".")[0] in later]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("folder", ["heads", "eval/runtime"])
def test_what_runs_a_head_needs_few_packages(folder: str) -> None:
    allowed = sys.stdlib_module_names | LEAN | {"heads"} | ({"eval"} if folder.startswith("eval") else set())
    for path in modules(folder):
        here = allowed | OPTIONAL.get(str(path.relative_to(ROOT)), set())
        wrong = [name for name in imported_names(path) if name.split(".")[0] not in here]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_have_an_order_and_import_no_roof(package: str) -> None:
    """A package's own files, its roof, import every room. Rooms import neither the roof nor each other in a circle."""
    imports = imports_of(package)
    assert ROOF not in set().union(*imports.values())
    rooms = in_order(imports)
    assert rooms[-1] == ROOF and {(package, room) for room in rooms[:-1]} == {key for key in ROOMS if key[0] == package}
    for room in rooms:
        files = file_names(ROOT / package / (room if room != ROOF else ""))
        assert len(files) <= 20, f"{package}/{room} has {len(files)} files"


def test_no_two_files_import_each_other() -> None:
    def imports(path: Path) -> set[Path]:
        """Return the files that a file imports, without imports under TYPE_CHECKING."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        hidden = {id(node) for block in typing for node in ast.walk(block)}
        found = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and id(n) not in hidden]
        names = {name for n in found for name in (str(n.module), *(f"{n.module}.{alias.name}" for alias in n.names))}
        return {(ROOT / name.replace(".", "/")).with_suffix(".py") for name in names}

    left = {path: imports(path) for folder in ORDER[:-1] for path in modules(folder)}
    while free := {path for path, near in left.items() if not near & left.keys()}:
        left = {path: near for path, near in left.items() if path not in free}
    assert not left, f"these import each other, or a file of them: {sorted(left)}"


def parts() -> Iterator[tuple[str, ast.AST]]:
    """Yield the place and the syntax of every part of the code that is no test."""
    for path in (path for folder in ORDER[:-1] for path in modules(folder)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def test_no_text_made_of_tokens_is_cleaned_up() -> None:
    """A tokenizer may ask for it: " !=" becomes "!=", which is not what the model wrote."""
    for place, node in parts():
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("tokenizer.decode"):
            assert "clean_up_tokenization_spaces=False" in map(ast.unparse, node.keywords), place


def test_a_target_is_finished_when_it_is_made() -> None:
    """No code sets the fields of a target, which would stand between what opened it and what uses it."""
    stored = [(at, n) for at, n in parts() if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    fields = {node.attr for at, node in stored if at.startswith("heads/targets/frozen_target.py")}
    assert {"eos_token_ids", "template", "placement"} <= fields
    for place, node in stored:
        assert node.attr not in fields or ast.unparse(node.value) not in ("target", "draft"), place


def test_no_file_shadows_another_module() -> None:
    """Python puts a script's own folder first on sys.path: train/queue.py would hide the module queue."""
    everything = [name for folder in ORDER for path in modules(folder) for name in imported_names(path)]
    taken = sys.stdlib_module_names | {name.split(".")[0] for name in everything} | set(ORDER)
    for folder in ("train", "eval", "scripts"):
        names = [path.stem for path in (ROOT / folder).glob("*.py")]
        names += [path.name for path in (ROOT / folder).iterdir() if path.is_dir()]
        wrong = sorted(set(names) & taken)
        assert not wrong, f"{folder}/ hides {wrong}"


def test_packages_have_empty_init_files_and_tests_have_none() -> None:
    for folder in {path.parent for package in ("heads", "eval", "train") for path in modules(package)}:
        init = folder / "__init__.py"
        assert init.is_file(), f"{init} is missing: the folder would not be installed"
        assert not init.read_text().strip(), f"{init} must stay empty"
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not list((ROOT / "scripts").rglob("__init__.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads(path: Path) -> None:
    assert load_recipe(path)


@pytest.mark.parametrize(
    "target", ["Qwen/Qwen3-8B", "HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-3.1-8B-Instruct"]
)
def test_the_recipes_of_one_public_target_share_data_context_and_tokens(target: str) -> None:
    recipes = [read_settings(path).tree for path in RECIPES]
    recipes = [recipe for recipe in recipes if recipe["target"]["path"] == target]
    assert len(recipes) >= 3
    for recipe in recipes:
        assert {**recipe["data"], "on_policy": None} == {**recipes[0]["data"], "on_policy": None}
        assert recipe["train"].get("max_steps") == recipes[0]["train"].get("max_steps")
    if not target.startswith("meta"):
        assert sorted(recipe["head"]["kind"] for recipe in recipes) == sorted(KINDS.values())
