"""Drafts that need no training: the text is the target's own, and some of it was drafted."""

from collections.abc import Callable

import pytest

from eval.runtime.engine import Engine, Request
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.registry import build_untrained
from heads.target import FrozenTarget
from heads.tree import parse_shape

TargetOf = Callable[[str], FrozenTarget]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_text_is_the_targets_and_copied_text_is_accepted(
    batch_size: int, target_of: TargetOf, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    samplings = [Sampling(), Sampling(temperature=1.0, seed=3)]
    requests = [Request(p, 20, samplings[i % 2], ignore_eos=i % 3 > 0) for i, p in enumerate(prompts)]
    plain = Engine(target, batch_size=batch_size, max_length=192).generate(requests)
    # Seen once before, a greedy text is drafted from there.
    requests += [Request([*p, *o.tokens, *p], 20) for p, o in zip(prompts, plain, strict=True)]
    plain = Engine(target, batch_size=batch_size, max_length=192).generate(requests)
    head = build_untrained("lookup:3", target)
    engine = Engine(target, head, shape=parse_shape("chain:4"), batch_size=batch_size, max_length=192)
    for _ in range(2):  # rows are used again
        outputs = engine.generate(requests)
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    assert sum(sum(output.accepted) for output in outputs) > 0


def test_what_it_cannot_draft_is_refused(target_of: TargetOf) -> None:
    target = target_of("llama")
    with pytest.raises(UserError, match="lookup has one guess at a time; ask for a chain, such as chain:3"):
        Engine(target, build_untrained("lookup:3", target), shape=parse_shape("tree:3x2x6"), max_length=64)
    with pytest.raises(UserError, match="expected lookup with a number, such as lookup:3"):
        build_untrained("lookup:", target)
    with pytest.raises(UserError, match="at least 1 token, got 0"):
        build_untrained("lookup:0", target)
