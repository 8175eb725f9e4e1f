"""Reading training data from where it is: every fault by file and line."""

import gzip
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from eval.data.data_files import content_hash, describe_unread, read_records
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
        ("a.parquet", b"PAR1", r"a\.parquet: no data set that can be loaded \(.*\); fetch it again"),
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


def texts(path: Path | str, **which: Any) -> list[str]:
    return [record["text"] for _, record in read_records(str(path), **which)]


def test_a_folder_and_a_pattern_are_read_in_the_order_of_the_names(tmp_path: Path) -> None:
    for name in ("part-1", "part-0", "other"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "README.md").write_text("about")
    assert texts(tmp_path) == ["other", "part-0", "part-1"]
    assert texts(f"{tmp_path}/part-*.jsonl") == texts(f"{tmp_path}/**/part-?.jsonl") == ["part-0", "part-1"]
    assert [place for place, _ in read_records(f"{tmp_path}/part-*")][1] == f"{tmp_path}/part-*: part-1.jsonl:1"
    hashes = [content_hash(path) for path in (str(tmp_path), f"{tmp_path}/part-*")]
    (tmp_path / "other.jsonl").rename(tmp_path / "part-2.jsonl")
    assert content_hash(str(tmp_path)) not in hashes and content_hash(f"{tmp_path}/part-[01]*") == hashes[1]
    (tmp_path / "part-1.jsonl").write_text("[]")
    with pytest.raises(UserError, match=r"part-\*: part-1\.jsonl: the array is empty"):
        texts(f"{tmp_path}/part-*")
    (tmp_path / "a.parquet").touch()
    with pytest.raises(
        UserError, match=r"expected files of one form, got \.jsonl and \.parquet; .* such as \*\.jsonl$"
    ):
        texts(tmp_path)
    for nothing in (tmp_path / "empty", f"{tmp_path}/*.txt"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=r"no file there; expected a \.jsonl"):
            texts(nothing)


def test_a_folder_has_the_splits_that_datasets_finds_by_the_names_of_its_files(tmp_path: Path) -> None:
    names = ("data/train-00000-of-00001", "data/test-00000-of-00001", "flat/train", "flat/dev", "train_sft/all")
    for name in names:
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'{{"text": "{name}"}}\n')
    assert texts(tmp_path / "flat") == ["flat/train"] and texts(tmp_path / "flat", split="validation") == ["flat/dev"]
    assert describe_unread(str(tmp_path / "flat")) == ["files that are not of the split train are not read: dev.jsonl"]
    whole = tmp_path / "whole"
    (whole / "data").mkdir(parents=True)
    for split in ("train_sft", "test_sft"):
        (whole / f"data/{split}-00000-of-00001.jsonl").write_text(f'{{"text": "{split}"}}\n')
    assert texts(whole, split="train_sft") == ["train_sft"]
    with pytest.raises(UserError, match=r"whole: no split train among its files; it has .*; name one with split$"):
        texts(whole)


def test_a_table_has_null_where_no_author_wrote_one_and_json_where_one_did(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"x": {"a": 1, "deep": [{"b": 2}]}}, {"x": {"c": math.nan, "deep": [{"d": None}]}}]
    Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    assert [fields["x"] for _, fields in read_records(str(tmp_path / "x.parquet"))] == [
        {"a": 1, "deep": [{"b": 2}]},
        {"deep": [{}]},
    ]
    (tmp_path / "x.jsonl").write_text('{"x": {"a": null, "b": NaN}}\n')
    assert [fields["x"] for _, fields in read_records(str(tmp_path / "x.jsonl"))] == [{"a": None, "b": None}]


def test_what_datasets_saved_to_disk_is_read(tmp_path: Path) -> None:
    train, test = (Dataset.from_list([{"text": f"{split} {n}"} for n in range(4)]) for split in ("train", "test"))
    train.save_to_disk(tmp_path / "one", num_shards=2)
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "several")
    assert texts(tmp_path / "one") == texts(tmp_path / "several") == [f"train {n}" for n in range(4)]
    assert texts(tmp_path / "several", split="test", limit=1) == ["test 0"]
    assert content_hash(str(tmp_path / "several")) != content_hash(str(tmp_path / "several"), split="test")
    with pytest.raises(UserError, match="several: no split dev; it has test, train"):
        texts(tmp_path / "several", split="dev")
    for shard in (tmp_path / "one").glob("*.arrow"):
        shard.unlink()
    with pytest.raises(UserError, match=r"one: no data set that can be loaded \(.*\); fetch it again"):
        texts(tmp_path / "one")


def test_a_subset_of_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, name: str | None, split: str, streaming: bool) -> list[dict[str, str]]:
        if name is None:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['all', 'part']\nX")
        return [{"text": f"{path} {name} {split}"}]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda path, name: SimpleNamespace(hash=path))
    assert texts("HuggingFaceTB/smoltalk", subset="all", split="test") == ["HuggingFaceTB/smoltalk all test"]
    assert content_hash("a/b", subset="all") not in (content_hash("a/b", subset="part"), content_hash("a/b"))
    with pytest.raises(UserError, match=r"split train \(Config name is missing.*'all', 'part'\]\); check its name"):
        texts("HuggingFaceTB/smoltalk")
