"""Reading training files: every fault by file and line."""

import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset

from eval.measure.records import content_hash, read_hub, read_records
from heads.core.errors import UserError


def test_json_lines_plain_and_gzipped_give_records_with_their_lines(tmp_path: Path) -> None:
    text = '{"text": "a"}\n\n{"text": "b"}\n'
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.jsonl", "a.jsonl.gz"):
        path = tmp_path / name
        assert list(read_records(str(path))) == [(f"{path}:1", {"text": "a"}), (f"{path}:3", {"text": "b"})]
        assert len(list(read_records(str(path), limit=1))) == 1


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "a"},{"text": "b"}]',
        '\ufeff [\n{"text":\n"a"}\n,\n{"text": "b"} ]\n',
        '\n\n[{"text":"a"},{"text":"b"}]',
    ],
)
def test_an_array_gives_numbered_records(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.json", "a.json.gz"):
        path = tmp_path / name
        assert list(read_records(str(path))) == [
            (f"{path}: record 1", {"text": "a"}),
            (f"{path}: record 2", {"text": "b"}),
        ]


def test_parquet_and_text_files(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "a"}, {"text": "b"}]).to_parquet(str(tmp_path / "a.parquet"))
    assert [record["text"] for _, record in read_records(str(tmp_path / "a.parquet"))] == ["a", "b"]
    (tmp_path / "a.txt").write_text("whole\nfile")
    assert [record for _, record in read_records(str(tmp_path / "a.txt"))] == [{"text": "whole\nfile"}]


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
        ("a.jsonl", b"\n \n", r"a\.jsonl: the file is empty"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": \n',
            r"a\.jsonl:2: expected a JSON record \(Expecting value at column 9\)",
        ),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl:2: expected a JSON object with keys, got list"),
        ("a.json", b"[1]\n", r"a\.json: record 1: expected a JSON object with keys, got int"),
        ("a.json", b"[]", r"a\.json: the array is empty"),
        ("a.json", b'[{"a": 1},\n {"a": }]', r"a\.json: expected a JSON record \(.* at line 2, column 8\)"),
        ("a.json", b'\n[{"a": 1}]\n{"a": 2}', r"a\.json: expected a JSON record \(Extra data at line 3, column 1\)"),
        ("a.json", b'[{"a": "\xff"}]', r"a\.json: expected UTF-8 text"),
        ("a.json", b'[{"a": "\\ud83d"}]', r"a\.json: record 1: expected UTF-8 text, got half of a surrogate pair"),
        ("a.json", b"[" * 99_999, r"a\.json: expected a JSON record"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: expected UTF-8 text"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz: broken gzip data after line 0"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9999)[:-20], r"a\.jsonl\.gz: broken gzip data after line \d+"),
        ("a.parquet", b"PAR1", r"a\.parquet: no data set that can be loaded, .*; fetch the file again"),
        ("a.txt", b"\n", r"a\.txt: the file is empty"),
        ("a.csv", b"a,b", r"a\.csv: expected a \.jsonl"),
    ],
)
def test_bad_files_are_named_by_line(name: str, data: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=fault):
        list(read_records(str(tmp_path / name)))


@pytest.mark.parametrize("path", ["/no/such.jsonl", "no/such/file.jsonl", "such.jsonl"])
def test_a_missing_file_is_no_hub_data_set(path: str) -> None:
    with pytest.raises(UserError, match="no such file"):
        list(read_records(path))


def test_a_hub_data_set_that_cannot_be_loaded_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^nobody/nothing: no data set that can be loaded, split test [^\n]*$"):
        list(read_records("nobody/nothing", split="test"))
    with pytest.raises(UserError, match=r"^nobody/nothing: no data set that can be loaded [^\n]*$"):
        content_hash("nobody/nothing", split="test")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_that_is_found_gives_its_split(streaming: bool, tmp_path: Path) -> None:
    """Through the loader itself, as from the hub: a data set is a name, or a form of file with its files."""
    for split, text in (("train", "a"), ("test", "b")):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    options = {"streaming": True} if streaming else {"cache_dir": str(tmp_path / "cache")}
    found = list(read_hub("some/set", path="json", data_files=files, split="test", **options))
    assert found == [("some/set:1", {"text": "b"})]
