"""T5 in the runtime: what transformers generates, whatever is drafted, whoever sits in the next row."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from eval.runtime.engine import Request
from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.model import FrozenTarget
from heads.tree import parse_shape
from tests.small_targets import open_engine

START, EOS = 0, 1
BASE: dict[str, Any] = dict(
    vocab_size=61,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=3,
    num_heads=4,
    # Few near distances of their own, and far ones that share: positions that are off by one show.
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    decoder_start_token_id=START,
)
FORMS: dict[str, dict[str, Any]] = {
    "t5": dict(feed_forward_proj="relu"),
    "t5 v1.1": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "eager": dict(feed_forward_proj="relu", attn_implementation="eager"),
    "shallow decoder": dict(feed_forward_proj="relu", num_decoder_layers=2),
}


def make_t5(form: str) -> FrozenTarget:
    """A random T5 in float64, the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = T5ForConditionalGeneration(T5Config(**BASE, **FORMS[form]))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.35)
    return FrozenTarget(model.double(), form)


def inputs() -> list[list[int]]:
    """Seven encoder inputs of different lengths, each closed by EOS."""
    draw = random.Random(1)
    return [[*(draw.randrange(2, 61) for _ in range(n)), EOS] for n in (3, 9, 1, 30, 5, 17, 2)]


def requests(new: int = 12) -> list[Request]:
    """Greedy and sampled ones in turns."""
    return [
        Request([*ids, START], new, Sampling(float(n % 2), seed=n), ignore_eos=True) for n, ids in enumerate(inputs())
    ]


@pytest.mark.parametrize("form", ["t5", "t5 v1.1", pytest.param("eager", marks=pytest.mark.slow)])
def test_plain_decoding_is_what_transformers_generates(form: str) -> None:
    target = make_t5(form)
    target.check()
    generate: Any = target.model.generate
    for batch_size in (1, 3):
        engine = open_engine(target, None, batch_size=batch_size, max_length=128)
        outputs = engine.generate([Request([*ids, START], 14) for ids in inputs()])
        assert len({tuple(output.tokens) for output in outputs}) > 4
        for ids, output in zip(inputs(), outputs, strict=True):
            theirs = generate(torch.tensor([ids]), max_new_tokens=14, do_sample=False)[0, 1:].tolist()
            assert output.tokens == theirs


@pytest.mark.parametrize("form", FORMS)
def test_drafts_change_no_token(form: str, scripted_head: Callable[..., Any]) -> None:
    target = make_t5(form)
    plain = [output.tokens for output in open_engine(target, None, max_length=128).generate(requests())]
    known = [[*request.prompt, *tokens] for request, tokens in zip(requests(), plain, strict=True)]
    for text, batch_size in (("chain:4", 1), ("chain:4", 3), ("tree:3x4x12", 1), ("tree:3x4x12", 3), ("none", 3)):
        shape = parse_shape(text)
        head = scripted_head(target, known, duplicates=shape.top_k > 1) if shape.depth else None
        engine = open_engine(target, head, shape, batch_size=batch_size, max_length=128)
        outputs = engine.generate(requests())
        assert [output.tokens for output in outputs] == plain
        assert not shape.depth or sum(sum(output.accepted) for output in outputs) > 15


def test_padded_prompts_change_nothing() -> None:
    target = make_t5("t5")
    plain = [output.tokens for output in open_engine(target, None, max_length=128).generate(requests())]
    engine = open_engine(target, None, batch_size=2, max_length=128)
    engine.decoder.step.pads = True  # type: ignore[union-attr, unused-ignore]
    assert [output.tokens for output in engine.generate(requests())] == plain


@torch.no_grad()
def test_packed_documents_are_read_apart() -> None:
    target = make_t5("t5 v1.1")
    documents = [[*ids, START, *range(5, 5 + n)] for n, ids in enumerate(inputs()[:3], start=2)]
    tokens = torch.tensor([[token for ids in documents for token in ids]])
    number = torch.cat([torch.full((len(ids),), n) for n, ids in enumerate(documents)])[None]
    positions = torch.cat([torch.arange(len(ids)) for ids in documents])[None]
    logits = target.shared.lm_head(target.packed_features(tokens, positions, number, ()).hidden)
    model: Any = target.model
    for n, ids in enumerate(documents):
        start = ids.index(START)
        own = model(input_ids=torch.tensor([ids[:start]]), decoder_input_ids=torch.tensor([ids[start:]])).logits
        torch.testing.assert_close(logits[:, number[0] == n][:, start:], own, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("prompt", [[5, 6, EOS], [START, 5, 6]])
def test_a_prompt_must_say_where_the_answer_begins(prompt: list[int]) -> None:
    engine = open_engine(make_t5("t5"), None, max_length=64)
    with pytest.raises(UserError, match="then its start token 0, which begins the answer"):
        engine.generate([Request(prompt, 4)])


def test_other_families_are_refused() -> None:
    size: dict[str, Any] = dict(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2
    )
    model = BartForConditionalGeneration(BartConfig(vocab_size=40, encoder_ffn_dim=16, decoder_ffn_dim=16, **size))
    with pytest.raises(UserError, match="its path: encoder-decoder targets here are t5 or mt5, got bart"):
        FrozenTarget(model, "its path")


def test_a_model_without_a_start_token_is_refused() -> None:
    model = T5ForConditionalGeneration(T5Config(**{**BASE, "decoder_start_token_id": None}))
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(UserError, match="its path: its config names no decoder_start_token_id"):
        FrozenTarget(model, "its path")
