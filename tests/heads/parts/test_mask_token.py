"""The mask token is an id that no text of the target's has."""

from pathlib import Path

import pytest

from heads.parts.head_shape import unused_id
from heads.targets.target_files import load_tokenizer
from tests.conftest import make_tiny_tokenizer

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes/quickstart/target"


def test_the_first_id_behind_the_tokenizers_own_comes_first() -> None:
    assert unused_id(make_tiny_tokenizer(), 160) == 128


@pytest.mark.parametrize("token", ["<|reserved_special_token_0|>", "<unused7>", "<extra_id_3>", "<mask>", "[unused1]"])
def test_then_a_token_in_reserve(token: str) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
    assert unused_id(tokenizer, len(tokenizer)) == tokenizer.convert_tokens_to_ids(token)


def test_then_a_byte_that_no_text_has() -> None:
    tokenizer = load_tokenizer(str(QUICKSTART))
    found = unused_id(tokenizer, len(tokenizer))
    assert found is not None and tokenizer.decode([found]) == "\ufffd"
    texts = ["".join(map(chr, range(start, start + 0x400))) for start in range(0, 0xD800, 0x400)]
    assert not any(found in ids for ids in tokenizer(texts).input_ids)


def test_then_the_unknown_token() -> None:
    tokenizer = make_tiny_tokenizer()
    assert unused_id(tokenizer, len(tokenizer)) == tokenizer.unk_token_id == 2
    tokenizer.pad_token = tokenizer.unk_token
    assert unused_id(tokenizer, len(tokenizer)) is None
