"""Reading training data from where it is: every fault by file and line."""

import gzip
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from eval.data.data_files import content_hash, describe_unread, read_records
from tests.support.annotations import Patch
from tests.support.refusals import refused


def texts(path: Path | str, **which: Any) -> list[str]:
    return [record["text"] for _, record in read_records(str(path), **which)]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ('{"text": "a"}\n\n{"text": "b"}\n', [":1", ":3"]),
        ('[{"text": "a"},{"text": "b"}]', [": record 1", ": record 2"]),
        ('\ufeff [\n{"text":\n"a"}\n,\n{"text": "b"} ]\n', [": record 1", ": record 2"]),
        ('\n\n[{"text":"a"},{"text":"b"}]', [": record 1", ": record 2"]),
    ],
)
def test_records_plain_and_gzipped_have_their_lines_or_numbers(text: str, places: list[str], tmp_path: Path) -> None:
    plain = tmp_path / ("a.json" if "[" in text else "a.jsonl")
    plain.write_text(text)
    zipped = plain.with_name(f"{plain.name}.gz")
    zipped.write_bytes(gzip.compress(text.encode()))
    for path in (plain, zipped):
        expected = [(f"{path}{place}", {"text": letter}) for place, letter in zip(places, "ab", strict=True)]
        assert list(read_records(str(path))) == expected
        assert texts(path, limit=1) == ["a"]


def test_parquet_and_text_files(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "a"}, {"text": "b"}]).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "a.txt").write_text("whole\nfile")
    assert texts(tmp_path / "a.parquet") == ["a", "b"] and texts(tmp_path / "a.txt") == ["whole\nfile"]


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl:2: expected a JSON record \(Expecting value at column 6\)"),
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
    assert re.search(fault, refused(lambda: list(read_records(str(tmp_path / name)))))


def test_a_missing_file_is_no_hub_data_set() -> None:
    for path in ("/no/such.jsonl", "no/such/file.jsonl", "such.jsonl"):
        assert "no such file" in refused(texts, path)


def test_a_hub_data_set_that_cannot_be_loaded_is_one_line() -> None:
    line = "nobody/nothing: no data set that can be loaded"
    assert refused(texts, "nobody/nothing", split="test").startswith(f"{line}, split test ")
    assert refused(content_hash, "nobody/nothing", split="test").startswith(f"{line} ")


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
    assert "part-*: part-1.jsonl: the array is empty" in refused(texts, f"{tmp_path}/part-*")
    (tmp_path / "a.parquet").touch()
    fault = r"expected files of one form, got \.jsonl and \.parquet; .* such as \*\.jsonl$"
    assert re.search(fault, refused(texts, tmp_path))
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", f"{tmp_path}/*.txt"):
        assert "no file there; expected a .jsonl" in refused(texts, nothing)


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
    assert re.search("whole: no split train among its files; it has .*; name one with split$", refused(texts, whole))


def test_a_table_has_null_where_no_author_wrote_one_and_json_where_one_did(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"x": {"a": 1, "deep": [{"b": 2}]}}, {"x": {"c": math.nan, "deep": [{"d": None}]}}]
    Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text('{"x": {"a": null, "b": NaN}}\n')
    of_table, of_json = ([fields["x"] for _, fields in read_records(f"{tmp_path}/x.{e}")] for e in ("parquet", "jsonl"))
    assert of_table == [{"a": 1, "deep": [{"b": 2}]}, {"deep": [{}]}] and of_json == [{"a": None, "b": None}]


def test_what_datasets_saved_to_disk_is_read(tmp_path: Path) -> None:
    train, test = (Dataset.from_list([{"text": f"{split} {n}"} for n in range(4)]) for split in ("train", "test"))
    train.save_to_disk(tmp_path / "one", num_shards=2)
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "several")
    assert texts(tmp_path / "one") == texts(tmp_path / "several") == [f"train {n}" for n in range(4)]
    assert texts(tmp_path / "several", split="test", limit=1) == ["test 0"]
    assert content_hash(str(tmp_path / "several")) != content_hash(str(tmp_path / "several"), split="test")
    assert "several: no split dev; it has test, train" in refused(texts, tmp_path / "several", split="dev")
    for shard in (tmp_path / "one").glob("*.arrow"):
        shard.unlink()
    assert re.search(r"one: no data set that can be loaded \(.*\); fetch it again", refused(texts, tmp_path / "one"))


def test_a_subset_of_a_hub_data_set(monkeypatch: Patch) -> None:
    def load(path: str, name: str | None, split: str, streaming: bool) -> list[dict[str, str]]:
        if name is None:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['all', 'part']\nX")
        return [{"text": f"{path} {name} {split}"}]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda path, name: SimpleNamespace(hash=path))
    assert texts("HuggingFaceTB/smoltalk", subset="all", split="test") == ["HuggingFaceTB/smoltalk all test"]
    assert content_hash("a/b", subset="all") not in (content_hash("a/b", subset="part"), content_hash("a/b"))
    fault = r"split train \(Config name is missing.*'all', 'part'\]\); check its name"
    assert re.search(fault, refused(texts, "HuggingFaceTB/smoltalk"))
