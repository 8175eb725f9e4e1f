"""Whatever is drafted, the text is the target's own: a pairwise array over all that could change it."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, combinations, compress, product
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.acceptance_rules import DRAFTS, LAST, TESTS, draw_counters
from eval.runtime.engine import Output, Request
from eval.runtime.reference import Noise, generate
from eval.runtime.sampling_params import Sampling
from heads.core.tree import is_chain, parse_shape
from heads.kernels.gumbel import stream, uniform
from heads.methods.two_drafts import LookupFirst
from heads.targets.frozen_target import FrozenTarget
from tests.eval.runtime.conftest import ScriptedHead, decode_plainly, sequences, target_of
from tests.support import small_targets as small
from tests.support.small_targets import make_drafter, open_engine, texts

slowly = partial(pytest.param, marks=pytest.mark.slow)
RECURRENT = {*small.HYBRIDS, *small.OTHER_HYBRIDS}
BLOCK: dict[str, Any] = {"num_layers": 1, "block_size": 5, "mask_token_id": 3, "aux_layer_ids": [1, 2]}
DEEPER = {kind: small.SMALL_HEADS[kind] | {"depth": 4} for kind in ("eagle3", "mtp", "medusa")}
DEEP = small.small_heads(BLOCK, **DEEPER)
HEADS: dict[str, dict[str, Any]] = {
    "random": {},
    "lookup:3": {},
    "lookup:1+eagle3": DEEP["eagle3"],
    "lookup:1+the target": {},
    "early_exit:1": {},
    "the target": {},
    "the target, cut": {},
    **{kind: settings for kind, settings in DEEP.items() if kind != "draft"},
}
COPIES = ("the target", "the target, cut", "lookup:1+the target")
POSITIONS = 24
"""Positions of a cut copy, in the middle of the texts."""
OTHER_BLOCKS = {kind for kind, settings in HEADS.items() if "block_size" in settings} - {"dflash"}
WARM = Sampling(temperature=0.9, seed=4), Sampling(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=-8)
PENALISED = (
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temperature=0.9, top_k=20, repetition_penalty=0.8, presence_penalty=1.5, seed=6),
)
SAMPLINGS = {"greedy": (Sampling(),), "sampled": WARM, "mixed": (Sampling(), *WARM), "penalised": (*PENALISED, *WARM)}
FACTORS: tuple[tuple[Any, ...], ...] = (
    # The native decoder with C and without, windows, latent attention, the model's own code, recurrences, two stacks.
    ("llama-float32", "qwen3", "gemma3_text", "mistral", "deepseek_v3", "gpt_oss", "gpt2", "qwen3_next", "t5"),
    tuple(HEADS),
    ("chain:1", "chain:4", "static:3.2.1", "tree:3x4x12"),
    tuple(SAMPLINGS),
    (1, 3, 8),
    ("match", "ratio", "block"),
)


def is_possible(family: str, head: str, tree: str, sampling: str, rows: int, rule: str) -> bool:
    shape = parse_shape(tree)
    if not is_chain(shape) and (head.startswith("lookup") or family in RECURRENT):
        return False
    if (family in RECURRENT and head in ("early_exit:1", *COPIES)) or (family, head) == ("t5", "early_exit:1"):
        return False
    if rule == "match":
        return True
    return head != "random" and (is_chain(shape) or (rule == "ratio" and shape.paths is not None))


def pairwise(factors: Sequence[Sequence[Any]], is_possible: Callable[..., bool]) -> Iterator[tuple[Any, ...]]:
    """Yield rows that hold every possible pair of values of two factors, chosen greedily. Of the heads that draft a
    block, one meets every family: the others read no more of it."""
    rows = {
        row: [pair for pair in combinations(enumerate(row), 2) if pair[0][0] or pair[1][1] not in OTHER_BLOCKS]
        for row in product(*factors)
        if is_possible(*row)
    }
    left = dict.fromkeys(pair for pairs in rows.values() for pair in pairs)  # in order, the same in every process
    while left:
        first = next(iter(left))
        row = max((row for row, pairs in rows.items() if first in pairs), key=lambda row: len(left.keys() & rows[row]))
        yield row
        for pair in rows[row]:
            left.pop(pair, None)


def requests_for(target: FrozenTarget, samplings: Sequence[Sampling]) -> list[Request]:
    """Return requests of which the longest ends first, and another one takes its row."""
    prompts = [[5, 7, 9, 5, 7], [3 + n % 50 for n in range(40)], [11] * 3 + [*range(20, 37)], [30, 31]]
    if target.start_token is not None:  # a question, its end, and the token that begins the answer
        prompts = [[*ids, 1, target.start_token] for ids in prompts]
    new = (14, 3, 13, 12)
    return [Request(ids, new[n], samplings[n % len(samplings)], (), True) for n, ids in enumerate(prompts)]


@cache
def plain(family: str, sampling: str) -> list[Output]:
    return decode_plainly(target_of(family), requests_for(target_of(family), SAMPLINGS[sampling]), max_length=96)


def make_head(kind: str, target: FrozenTarget) -> Any:
    if kind == "random":
        return None
    if kind not in COPIES:
        return make_drafter(kind, target, **HEADS[kind])
    if kind == "lookup:1+the target":
        return LookupFirst(1, make_head("the target", target))
    head = make_drafter("draft", target, fresh={})
    head.model.load_state_dict(target.model.state_dict())
    small.with_plain_experts(head.model)
    if kind == "the target, cut":
        head.text_config.max_position_embeddings = POSITIONS
    return head


@pytest.mark.parametrize(("family", "kind", "tree", "sampling", "rows", "rule"), [*pairwise(FACTORS, is_possible)])
def test_the_text_is_the_targets_own(family: str, kind: str, tree: str, sampling: str, rows: int, rule: str) -> None:
    target = target_of(family)
    requests, expected = requests_for(target, SAMPLINGS[sampling]), plain(family, sampling)
    head: Any = make_head(kind, target)
    if rule == "match" and kind not in COPIES:
        head = ScriptedHead(target, sequences(requests, expected), inner=head)
    options: dict[str, Any] = {"max_length": 96, "rule": rule}
    outputs = open_engine(target, head, tree, batch_size=rows, **options).generate(requests)
    if rule != "match" and sampling != "greedy":  # sampled text is another one, and a function of its request alone
        alone = open_engine(target, head, tree, batch_size=3 if rows == 1 else 1, **options).generate(requests)
        greedy = [request.sampling.temperature == 0 for request in requests]
        expected = [ours if same else other for same, ours, other in zip(greedy, expected, alone, strict=True)]
    assert texts(outputs) == texts(expected)
    if isinstance(head, ScriptedHead):
        assert sum(sum(output.accepted) for output in outputs) > 0
    # A dynamic tree may prune it, and a filter or a penalty rule out its first choice.
    if kind in COPIES and not tree.startswith("tree"):
        last = POSITIONS - parse_shape(tree).depth if kind == "the target, cut" else 512
        samplings = [request.sampling for request in requests]
        free = [output for output, s in zip(outputs, samplings, strict=True) if not s.filters and not s.penalises]
        for output in free:
            roots = accumulate(output.emitted(), initial=output.start)
            drawn = [not copied for copied in output.copied]
            rounds = compress(zip(roots, output.accepted, output.reached, strict=False), drawn)
            assert all(accepted == reached for root, accepted, reached in rounds if root <= last), "it is always right"


def noise_of(seed: int) -> Noise:
    """The engine's noise for a request, as the reference takes it."""
    seeds = torch.tensor([seed])

    def noise(purpose: str, position: int, index: int, size: int) -> Tensor:
        place, ids, level = torch.tensor([[position]]), torch.arange(size), index + 1
        match purpose:
            case "first":
                return 1 - uniform(seeds, place, ids)[0, 0]
            case "draft":
                return 1 - uniform(stream(seeds, DRAFTS), draw_counters(place + level, level), ids)[0, 0]
            case "test":
                return uniform(stream(seeds, TESTS), place, ids + level)[0, 0]
        return 1 - uniform(stream(seeds, LAST), place, ids)[0, 0]

    return noise


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "deepseek_v3", "gpt_oss"])
def test_rounds_are_those_of_the_papers_loop(family: str, depth: int) -> None:
    """The rule `ratio`, greedy and sampled: drafts are those of the target's first two layers alone."""
    target = target_of(family)
    cut = deepcopy(target)
    del cut.layers[2:]
    samplings = [Sampling(temperature=t, seed=n) for n, t in enumerate((0.0, 0.9, 1.4, 0.0), start=-1)]
    requests = [Request([5, 6, 7 + n], 20, sampling) for n, sampling in enumerate(samplings)]
    head = make_drafter("early_exit:2", target)
    engine = open_engine(target, head, f"chain:{depth}", batch_size=2, max_length=64, rule="ratio")
    rounds = []
    for request, output in zip(requests, engine.generate(requests), strict=True):
        named: Any = dict(temperature=request.sampling.temperature, noise=noise_of(request.sampling.seed), depth=depth)
        named |= dict(max_new_tokens=request.max_new_tokens, eos_token_ids=target.eos_token_ids)
        tokens, accepted = generate(target.model, cut.model, request.prompt, **named)
        assert output.tokens == tokens and output.accepted == accepted
        rounds += accepted
    assert 0 < sum(rounds) < depth * len(rounds), "some drafts are accepted, some rejected"


def test_past_its_positions_a_draft_model_drafts_nothing_right() -> None:
    target = target_of("llama")
    (output,) = open_engine(target, make_head("the target, cut", target), "chain:3", max_length=96).generate(
        [Request([*range(3, 13)], 70, Sampling(), (), True)]
    )
    rounds = output.rounds
    assert output.accepted[:3] == [3, 3, 3] and rounds > 50 and sum(output.accepted[4:]) < rounds / 8


OTHERS = [family for family in [*small.FAMILIES, *small.HYBRIDS, *small.OTHER_HYBRIDS] if family not in FACTORS[0]]


@pytest.mark.parametrize("family", [*small.FAMILIES, *small.HYBRIDS, "t5", *map(slowly, small.OTHER_HYBRIDS)])
def test_plain_decoding_is_what_transformers_generates(family: str) -> None:
    target = target_of(family)
    model: Any = target.model
    samplings = Sampling(repetition_penalty=1.3), Sampling()
    requests = [replace(r, max_new_tokens=12, ignore_eos=False) for r in requests_for(target, samplings)]
    # Of the longest prompt, several chunks are read.
    requests[1] = replace(requests[1], prompt=[*range(3, 53)] * 5 + list(requests[1].prompt))
    for request, output in zip(requests, decode_plainly(target, requests, batch_size=2, max_length=320), strict=True):
        ids = torch.tensor([request.prompt if target.start_token is None else request.prompt[:-1]])
        named = dict(max_new_tokens=12, do_sample=False, repetition_penalty=request.sampling.repetition_penalty)
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **named)[0]
        assert output.tokens == theirs[1 if target.start_token is not None else ids.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for family in OTHERS for name in (family, f"{family}-float32")])
def test_drafts_change_no_token_in_any_other_family(family: str) -> None:
    target = target_of(family)
    requests, expected = requests_for(target, SAMPLINGS["mixed"]), plain(family, "mixed")
    for tree, rows in product(["chain:4"] if target.is_recurrent else ["chain:4", "tree:3x4x12"], (1, 3)):
        head = ScriptedHead(target, sequences(requests, expected))
        outputs = open_engine(target, head, tree, batch_size=rows, max_length=96).generate(requests)
        assert texts(outputs) == texts(expected)
        assert sum(sum(output.accepted) for output in outputs) > 0
