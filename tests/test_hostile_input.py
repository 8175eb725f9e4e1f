"""Tests of hostile input: each gives one UserError. None of it hangs or is accepted."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoTokenizer

from eval.benchmark.prompts import held_out_prompts, suite_records
from eval.benchmark.records import apply_template, read_records
from eval.command import exit_status
from eval.runtime.sampling import Sampling
from heads.checkpoint import find_head
from heads.errors import UserError
from heads.files import check_file, is_full_disk
from heads.untrained.untrained import Lookup
from tests.faults import small_files


def test_half_a_character(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(UserError, match=r"d\.jsonl:2: expected UTF-8 text, got half of a surrogate pair"):
        list(read_records(str(path)))


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".jsonl"])
def test_names_that_are_too_long(name: str) -> None:
    for read in (lambda: read_records(name + ".jsonl"), lambda: suite_records(name), lambda: find_head(name)):
        with pytest.raises(UserError):
            read()


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ 1 + 'a' }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_a_chat_template_that_fails_as_a_program_does(template: str, tiny_target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"place: the chat template refuses turns 1 to 1 \("):
        apply_template([{"role": "user", "content": "hi"}], tokenizer, "place")


def test_numbers_without_bounds(tiny_target_dir: Path) -> None:
    with pytest.raises(UserError, match="top_k"):
        Sampling(1.0, top_k=10**20)
    with pytest.raises(UserError, match="lookup: expected a longest match of 1 to"):
        Lookup(10**8)
    with pytest.raises(UserError, match="expected at most 10000 prompts"):
        held_out_prompts(AutoTokenizer.from_pretrained(tiny_target_dir), 10**8, 64, 0)


def test_no_memory_is_the_users_to_mend(capsys: pytest.CaptureFixture[str]) -> None:
    def take() -> int:
        return len(torch.empty(2**50))

    assert exit_status(take) == 2
    assert capsys.readouterr().err.startswith("error: the memory does not suffice (")


def test_weights_that_exceed_a_limit_on_files_are_a_full_disk(tmp_path: Path) -> None:
    with small_files(10), pytest.raises(SafetensorError) as caught:
        save_file({"x": torch.zeros(100)}, tmp_path / "x.safetensors")
    assert is_full_disk(caught.value) and not is_full_disk(OSError(errno.ENOENT, "no such file"))


def test_a_folder_where_a_file_is_to_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out .*: expected a file, it is a folder"):
        check_file(tmp_path, "--out")
    check_file(tmp_path / "x.json", "--out")
