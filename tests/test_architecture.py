"""Tests of the import order, of file names, so that `accelerate launch train/x.py` works, and of every recipe."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("heads", "eval", "train", "scripts", "tests")  # each may import itself and the ones before it
LEAN = {"torch", "transformers", "safetensors", "numpy", "triton"}  # what heads/ and eval/runtime/ may import
OPTIONAL = {"heads/target/quantization.py": {"torchao"}, "heads/target/load.py": {"peft"}}
DEPENDENCIES = LEAN | {
    *("accelerate", "datasets", "deepspeed", "huggingface_hub", "hypothesis", "jinja2", "matplotlib", "openai"),
    "omegaconf",
    *(
        "mypy",
        "peft",
        "pydantic",
        "pytest",
        "requests",
        "rich",
        "ruff",
        "setuptools",
        "tokenizers",
        "tqdm",
        "wandb",
        "yaml",
    ),
}
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted names of all imports of a file, at the top or inside a function."""
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


def imported_files(path: Path) -> Iterator[str]:
    """Yield the modules of this repository that a file imports, without imports under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    hidden = {id(node) for block in typing for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in hidden:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                if (ROOT / name.replace(".", "/")).with_suffix(".py").is_file():
                    yield name


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of nodes that can reach each other."""
    reach = {node: set(near) for node, near in graph.items()}
    for middle in graph:
        for node in graph:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    return [{b for b in reach[a] if a in reach.get(b, ())} for a in graph if a in reach[a]]


def folder_of(name: str) -> str:
    """Return the node of a module: its folder, or the module itself if its folder has subfolders."""
    parts = name.split(".")
    beside = any(path.is_dir() and path.name != "__pycache__" for path in (ROOT / "/".join(parts[:-1])).iterdir())
    return name if beside else ".".join(parts[:-1])


def test_no_two_files_import_each_other() -> None:
    """The same is true of the folders of heads/, including those of C and Triton."""
    paths = [path for folder in ORDER[:-1] for path in modules(folder)]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    files = {names[path]: set(imported_files(path)) for path in paths}
    assert not cycles(files)
    folders: dict[str, set[str]] = {folder_of(name): set() for name in files if name.startswith("heads")}
    for name, imported in files.items():
        if name.startswith("heads"):
            folders[folder_of(name)] |= {folder_of(other) for other in imported} - {folder_of(name)}
    assert not cycles(folders)


def test_no_file_shadows_another_module() -> None:
    """Python puts a script's own folder first on sys.path: train/queue.py would hide the module queue."""
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


STAGES = ("files", "runtime", "command", "benchmark", "reporting")  # of eval/; entries come last


def stage(module: str) -> int:
    """Return the index of a module of eval/ in the order of STAGES."""
    part = module.split(".")[1]
    return STAGES.index(part) if part in STAGES else len(STAGES)


def test_eval_measures_before_it_reports() -> None:
    """Entries import reports, reports import measurements, and measurements import the runtime. There are no imports in
    the other direction."""
    for path in modules("eval"):
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = [name for name in imported_names(path) if name.startswith("eval.")]
        wrong = [name for name in names if stage(name) > stage(own)]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("folder", ORDER)
def test_no_docstring_begins_as_a_question(folder: str) -> None:
    """Docstrings, also those below a field, are noun phrases or imperatives, as in PyTorch's documentation."""
    found = []
    for path in modules(folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.split()[:1]:
                    if text.split()[0] in ("What", "Whether", "How", "Which"):
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text[:60]}")
    assert not found
