"""Reading training files: every fault by file and line."""

import gzip
from pathlib import Path

import pytest
from datasets import Dataset

from eval.measure.records import content_hash, read_records
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
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": \n',
            r"a\.jsonl:2: expected a JSON record \(Expecting value at column 9\)",
        ),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl:2: expected a JSON object with keys, got list"),
        ("a.json", b'[{"a": 1},\n {"a": }]', r"a\.json: expected a JSON record \(.* at line 2, column 8\)"),
        ("a.json", b'[{"a": "\\ud83d"}]', r"a\.json: record 1: expected UTF-8 text, got half of a surrogate pair"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: expected UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9999)[:-20], r"a\.jsonl\.gz: broken gzip data after line \d+"),
        ("a.parquet", b"PAR1", r"a\.parquet: no data set that can be loaded, .*; fetch the file again"),
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
