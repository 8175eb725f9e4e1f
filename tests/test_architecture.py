"""The import order and the file names that keep `accelerate launch train/x.py` sound; every recipe loads."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("heads", "eval", "train", "scripts", "tests")  # each may import itself and the ones before it
LEAN = {"torch", "transformers", "safetensors", "numpy", "triton"}  # all that heads/ and eval/runtime/ may need
OPTIONAL = {"heads/target/quantization.py": {"torchao"}}
DEPENDENCIES = LEAN | {
    *("accelerate", "datasets", "deepspeed", "huggingface_hub", "hypothesis", "jinja2", "matplotlib", "mypy", "peft"),
    *("pydantic", "pytest", "requests", "rich", "ruff", "setuptools", "tokenizers", "tqdm", "wandb", "yaml"),
}
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported_names(path: Path) -> Iterator[str]:
    """The dotted name of everything a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: relative import"
            yield node.module or ""


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
        if folder == "eval/runtime":
            outside = [name for name in imported_names(path) if name.startswith("eval.") and ".runtime" not in name]
            assert not outside, f"{path.relative_to(ROOT)} imports {outside}"


def test_no_file_shadows_another_module() -> None:
    """Python puts a script's own folder first on sys.path: train/queue.py would hide queue from everything."""
    everything = [name for folder in ORDER for path in modules(folder) for name in imported_names(path)]
    taken = sys.stdlib_module_names | DEPENDENCIES | {name.split(".")[0] for name in everything} | set(ORDER)
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


def test_there_are_no_drawers() -> None:
    names = {"utils.py", "helpers.py", "misc.py", "common.py"}
    found = [path for folder in ORDER for path in modules(folder) if path.name in names]
    assert not found, found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads(path: Path) -> None:
    from train.recipe import load_recipe

    assert load_recipe(path)


STAGES = ("files", "runtime", "command", "benchmark", "reporting")  # of eval/; entries and commands come last


def stage(module: str) -> int:
    """The place of a module of eval/ in the order of its stages."""
    part = module.split(".")[1]
    return STAGES.index(part) if part in STAGES else len(STAGES)


def test_eval_measures_before_it_reports() -> None:
    for path in modules("eval"):
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name == "__init__.py":
            continue
        names = [name for name in imported_names(path) if name.startswith("eval.")]
        wrong = [name for name in names if stage(name) > stage(own)]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules("eval")}
    imports = {own: {name for name in imported_names(path) if name in files} for own, path in files.items()}
    while leaves := [own for own, names in imports.items() if not names & imports.keys()]:
        for own in leaves:
            del imports[own]
    assert not imports, f"a cycle among {sorted(imports)}"
