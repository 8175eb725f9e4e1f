"""A lookup before a head: which of them drafts, what the head reads, and the notation."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from heads.core.contract import Observation, split_draft
from heads.core.tree import parse_shape
from heads.methods.two_drafts import LookupFirst
from tests.eval.runtime.conftest import target_of
from tests.support.refusals import refused
from tests.support.small_heads import greedy
from tests.support.small_targets import make_drafter, open_engine


def drafter_of(kind: str, match: int = 2) -> LookupFirst:
    return LookupFirst(match, make_drafter(kind, target_of("llama")))


def test_a_row_drafts_by_lookup_after_a_match_and_else_by_the_head() -> None:
    target, head = target_of("llama"), drafter_of("medusa")
    states: dict[str, Any] = {}
    for name, drafter in (("both", head), ("lookup", head.lookup), ("head", head.head)):
        states[name] = drafter.new_state(target.shared, batch_size=3, capacity=32, shape=parse_shape("chain:3"))
        drafter.reset_rows(states[name], torch.tensor([True, True, False]))
        tokens = torch.tensor([[5, 6, 7, 5, 6], [5, 6, 7, 9, 6], [0] * 5])  # two tokens match, one does, no text
        hidden = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0)).to(target.dtype)
        places = torch.tensor([0, 0, 0]), torch.tensor([4, 4, 0])
        drafter.extend(states[name], Observation(tokens, hidden[..., :0], hidden, *places, None))

    both = head.propose(states["both"], greedy)
    lookup, alone = head.lookup.propose(states["lookup"], greedy), head.head.propose(states["head"], greedy)
    assert both.copied is not None and both.copied[:2].tolist() == [True, False]
    assert both.tokens[0].tolist() == lookup.tokens[0].tolist() == [6, 7, 5, 6]
    assert both.tokens[1].tolist() == alone.tokens[1].tolist()


@pytest.mark.parametrize(("rows", "drafted"), [(1, [16, 16, 8, 4, 3]), (2, [3] * 5)], ids=["one text", "several"])
def test_where_one_text_is_decoded_a_longer_match_is_followed_by_more_tokens(rows: int, drafted: list[int]) -> None:
    target, head, found = target_of("llama"), LookupFirst(1, make_drafter("medusa", target_of("llama"))), []
    for match in (9, 8, 4, 2, 1):
        state = head.new_state(target.shared, batch_size=rows, capacity=64, shape=parse_shape("chain:3"))
        head.reset_rows(state, torch.ones(rows, dtype=torch.bool))
        repeated = [*range(10, 10 + match)]
        tokens = torch.tensor([[*repeated, 50, 51, *repeated]] * rows)
        hidden = torch.zeros(rows, tokens.shape[1] - 1, 32, dtype=target.dtype)
        first = torch.zeros(rows, dtype=torch.int64)
        head.extend(state, Observation(tokens, hidden[..., :0], hidden, first, first + hidden.shape[1], None))
        found.append(head.propose(state, greedy).tokens.shape[1] - 1)
    assert found == drafted


def test_a_draft_keeps_its_length_under_rules_by_which_the_text_depends_on_it() -> None:
    target, head = target_of("llama"), drafter_of("eagle3", match=1)
    depths = [open_engine(target, head, "chain:3", rule=rule, max_length=64).shape.depth for rule in ("match", "ratio")]
    assert depths == [16, 3]


@pytest.mark.parametrize("skips", [True, False])
def test_the_head_drafts_only_in_rounds_that_need_it(skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it runs if a row that is not done has no match; in a graph it always runs. The text is the same."""
    target, head = target_of("llama"), drafter_of("eagle3", match=1)
    monkeypatch.setattr(LookupFirst, "skips", skips)
    ran: list[int] = []
    propose = head.head.propose

    def noted(*given: Any) -> Any:
        ran.append(1)
        return propose(*given)

    monkeypatch.setattr(head.head, "propose", noted)
    requests = [Request([5, 6, 7, 5, 6], 20, ignore_eos=True), Request([9, 8, 9, 8], 9, ignore_eos=True)]
    engine = open_engine(target, head, "chain:3", batch_size=2, max_length=64)
    outputs = engine.generate(requests)
    rounds = engine.timings.rounds
    drew = {o.first_round + n for o in outputs for n, copied in enumerate(o.copied) if not copied}
    assert len(ran) == (len(drew) if skips else rounds) and 0 < len(drew) < rounds
    alone = [engine.generate([request])[0] for request in requests]
    assert [replace(output, first_round=0) for output in outputs] == alone, "the other row changes nothing"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lookup:0+HEAD", "length of a match, 1 to 100 tokens, got 0"),
        ("lookup:+HEAD", "length of a match, 1 to 100 tokens, got nothing"),
        ("lookup:3+", "expected a head after the +, such as lookup:3+HEAD"),
        ("lookup:3+lookup:3", "names several lookups; expected one lookup, then one head"),
        ("lookup:3+lookup:2+HEAD", "names several lookups"),
        ("HEAD+lookup:3", "names a lookup behind a head; expected one lookup, then one head"),
        ("lookup:3+ONE+TWO", "names several heads"),
        ("ONE+TWO", "names several heads"),
    ],
)
def test_a_draft_is_one_lookup_then_one_head(text: str, words: str) -> None:
    assert words in refused(split_draft, text)


def test_heads_may_have_any_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a+b").mkdir()
    for name in ("runs/x", "OWNER/NAME@a+b", "a+b", "lookup:3"):
        assert split_draft(name) == (None, name)
    for name in ("runs/x", "OWNER/NAME@a+b", "a+b", "early_exit:4"):
        assert split_draft(f"lookup:12+{name}") == (12, name)
