"""The engine around its rounds: where texts end, what is timed, what is refused."""

import re
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.engine import Request
from eval.runtime.memory import check_memory
from eval.runtime.request import Reports, StopStringMatcher
from eval.runtime.sampling_params import Sampling
from heads.core.tree import ROOT_ONLY, TreeShape, parse_shape
from heads.targets.frozen_target import Features
from heads.targets.load import load_target
from heads.targets.target_files import load_tokenizer
from tests.eval.runtime.conftest import ScriptedHead, decode_plainly, sequences, target_of
from tests.support.annotations import Patch
from tests.support.refusals import refused
from tests.support.small_targets import make_drafter, make_target, open_engine, texts

WARM = Sampling(temperature=0.9, seed=4)
CHAIN, TREE = parse_shape("chain:4"), parse_shape("tree:3x4x12")


def test_the_limit_cuts_inside_an_accepted_path(prompts: list[list[int]]) -> None:
    target = target_of("llama")
    longest = Request(prompts[3], 16, WARM, ignore_eos=True)
    known = sequences([longest], decode_plainly(target, [longest]))
    for limit in (1, 2, 4, 5, 6, 11, 15):
        head = ScriptedHead(target, known, right=1.0)
        request = Request(prompts[3], limit, WARM, ignore_eos=True)
        (output,) = open_engine(target, head, CHAIN, max_length=64).generate([request])
        assert output.tokens == known[0][len(prompts[3]) :][:limit] and output.finish_reason == "length"
        left = limit - 1
        assert output.accepted == output.reached == [4] * (left // 5) + [left % 5] * (left % 5 > 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_eos_cuts_inside_an_accepted_path(family: str, prompts: list[list[int]]) -> None:
    target = copy(target_of(family))
    request, other = Request(prompts[5], 16, WARM), Request(prompts[2], 12, ignore_eos=True)
    free, expected = decode_plainly(target, [Request(prompts[5], 16, WARM, ignore_eos=True), other])
    known = sequences([request], [free])
    absent = next(token for token in range(61) if token not in free.tokens)
    for token in dict.fromkeys(free.tokens[1:9:3]):
        target.eos_token_ids = (absent, token)
        head = ScriptedHead(target, known, right=1.0)
        output, follower = open_engine(target, head, CHAIN, max_length=64).generate([request, other])
        assert output.tokens == free.tokens[: free.tokens.index(token) + 1] and output.finish_reason == "eos"
        assert follower.tokens == expected.tokens, "its row is taken over"


@pytest.mark.parametrize(("family", "R"), [("gemma3_text", 4), ("llama", 4), ("t5", 1)])
def test_padded_prompts_change_nothing(family: str, R: int, prompts: list[list[int]], monkeypatch: Patch) -> None:
    """They are read R rows at a time, as many as make 256 tokens, and rows that go on meanwhile stay as they are."""
    target = target_of(family)
    ends = [] if target.start_token is None else [1, target.start_token]
    texts_read = [*([[*range(3, 50)]] * 3), prompts[0], prompts[5], [*range(3, 60)] * 5, *prompts[1:5]]
    requests = [Request([*p, *ends], 17 if i == 1 else 10, WARM, (), True) for i, p in enumerate(texts_read)]
    expected = decode_plainly(target, requests, max_length=320)
    head = ScriptedHead(target, sequences(requests, expected))
    engine = open_engine(target, head, TREE, batch_size=4, max_length=320)
    engine.decoder.target.pads = True
    prefill, shapes = engine.decoder.target.prefill, list[tuple[int, ...]]()

    def noted(row: int, tokens: Tensor, *more: Any) -> Features:
        shapes.append(tuple(tokens.shape))
        return prefill(row, tokens, *more)

    monkeypatch.setattr(engine.decoder.target, "prefill", noted)
    assert texts(engine.generate(requests)) == texts(expected)
    assert (R, 16) in shapes and (R, 64) in shapes and all(rows == (1 if C > 64 else R) for rows, C in shapes)


def test_outputs_count_their_rounds_and_every_round_is_timed(prompts: list[list[int]]) -> None:
    target = target_of("llama")
    requests = [Request(prompt, 14 - n, WARM) for n, prompt in enumerate(prompts[4:])]
    expected = decode_plainly(target, requests)
    head = ScriptedHead(target, sequences(requests, expected))
    engine = open_engine(target, head, TREE, batch_size=2, max_length=192)
    outputs, timings = engine.generate(requests), engine.timings
    assert texts(outputs) == texts(expected)
    assert min(timings.round_seconds) > 0
    assert sum(timings.round_seconds) == pytest.approx(timings.decode_seconds)
    for output in outputs:
        assert output.rounds == len(output.accepted) == len(output.reached)
        emitted = sum(output.accepted) + output.rounds
        assert emitted - (len(output.tokens) - 1) in (0, 1), "only the last round may end on a drafted token"
        assert sum(output.emitted()) == len(output.tokens) - 1 and len(output.drafted()) == len(output.tokens)
        assert all(a <= r <= min(a + 1, TREE.depth) for a, r in zip(output.accepted, output.reached, strict=True))
        assert output.first_round + output.rounds <= timings.rounds
    assert outputs[0].first_round == 0 < outputs[-1].first_round, "later requests wait for a free row"


@pytest.mark.parametrize(("ahead", "rows", "shape"), [(1, 1, TREE), (2, 2, TREE), (5, 2, CHAIN), (5, 2, ROOT_ONLY)])
def test_rounds_after_a_text_ended_change_nothing_and_count_for_no_time(
    ahead: int, rows: int, shape: TreeShape, prompts: list[list[int]]
) -> None:
    """As on a GPU, where the host launches rounds before it knows that an earlier one ended the text."""
    target = target_of("llama")
    requests = [Request(prompt, 9 + n, ignore_eos=True) for n, prompt in enumerate(prompts[:4])]
    expected = decode_plainly(target, requests)
    head = None if shape is ROOT_ONLY else ScriptedHead(target, sequences(requests, expected))
    engine = open_engine(target, head, shape, batch_size=rows, max_length=64)
    engine.ahead = ahead
    engine.reports = Reports(engine.decoder.state.report, ahead + 2, on_host=True)
    for start in range(0, len(requests), rows):
        outputs = engine.generate(requests[start : start + rows])
        assert texts(outputs) == texts(expected[start : start + rows])
        assert engine.timings.rounds == max(output.rounds for output in outputs)
        assert engine.timings.decode_seconds == pytest.approx(sum(engine.timings.round_seconds))


def test_a_request_that_ended_leaves_rounds_in_no_slower_form() -> None:
    slow = Request([5, 6], 4, Sampling(temperature=0.9, top_k=5, presence_penalty=1.0), (), True)
    engine = open_engine(target_of("llama"), None, batch_size=2, max_length=64)
    sampling, forms = engine.decoder.sampling, []
    engine.generate(
        [slow, Request([7, 8], 12, ignore_eos=True)],
        on_tokens=lambda n, _: forms.append((n, sampling.random, sampling.filtered, sampling.penalised)),
    )
    assert (1, True, True, True) in forms and forms[-1] == (1, False, False, False)


def test_a_full_cache_holds_the_longest_request() -> None:
    target = target_of("llama")
    requests = [Request([5] * 20, 128 - 20 - TREE.nodes, ignore_eos=True)]
    expected = decode_plainly(target, requests, max_length=128)
    engine = open_engine(target, ScriptedHead(target, sequences(requests, expected)), TREE, max_length=128)
    assert engine.decoder.target.spec.capacity == 128
    assert texts(engine.generate(requests)) == texts(expected)


def test_the_earliest_token_that_completes_a_stop_string_wins(tiny_target_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_target_dir))
    tokens = tokenizer.encode("def f(x):\n    return x\n\ndef g", add_special_tokens=False)
    for stop in ("return", "\n\n", "f(", "g", ":", "nowhere"):
        expected = next((i for i in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:i])), None)
        assert StopStringMatcher([stop], tokenizer).find(tokens) == expected
        piecewise = StopStringMatcher([stop], tokenizer)
        found = [piecewise.find(tokens[:i]) for i in range(1, len(tokens) + 1)]
        assert next((place for place in found if place is not None), None) == expected
    tokens = tokenizer.encode("a = 1\n" * 200 + "END", add_special_tokens=False)
    assert StopStringMatcher(["END"], tokenizer).find(tokens) == len(tokens), "long texts are read by their tail"


@pytest.mark.parametrize("tree", ["none", "chain:4"])
def test_outputs_end_with_the_stop_string(tree: str, tiny_target_dir: Path) -> None:
    target = load_target(str(tiny_target_dir), dtype=torch.float64)
    tokenizer = load_tokenizer(str(tiny_target_dir))
    prompt, sampling = [10, 20, 30], Sampling(temperature=1.0, seed=2)
    (free,) = texts(decode_plainly(target, [Request(prompt, 40, sampling, ignore_eos=True)]))
    for end in (1, 9):
        stop = str(tokenizer.decode(free[:end]))[-3:]
        first = next(i for i in range(1, 41) if stop in tokenizer.decode(free[:i]))
        head = None if tree == "none" else ScriptedHead(target, [[*prompt, *free]], right=0.9)
        requests = [Request(prompt, 40, sampling, stop=(stop, "\0never"), ignore_eos=True)] * 3
        streamed: list[list[int]] = [[], [], []]
        engine = open_engine(target, head, tree, max_length=128, tokenizer=tokenizer, batch_size=2)
        outputs = engine.generate(requests, on_tokens=lambda n, tokens, to=streamed: to[n].extend(tokens))  # type: ignore[misc]
        assert texts(outputs) == streamed == [free[:first]] * 3
        assert all(output.finish_reason == "stop" for output in outputs)


JAMBA: Any = dict(attn_layer_offset=1, attn_layer_period=3, num_experts=2, mamba_d_state=8, mamba_dt_rank=4)
REFUSED: dict[str, tuple[Request | dict[str, Any], str]] = {
    "no prompt": (Request([], 4), "the prompt is empty"),
    "no room": (Request([3] * 50, 12), "50 tokens, 12 new ones and a tree of 5 need 67 slots, but there are 64"),
    "no such token": (Request([3, 61], 4), "token ids outside 0 .. 60"),
    "no tokenizer": (Request([3], 4, stop=("x",)), "stop strings need a tokenizer"),
    "too long": (dict(max_length=513), "max_length: expected 1 to 512"),
    "no memory": (dict(batch_size=100000000, max_length=512), r"a batch of 100000000 needs .*a batch of \d+ would fit"),
    "a tree of lookup": (dict(shape=TREE, head="lookup:3"), "ask for a chain"),
    "no rule": (dict(rule="ratio"), "plain decoding has none"),
    "a tree over recurrent layers": (dict(family="qwen3_5_text", shape=TREE, head="medusa"), "use a chain"),
    "no state between pieces": (dict(family="jamba", **JAMBA), "does not take tree masks, positions and states"),
    "no start": (dict(family="t5", request=Request([5, 6, 1], 4)), "then its start token 0, which begins the answer"),
    "no end": (dict(family="t5", request=Request([0, 5, 6], 4)), "then its start token 0, which begins the answer"),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_decoded_is_refused(given: Request | dict[str, Any], words: str) -> None:
    asked = {"shape": CHAIN, "head": "lookup:3", "request": given}
    options: dict[str, Any] = asked if isinstance(given, Request) else dict(given)
    sizes = {name: options.pop(name) for name in JAMBA if name in options}
    target = make_target(options.pop("family", "llama"), torch.float32, **sizes)
    request, head = options.pop("request", Request([3], 2)), make_drafter(options.pop("head", "none"), target)
    fault = refused(lambda: open_engine(target, head, **{"max_length": 64} | options).generate([request]))
    assert re.search(words, fault)


def test_a_batch_that_fits_is_named(monkeypatch: Patch) -> None:
    monkeypatch.setattr("eval.runtime.memory.free_memory", lambda: 2**20)
    target = target_of("llama")
    sizes: dict[str, Any] = {"nodes": 8, "drafts": False}
    check_memory(target, 1, 64, **sizes)
    fault = refused(check_memory, target, 640, 64, **sizes)
    assert re.search(r"a batch of 640 needs .* GiB are free; a batch of \d+ would fit", fault)
    for more in ({"capacity": 8192}, {"nodes": 640}, {"drafts": True, "capacity": 4096}):
        assert "shorten the sequences" in refused(check_memory, target, 1, **{"capacity": 64, **sizes, **more})


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_routing_does_not_depend_on_neighbours(family: str) -> None:
    """Not even where seven neighbours crowd the same experts: no expert is ever full."""
    target = target_of(f"{family}-float32")
    row, *others = [[3 + (5 * n + i * n + i) % 58 for i in range(13)] for n in range(8)]
    request = Request(row, 10, WARM, ignore_eos=True)
    alone = texts(decode_plainly(target, [request]))
    for neighbours in (others, [row] * 7):
        crowd = [Request(prompt, 10, ignore_eos=True) for prompt in neighbours]
        assert texts(decode_plainly(target, [request, *crowd], batch_size=8))[:1] == alone
