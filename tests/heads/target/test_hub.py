"""Models of the Hub at a revision: a name that says so loads that one, whatever else is cached."""

from pathlib import Path

import pytest

from heads.target.hub import repo_and_revision


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", ("owner/name", None)),
        ("owner/name@v1.0", ("owner/name", "v1.0")),
        ("owner/name@refs/pr/3", ("owner/name", "refs/pr/3")),
        ("owner/name@", ("owner/name@", None)),
        ("./owner/name@v1", ("./owner/name@v1", None)),
        ("/owner/name@v1", ("/owner/name@v1", None)),
        ("name@v1", ("name@v1", None)),
        ("user@host/name", ("user@host/name", None)),
        ("owner/name@../../x", ("owner/name@../../x", None)),
    ],
)
def test_only_a_hub_id_is_cut_at_its_revision(name: str, expected: tuple[str, str | None]) -> None:
    assert repo_and_revision(name) == expected


def test_a_folder_is_taken_as_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a@b").mkdir(parents=True)
    assert repo_and_revision("runs/a@b") == ("runs/a@b", None)
