"""Drafts that need no training."""

import pytest
import torch

from heads.registry import build_untrained
from tests.eval.runtime.conftest import target_of
from tests.support.refusals import refused
from tests.support.small_targets import make_target


def test_an_early_exit_holds_no_weights_of_its_own() -> None:
    target = target_of("llama")
    own = {id(parameter) for parameter in target.model.parameters()}
    parameters = list(build_untrained("early_exit:1", target).parameters())
    assert parameters and {id(parameter) for parameter in parameters} < own
    assert len(target.layers) == 3 and target.config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("name", "family", "words"),
    [
        ("lookup:", "llama", "expected lookup with a number, such as lookup:3"),
        ("lookup:0", "llama", "match of 1 to 100 tokens, got 0"),
        ("early_exit:0", "llama", "has 3 layers; name 1 to 2"),
        ("early_exit:3", "llama", "has 3 layers; name 1 to 2"),
        ("early_exit:2", "qwen3_next", "recurrent layers, which cannot take back"),
        ("early_exit:2", "t5", "does not hold its layers where they can be cut"),
    ],
)
def test_what_cannot_draft_is_refused(name: str, family: str, words: str) -> None:
    target = make_target(family, torch.float32)
    assert words in refused(build_untrained, name, target)
