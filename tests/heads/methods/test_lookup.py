"""Prompt lookup against its definition in plain Python."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads.core.contract import Observation
from heads.core.tree import parse_shape
from heads.methods.untrained import Lookup, look_up

CAPACITY = 40


def reference(text: list[int], depth: int, ngram: int) -> list[int] | None:
    """The draft by definition: longest match first, the latest of equals; it goes on with itself past the text."""
    for length in range(min(ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                going = list(text)
                for k in range(depth):
                    going.append(going[end + k])
                return going[len(text) :]
    return None


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
        drafted = look_up(tokens, torch.tensor([len(text) - 1 for text in texts]), 6, ngram).tolist()
        for text, draft in zip(texts, drafted, strict=True):
            expected = reference(text, 6, ngram)
            matched += expected is not None
            assert draft == (expected if expected is not None else [text[-1]] * 6)
    assert 60 < matched < 240, "both kinds of text were drawn"


def test_a_text_of_one_token_and_a_row_without_a_text_are_drafted_all_the_same() -> None:
    tokens = torch.full((2, 8), -1)
    tokens[0, :2] = torch.tensor([5, 7])
    assert look_up(tokens, torch.tensor([1, 0]), 3, 3)[0].tolist() == [7, 7, 7]


def test_known_rows_stay_as_they_are_while_others_draft() -> None:
    """A row that is done observes nothing, and a row used anew forgets."""
    head, shared = Lookup(2), None
    state = head.new_state(shared, batch_size=2, capacity=16, shape=parse_shape("chain:2"))  # type: ignore[arg-type]
    observe = observer(head, state)
    observe([[1, 2, 3, 1, 2], [4, 5, 4, 5, 4]], [0, 0], [4, 4])
    assert head.propose(state, None).tokens.tolist() == [[2, 3, 1], [4, 5, 4]]  # type: ignore[arg-type]
    observe([[2, 3, 9, 9, 9], [9, 9, 9, 9, 9]], [4, 5], [1, 0])
    assert head.propose(state, None).tokens.tolist() == [[3, 1, 2], [4, 5, 4]]  # type: ignore[arg-type]
    head.reset_rows(state, torch.tensor([True, False]))
    observe([[7, 8, 0, 0, 0], [9, 9, 9, 9, 9]], [0, 5], [1, 0])
    assert head.propose(state, None).tokens.tolist() == [[8, 8, 8], [4, 5, 4]]  # type: ignore[arg-type]


def observer(head: Lookup, state: Any) -> Callable[[list[list[int]], list[int], list[int]], None]:
    def observe(tokens: list[list[int]], start: list[int], count: list[int]) -> None:
        none = torch.zeros(len(tokens), len(tokens[0]) - 1, 0)
        head.extend(
            state, Observation(torch.tensor(tokens), none, none, torch.tensor(start), torch.tensor(count), None)
        )

    return observe
