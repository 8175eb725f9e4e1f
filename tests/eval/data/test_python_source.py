"""Python source as text: which modules, in which split, and no more of them read than asked for."""

from pathlib import Path

import pytest

from eval.data.python_source import is_held_out, list_modules, read_split, standard_library


def source(name: str) -> str:
    return "".join(f"value_{name}_{i} = function_of_{name}({i}, 'some text')\n" for i in range(30))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """120 modules of their own text, in folders and beside folders that are passed over."""
    for n in range(120):
        path = tmp_path / f"package{n % 7}" / f"module{n}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source(f"m{n}"))
    for name in ("tests", "site-packages", "__pycache__"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "module.py").write_text(source(name))
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    return tmp_path


def test_the_split_is_a_function_of_the_path(root: Path) -> None:
    splits = {split: [name for name, _ in read_split(held_out=split, root=root)] for split in (True, False)}
    assert splits[True] and len(splits[True]) + len(splits[False]) == 120
    assert all(is_held_out(name) == held_out for held_out, names in splits.items() for name in names)


def test_a_near_copy_of_a_held_out_module_is_left_out(root: Path) -> None:
    _, text = next(read_split(held_out=True, root=root))
    copy = next(name for name in (f"copy{n}.py" for n in range(9)) if not is_held_out(name))
    (root / copy).write_text("# a copy\n" + text)
    list_modules.cache_clear()
    assert copy in [name for name, _ in list_modules(root)[False]]
    assert copy not in [name for name, _ in read_split(held_out=False, root=root)]


def test_text_comes_from_the_standard_library_alone() -> None:
    library = standard_library()
    names = [name for names in list_modules(library).values() for name, _ in names]
    assert "functools.py" in names and "json/decoder.py" in names
    assert not any(part in name for name in names for part in ("site-packages", "dist-packages", "encodings/"))
    first = next(name for name, _ in read_split(held_out=False))
    assert (library / first).is_file()
