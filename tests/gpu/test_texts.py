"""Drafted texts against plain ones at 8B widths, native and by Hugging Face's model, with CUDA graphs and without."""

from typing import Any

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.near_ties import check_near_ties
from eval.runtime.sampling_params import Sampling
from heads.core.tree import parse_shape
from heads.registry import build_untrained
from tests.gpu.conftest import Note, Sizes, forms, prompt, random_target

pytestmark = pytest.mark.gpu
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_plain_decodings(
    family: str, sizes: Sizes, device: torch.device, dtype: torch.dtype, note: Note
) -> None:
    target = random_target(family, 4, sizes, device, dtype, **FAMILIES[family])
    draft: Any = build_untrained("early_exit:3", target)
    length = sizes.prompt + sizes.tokens + max(parse_shape(tree).nodes for tree in sizes.trees)
    plain = Engine(target, None, EngineOptions(max_length=length))
    for tree in sizes.trees:
        engine = Engine(target, draft, EngineOptions(shape=parse_shape(tree), max_length=length))
        uncaptured = Engine(target, draft, EngineOptions(shape=parse_shape(tree), max_length=length))
        uncaptured.rounds.capture = None
        for temperature in (0.0, 1.0):
            samplings = [
                Sampling(temperature=temperature, seed=i, repetition_penalty=1.1 if i % 2 else 1.0)
                for i in range(sizes.texts)
            ]
            requests = [Request(prompt(sizes, i), sizes.tokens, s, (), True) for i, s in enumerate(samplings)]
            plainly = [output.tokens for output in plain.generate(requests)]
            outputs = engine.generate(requests)
            differing = [i for i, output in enumerate(outputs) if output.tokens != plainly[i]]
            given = [(requests[i], plainly[i], outputs[i].tokens) for i in differing]
            launched = uncaptured.generate(requests)
            facts: dict[str, Any] = {
                "texts": len(requests),
                "identical": len(requests) - len(differing),
                "near_ties": sum(check.is_near_tie for check in check_near_ties(engine, given)),
                "same_without_graphs": [each.tokens for each in outputs] == [each.tokens for each in launched],
                "tau": sum(each.decoded for each in outputs) / sum(each.rounds for each in outputs),
                **forms(engine),
            }
            facts["ok"] &= facts["same_without_graphs"] and facts["identical"] + facts["near_ties"] == len(requests)
            note(f"{family}, {tree}, T = {temperature:g}", **facts)
