"""Drafts that need no training: the text is the target's own, and some of it was drafted."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.registry import build_untrained
from heads.target.model import FrozenTarget
from tests.eval.runtime.conftest import FAMILIES
from tests.small_targets import HYBRIDS, make_hybrid, open_engine

TargetOf = Callable[[str], FrozenTarget]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_text_is_the_targets_and_copied_text_is_accepted(
    batch_size: int, target_of: TargetOf, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    samplings = [Sampling(), Sampling(temperature=1.0, seed=3)]
    requests = [Request(p, 20, samplings[i % 2], ignore_eos=i % 3 > 0) for i, p in enumerate(prompts)]
    plain = open_engine(target, None, batch_size=batch_size, max_length=192).generate(requests)
    # Seen once before, a greedy text is drafted from there.
    requests += [Request([*p, *o.tokens, *p], 20) for p, o in zip(prompts, plain, strict=True)]
    plain = open_engine(target, None, batch_size=batch_size, max_length=192).generate(requests)
    head = build_untrained("lookup:3", target)
    engine = open_engine(target, head, "chain:4", batch_size=batch_size, max_length=192)
    for _ in range(2):  # rows are used again
        outputs = engine.generate(requests)
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    assert sum(sum(output.accepted) for output in outputs) > 0


@pytest.mark.parametrize("drafter", ["lookup:3", "early_exit:2"])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_every_family_takes_its_drafts(family: str, drafter: str, target_of: TargetOf) -> None:
    """A recurrent target takes no early exit: its layers cannot take back what they drafted."""
    target = make_hybrid(family) if family in HYBRIDS else target_of(family)
    requests = [Request([5, 7, 9, 5, 7], 12)]
    plain = open_engine(target, None, max_length=64).generate(requests)[0]
    if family in HYBRIDS and drafter == "early_exit:2":
        with pytest.raises(UserError, match="recurrent layers, which cannot take back"):
            build_untrained(drafter, target)
        return
    engine = open_engine(target, build_untrained(drafter, target), "chain:3", max_length=64)
    assert engine.generate(requests)[0].tokens == plain.tokens


def test_what_it_cannot_draft_is_refused(target_of: TargetOf) -> None:
    target = target_of("llama")
    with pytest.raises(UserError, match="lookup has one guess at a time; ask for a chain, such as chain:3"):
        open_engine(target, build_untrained("lookup:3", target), "tree:3x2x6", max_length=64)
    with pytest.raises(UserError, match="expected lookup with a number, such as lookup:3"):
        build_untrained("lookup:", target)
    with pytest.raises(UserError, match="match of 1 to 100 tokens, got 0"):
        build_untrained("lookup:0", target)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "deepseek_v3", "gpt2"])
def test_an_early_exit_drafts_what_its_layers_alone_would_say(
    family: str, target_of: TargetOf, prompts: list[list[int]]
) -> None:
    """Greedy chains are compared with a target whose later layers are cut off, run from the start each time."""
    target = target_of(family)
    cut = copy.deepcopy(target)
    del cut.layers[2:]
    head = build_untrained("early_exit:2", target)
    engine = open_engine(target, head, "chain:3", max_length=64)
    text = [*prompts[5]]
    proposals = []
    propose = head.propose

    def noted(state: Any, pick: Any) -> Any:
        proposals.append(propose(state, pick).tokens[0].tolist())
        return propose(state, pick)

    head.propose = noted
    output = engine.generate([Request(text, 12, ignore_eos=True)])[0]
    head.propose = propose
    known = [*text, *output.tokens]
    place = len(text)
    for drafted, accepted in zip(proposals, output.accepted, strict=True):
        going = known[: place + 1]
        for _ in range(3):
            ids = torch.tensor([going])
            position = torch.arange(len(going))[None]
            hidden = cut.features(
                ids, positions=position, visible=position[:, None] <= position[..., None], key_positions=position
            ).hidden
            going.append(int(cut.shared.lm_head(hidden[:, -1]).argmax()))
        assert drafted == going[place:]
        place += accepted + 1


def test_an_early_exit_holds_no_weights_of_its_own(target_of: TargetOf) -> None:
    target = target_of("llama")
    own = {id(parameter) for parameter in target.model.parameters()}
    head = build_untrained("early_exit:1", target)
    parameters = list(head.draft.parameters())
    assert parameters and {id(parameter) for parameter in parameters} < own
    assert len(target.layers) == 3 and target.config.num_hidden_layers == 3
    for number in ("0", "3"):
        with pytest.raises(UserError, match="has 3 layers; name 1 to 2"):
            build_untrained(f"early_exit:{number}", target)
