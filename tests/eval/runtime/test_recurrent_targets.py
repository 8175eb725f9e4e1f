"""Hybrid targets in the runtime: what transformers generates, whatever is drafted, whoever sits in the next row."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from eval.runtime.engine import Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.model import FrozenTarget
from heads.tree import parse_shape
from tests.closeness import assert_close
from tests.small_targets import HYBRIDS, OTHER_HYBRIDS, make_hybrid, open_engine
from tests.waiting import NoWaiting

DTYPES = [torch.float32, torch.float64]
QUICK = {("qwen3_5_text", torch.float32), ("bamba", torch.float32)}
CASES = [
    pytest.param(family, dtype, marks=() if (family, dtype) in QUICK else pytest.mark.slow)
    for family in HYBRIDS | OTHER_HYBRIDS
    for dtype in DTYPES
]
MAX_LENGTH = 384


def prompts() -> list[list[int]]:
    """Nine prompts of uneven lengths, one longer than a chunk of a prompt."""
    draw = random.Random(1)
    return [[draw.randrange(3, 61) for _ in range(n)] for n in (3, 9, 1, 30, 5, 17, 300, 2, 64)]


def requests(new: int = 24) -> list[Request]:
    """Greedy and sampled ones in turns."""
    return [Request(ids, new, Sampling(float(n % 2), seed=n), ignore_eos=True) for n, ids in enumerate(prompts())]


def generated(target: FrozenTarget, ids: list[int], new: int) -> list[int]:
    """The greedy text of transformers, with a cache of its own."""
    model: Any = target.model
    return model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_drafts_change_no_token(family: str, dtype: torch.dtype, scripted_head: Callable[..., Any]) -> None:
    """Plain decoding gives what transformers generates, and every draft what plain decoding gives."""
    target = make_hybrid(family, dtype)
    target.check()
    greedy = [Request(ids, 24) for ids in prompts()]
    outputs = open_engine(target, None, batch_size=3, max_length=MAX_LENGTH).generate(greedy)
    assert [output.tokens for output in outputs] == [generated(target, ids, 24) for ids in prompts()]
    assert len({tuple(output.tokens) for output in outputs}) > 6
    plain = [output.tokens for output in open_engine(target, None, max_length=MAX_LENGTH).generate(requests())]
    known = [[*ids, *tokens] for ids, tokens in zip(prompts(), plain, strict=True)]
    for text, batch_size in (("chain:4", 1), ("chain:4", 8), ("chain:1", 3), ("none", 8)):
        shape = parse_shape(text)
        head = scripted_head(target, known, right=0.7) if shape.depth else None
        engine = open_engine(target, head, shape, batch_size=batch_size, max_length=MAX_LENGTH)
        outputs = engine.generate(requests())
        assert [output.tokens for output in outputs] == plain
        accepted = {count for output in outputs for count in output.accepted}
        assert accepted == set(range(shape.depth + 1)), "chains of every length are accepted"


@pytest.mark.parametrize("place", range(1, 9))
def test_eos_cuts_inside_an_accepted_chain(place: int, scripted_head: Callable[..., Any]) -> None:
    target = copy.copy(make_hybrid("qwen3_next"))
    request = Request(prompts()[5], 16, Sampling(1.0, seed=2))
    free = open_engine(target, None, max_length=64).generate([replace(request, ignore_eos=True)])[0].tokens
    target.eos_token_ids = (free[place],)
    end = free.index(free[place]) + 1
    head = scripted_head(target, [[*request.prompt, *free]], right=1.0)
    others = [Request(ids, 12, ignore_eos=True) for ids in prompts()[:3]]
    plain = open_engine(target, None, max_length=64).generate(others)
    outputs = open_engine(target, head, "chain:4", batch_size=2, max_length=64).generate([request, *others])
    assert outputs[0].tokens == free[:end] and outputs[0].finish_reason == "eos"
    assert [output.tokens for output in outputs[1:]] == [output.tokens for output in plain], "its row is taken over"


def test_trees_are_refused(scripted_head: Callable[..., Any]) -> None:
    target = make_hybrid("qwen3_5_text")
    with pytest.raises(UserError, match=r"qwen3_5_text: its recurrent layers .* use a chain"):
        open_engine(target, scripted_head(target, []), "tree:3x2x6", max_length=64)


@pytest.mark.parametrize("family", HYBRIDS)
def test_one_document_a_row(family: str) -> None:
    target = make_hybrid(family)
    tokens, positions = torch.arange(3, 11)[None], torch.arange(8)[None]
    padded = torch.tensor([[0, 0, 0, 0, 0, -1, -1, -1]])
    found = target.packed_features(tokens, positions, padded, (1,)).hidden[:, :5]
    assert_close(found, target.alone(tokens[:, :5]), roundings=256)
    with pytest.raises(UserError, match="give each training row one document"):
        target.packed_features(tokens, positions, padded.abs(), (1,))


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
@torch.inference_mode()
def test_no_round_waits_for_the_host(family: str) -> None:
    engine = open_engine(make_hybrid(family), None, batch_size=2, max_length=64, pinned=4)
    read_prompts(engine.decoder, dict(enumerate(requests()[:2])))
    with NoWaiting():
        engine.decoder.round(64)


def test_a_family_that_reads_no_prompt_in_pieces_is_refused() -> None:
    """Mamba's first form, in Jamba, begins every piece without a state."""
    sizes: Any = dict(attn_layer_offset=1, attn_layer_period=3, num_experts=2, mamba_d_state=8, mamba_dt_rank=4)
    with pytest.raises(UserError, match="does not take tree masks, positions and states"):
        open_engine(make_hybrid("jamba", **sizes), None, max_length=64)
