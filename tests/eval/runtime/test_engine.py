"""Whatever is drafted, the text is the target's own, to the token."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import pytest
import torch

from eval.runtime.engine import Output, Request
from eval.runtime.memory import check_memory, row_bytes
from eval.runtime.request import Reports
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.model import FrozenTarget
from heads.tree import ROOT_ONLY, TreeShape, parse_shape
from tests.small_targets import open_engine

TargetOf = Callable[[str], FrozenTarget]
HeadType = Callable[..., Any]
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral-window", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"),
    *("deepseek_v3", "gpt_neox", "olmo2", "granite", "cohere2", "gpt_oss", "glm4", "starcoder2", "smollm3", "gpt2"),
    *("falcon", "llama-float32", "qwen3-float32"),
)
WARM = Sampling(temperature=0.9, seed=4)
FILTERED = Sampling(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=-8)
GREEDY = Sampling()
CHAIN, TREE = parse_shape("chain:4"), parse_shape("tree:3x4x12")


def make_requests(prompts: Sequence[Sequence[int]], *, new: int = 20, eos: bool = False) -> list[Request]:
    """Requests of mixed sampling, limits and seeds."""
    samplings = [GREEDY, WARM, FILTERED, Sampling(temperature=0.7, top_p=0.8, seed=11)]
    return [
        Request(prompt, max(1, new - 3 * (i % 4)), samplings[i % 4], ignore_eos=not eos)
        for i, prompt in enumerate(prompts)
    ]


def decode_plainly(target: FrozenTarget, requests: Sequence[Request], **settings: Any) -> list[Output]:
    return open_engine(target, None, max_length=192, **settings).generate(requests)


def sequences(requests: Sequence[Request], outputs: Sequence[Output]) -> list[list[int]]:
    return [[*request.prompt, *output.tokens] for request, output in zip(requests, outputs, strict=True)]


def texts(outputs: Sequence[Output]) -> list[tuple[list[int], str]]:
    return [(output.tokens, output.finish_reason) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_what_transformers_generates(
    family: str, target_of: TargetOf, prompts: list[list[int]]
) -> None:
    target = target_of(family)
    generate: Any = target.model.generate  # typed by the library as something that cannot be called
    chosen = [prompts[10], prompts[2]]
    outputs = decode_plainly(target, [Request(p, 16) for p in chosen], batch_size=2)
    for prompt, output in zip(chosen, outputs, strict=True):
        ids = torch.tensor([prompt])
        theirs = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert output.tokens == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token_in_any_family(
    family: str, target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    target = target_of(family)
    requests = make_requests(prompts[4:9], new=14)
    plain = decode_plainly(target, requests)
    for shape in (CHAIN, TREE):
        head = scripted_head(target, sequences(requests, plain), duplicates=shape is TREE)
        engine = open_engine(target, head, shape, batch_size=3, max_length=192)
        outputs = engine.generate(requests)
        assert texts(outputs) == texts(plain)
        assert sum(sum(output.accepted) for output in outputs) > 0


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("shape", ["chain:1", "chain:5", "tree:4x3x9", "tree:5x1x3", "static:2.1.2"])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_text_is_independent_of_head_shape_and_batch(
    right: float, shape: str, batch_size: int, target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    requests = make_requests(prompts[4:], new=14, eos=True)
    plain = decode_plainly(target, requests, batch_size=4)
    head = scripted_head(target, sequences(requests, plain), right=right, duplicates=True)
    tree = parse_shape(shape)
    if tree.paths is not None:
        tree = TreeShape(tree.depth, tree.top_k, tree.nodes, text=shape)
    engine = open_engine(target, head, tree, batch_size=batch_size, max_length=192)
    outputs = engine.generate(requests)
    assert texts(outputs) == texts(plain)
    for output in outputs:
        assert output.rounds == len(output.accepted) == len(output.reached)
        emitted = sum(output.accepted) + output.rounds
        assert emitted - (len(output.tokens) - 1) in (0, 1), "only the last round may end on a drafted token"
        assert len(output.drafted()) == len(output.tokens)
        assert all(a <= r <= min(a + 1, tree.depth) for a, r in zip(output.accepted, output.reached, strict=True))
        if right == 0:
            assert not any(output.accepted)


def test_the_limit_cuts_inside_an_accepted_path(
    target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    longest = Request(prompts[3], 16, WARM, ignore_eos=True)
    known = sequences([longest], decode_plainly(target, [longest]))
    for limit in range(1, 16):
        head = scripted_head(target, known, right=1.0)
        request = Request(prompts[3], limit, WARM, ignore_eos=True)
        output = open_engine(target, head, CHAIN, max_length=64).generate([request])[0]
        assert output.tokens == known[0][len(prompts[3]) :][:limit]
        assert output.finish_reason == "length"
        left = limit - 1
        assert output.accepted == [4] * (left // 5) + [left % 5] * (left % 5 > 0)
        assert output.reached == output.accepted


def test_eos_cuts_inside_an_accepted_path(
    target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    target = copy(target_of("llama"))
    request = Request(prompts[5], 24, WARM)
    free = decode_plainly(target, [Request(prompts[5], 24, WARM, ignore_eos=True)])
    known = sequences([request], free)
    absent = next(token for token in range(61) if token not in free[0].tokens)
    ended = 0
    for place, token in enumerate(free[0].tokens):
        if token in free[0].tokens[:place]:
            continue
        target.eos_token_ids = (absent, token)
        head = scripted_head(target, known, right=1.0)
        output = open_engine(target, head, CHAIN, max_length=64).generate([request])[0]
        assert output.tokens == free[0].tokens[: place + 1]
        assert output.finish_reason == "eos"
        ended += 1
    assert ended > 5


def test_a_request_does_not_depend_on_its_neighbours_or_its_row(target_of: TargetOf, prompts: list[list[int]]) -> None:
    target = target_of("qwen3")
    requests = make_requests(prompts)
    alone = [decode_plainly(target, [request])[0].tokens for request in requests]
    for batch_size in (2, 5):
        together = decode_plainly(target, list(reversed(requests)), batch_size=batch_size)
        assert [output.tokens for output in reversed(together)] == alone


def test_long_rows_that_ended_do_not_trouble_short_ones(
    target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    requests = [
        Request(prompts[10] * 9, 6),
        Request(prompts[3], 60, ignore_eos=True),
        Request(prompts[10] * 10, 3, WARM),
    ]
    plain = open_engine(target, None, max_length=400).generate(requests)
    for poll_interval in (1, 8):
        head = scripted_head(target, sequences(requests, plain), right=0.1)
        engine = open_engine(target, head, TREE, batch_size=2, max_length=400, poll_interval=poll_interval)
        assert texts(engine.generate(requests)) == texts(plain)


def test_padded_prompts_change_nothing(target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]) -> None:
    target = target_of("gemma3_text")
    requests = [Request(prompt, 10, WARM) for prompt in (prompts[10] * 10, prompts[0], prompts[5], prompts[9] * 22)]
    plain = open_engine(target, None, max_length=400).generate(requests)
    head = scripted_head(target, sequences(requests, plain))
    engine = open_engine(target, head, TREE, batch_size=3, max_length=322)
    engine.decoder.step.pads = True
    assert texts(engine.generate(requests)) == texts(plain)


def test_profiling_splits_the_decode_time(
    target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    head = scripted_head(target, [])
    engine = open_engine(target, head, TREE, max_length=64)
    engine.profile = True
    output = engine.generate([Request(prompts[0], 5, ignore_eos=True)])[0]
    timings = engine.timings
    assert set(timings.breakdown) == {"draft", "verify", "accept", "commit"}
    assert all(min(seconds) > 0 and len(seconds) == output.rounds for seconds in timings.breakdown.values())
    assert sum(map(sum, timings.breakdown.values())) <= timings.decode_seconds
    assert timings.rounds == output.rounds


@pytest.mark.parametrize(("ahead", "interval", "rows"), [(0, 1, 1), (1, 1, 1), (1, 1, 2), (0, 3, 1), (2, 3, 2)])
def test_no_time_counts_for_a_round_after_the_end_of_every_text(
    ahead: int, interval: int, rows: int, target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    """As on a GPU, where the host launches a round before it knows that the last one ended the text."""
    target = target_of("llama")
    requests = [Request(prompt, 9 + n, ignore_eos=True) for n, prompt in enumerate(prompts[:5])]
    plain = open_engine(target, None, max_length=64).generate(requests)
    head = scripted_head(target, sequences(requests, plain))
    engine = open_engine(target, head, TREE, batch_size=rows, max_length=64, poll_interval=interval)
    engine.ahead = ahead
    engine.reports = Reports(engine.decoder.state.report, ahead + 2, on_host=True)
    for start in range(0, len(requests), rows):
        outputs = engine.generate(requests[start : start + rows])
        assert texts(outputs) == texts(plain[start : start + rows])
        timings = engine.timings
        assert timings.rounds == max(output.rounds for output in outputs)
        assert timings.decode_seconds == pytest.approx(sum(timings.round_seconds))


def test_a_full_cache_holds_the_longest_request(target_of: TargetOf, scripted_head: HeadType) -> None:
    target = target_of("llama")
    prompt = [5] * 20
    request = Request(prompt, 128 - 20 - TREE.nodes, ignore_eos=True)
    plain = open_engine(target, None, max_length=128).generate([request])
    head = scripted_head(target, sequences([request], plain), right=0.9)
    engine = open_engine(target, head, TREE, max_length=128)
    assert engine.decoder.step.capacity == 128
    assert engine.generate([request])[0].tokens == plain[0].tokens


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([], 4), "the prompt is empty"),
        (Request([3] * 50, 12), "50 tokens, 12 new ones and a tree of 5 need 67 slots, but there are 64"),
        (Request([3], 0), "max_new_tokens must be at least 1"),
        (Request([3, 61], 4), "token ids outside 0 .. 60"),
        (Request([3], 4, stop=("x",)), "stop strings need a tokenizer"),
    ],
)
def test_bad_requests_are_refused(request_: Request, words: str, target_of: TargetOf, scripted_head: HeadType) -> None:
    target = target_of("llama")
    head = scripted_head(target, [])
    engine = open_engine(target, head, CHAIN, max_length=64)
    with pytest.raises(UserError, match=words):
        engine.generate([Request([3], 2), request_])


def test_bad_engines_are_refused(target_of: TargetOf, scripted_head: HeadType) -> None:
    target = target_of("llama")
    with pytest.raises(UserError, match="max_length: expected 1 to 512"):
        open_engine(target, None, max_length=513)
    with pytest.raises(UserError, match="a head and a tree go together"):
        open_engine(target, None, CHAIN, max_length=64)
    with pytest.raises(UserError, match="a head and a tree go together"):
        open_engine(target, scripted_head(target, []), ROOT_ONLY, max_length=64)
    with pytest.raises(UserError, match="batch size"):
        open_engine(target, None, batch_size=0, max_length=64)


def test_every_round_is_timed_and_outputs_know_theirs(
    target_of: TargetOf, scripted_head: HeadType, prompts: list[list[int]]
) -> None:
    target = target_of("llama")
    requests = make_requests(prompts[4:], eos=True)
    plain = decode_plainly(target, requests)
    for poll_interval in (1, 3):
        head = scripted_head(target, sequences(requests, plain))
        engine = open_engine(target, head, CHAIN, batch_size=2, max_length=192, poll_interval=poll_interval)
        outputs = engine.generate(requests)
        timings = engine.timings
        assert len(timings.round_seconds) == timings.rounds and min(timings.round_seconds) > 0
        assert sum(timings.round_seconds) == pytest.approx(timings.decode_seconds)
        for output in outputs:
            assert sum(output.emitted()) == len(output.tokens) - 1 and min(output.emitted(), default=1) >= 1
            assert output.first_round + output.rounds <= timings.rounds
        assert outputs[0].first_round == 0 < outputs[-1].first_round, "later requests wait for a free row"


def test_a_batch_that_does_not_fit_a_cpu_is_refused_with_one_that_would(target_of: TargetOf) -> None:
    for free in (2 * 2**30, None):  # None: unknown
        check_memory(2**29, 3, free, "big")
    check_memory(2**40, 1, None, "big")
    with pytest.raises(UserError, match=r"big: a batch of 64 needs 32.0 GiB .* 1.9 GiB are free; a batch of 3 would"):
        check_memory(2**29, 64, 2 * 2**30, "big")
    with pytest.raises(UserError, match="shorten the sequences"):
        check_memory(2**40, 1, 2 * 2**30, "big")
    with pytest.raises(UserError, match=r"llama: a batch of 100000000 needs .*a batch of \d+ would fit"):
        open_engine(target_of("llama"), None, batch_size=100000000, max_length=512)


def test_longer_sequences_larger_trees_and_drafts_need_more(target_of: TargetOf) -> None:
    target = target_of("llama")
    sizes: dict[str, Any] = {"capacity": 4096, "nodes": 8, "drafts": False}
    modest = row_bytes(target, **sizes)
    assert row_bytes(target, **sizes | {"capacity": 8192}) > 1.9 * modest
    for more in ({"nodes": 64}, {"drafts": True}):
        assert row_bytes(target, **sizes | more) > modest
