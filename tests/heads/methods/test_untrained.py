"""Prompt lookup against its definition in plain Python."""

import random
from typing import Any

import pytest
import torch

from heads.core.contract import Observation
from heads.core.tree import parse_shape
from heads.methods.untrained import NOTHING, Lookup, look_up

CAPACITY = 40


def reference(text: list[int], depth: int, ngram: int) -> tuple[int, list[int]]:
    """The length of the match and the draft by definition: longest match first, the latest of equals; it goes on with
    itself past the text."""
    for length in range(min(ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                going = list(text)
                for k in range(depth):
                    going.append(going[end + k])
                return length, going[len(text) :]
    return 0, text[-1:] * depth


def reference_of_vllm(text: list[int], depth: int, ngram: int) -> list[int]:
    """The draft of vLLM's `ngram`: longest match first, the first of equals, and only what the text has."""
    for length in range(min(ngram, len(text) - 1), 0, -1):
        for end in range(length, len(text)):
            if text[end - length : end] == text[-length:]:
                return text[end : end + depth]
    return []


def test_the_draft_of_vllm_is_what_followed_the_longest_first_match() -> None:
    chance = random.Random(0)
    texts = [[5, 6, 7, 5, 6, 8, 5, 6], [5, 6, 7, 8]]
    texts += [[chance.randrange(3) for _ in range(chance.randrange(1, 12))] for _ in range(60)]
    for text in texts:
        tokens, length = torch.tensor([[*text, *[9] * 4]]), torch.tensor([len(text) - 1])
        ((drafted,), _) = look_up(tokens, length, 4, 2, earliest=True)
        expected = reference_of_vllm(text, 4, 2)
        assert drafted.tolist() == [*expected, *[NOTHING] * (4 - len(expected))]


@pytest.mark.parametrize("ngram", [1, 2, 4])
def test_the_draft_is_what_followed_the_longest_latest_match(ngram: int) -> None:
    chance = random.Random(ngram)
    matched = 0
    for _ in range(60):
        texts = [
            [chance.randrange(chance.choice((2, 4, 30))) for _ in range(chance.randrange(2, CAPACITY))]
            for _ in range(4)
        ]
        tokens = torch.randint(0, 4, (4, CAPACITY))  # what lies behind the text must not matter
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        drafted, lengths = look_up(tokens, torch.tensor([len(text) - 1 for text in texts]), 6, ngram)
        for text, draft, length in zip(texts, drafted.tolist(), lengths.tolist(), strict=True):
            found, expected = reference(text, 6, ngram)
            matched += found > 0
            assert (length, draft) == (found, expected)
    assert 60 < matched < 240, "both kinds of text were drawn"


def test_a_text_of_one_token_and_a_row_without_a_text_are_drafted_all_the_same() -> None:
    tokens = torch.full((2, 8), -1)
    tokens[0, :2] = torch.tensor([5, 7])
    assert look_up(tokens, torch.tensor([1, 0]), 3, 3)[0][0].tolist() == [7, 7, 7]


def test_known_rows_stay_as_they_are_while_others_draft() -> None:
    """A row that is done observes nothing, and a row used anew forgets."""
    head: Any = Lookup(2)
    state, none = head.new_state(None, batch_size=2, capacity=16, shape=parse_shape("chain:2")), torch.zeros(2, 4, 0)
    for tokens, start, count, anew, drafted in (
        ([[1, 2, 3, 1, 2], [4, 5, 4, 5, 4]], [0, 0], [4, 4], False, [[2, 3, 1], [4, 5, 4]]),
        ([[2, 3, 9, 9, 9], [9, 9, 9, 9, 9]], [4, 5], [1, 0], False, [[3, 1, 2], [4, 5, 4]]),
        ([[7, 8, 0, 0, 0], [9, 9, 9, 9, 9]], [0, 5], [1, 0], True, [[8, 8, 8], [4, 5, 4]]),
    ):
        head.reset_rows(state, torch.tensor([anew, False]))
        places = torch.tensor(start), torch.tensor(count)
        head.extend(state, Observation(torch.tensor(tokens), none, none, *places, None))
        assert head.propose(state, None).tokens.tolist() == drafted
