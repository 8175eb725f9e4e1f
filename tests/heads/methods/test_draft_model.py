"""A draft model: training steps are drafting steps, the cache holds what it should, and what is saved is a HF model."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from heads.core.contract import Observation
from heads.core.tree import parse_shape
from heads.formats.engine_folder import with_both_rotations
from heads.methods.draft_model import DraftState
from heads.registry import build_head
from heads.saved import load_head, save_head, target_record
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from heads.targets.target_files import load_tokenizer
from tests.heads.parts.test_losses import PLAIN
from tests.heads.targets.test_frozen_target import make_model
from tests.support.closeness import assert_close
from tests.support.published_heads import LLAMA3
from tests.support.refusals import refused
from tests.support.small_heads import greedy, loss_agrees, target_batch, token_paths

V = 40
FAMILIES = ["llama", "qwen3", "gemma2", "granite", "gpt2"]


def make_target(family: str = "llama", **changes: Any) -> FrozenTarget:
    tied = {"tie_word_embeddings": True} if family == "qwen3" else {}
    return FrozenTarget(make_model(family, **tied, **changes).double(), family)


def make_head(target: FrozenTarget, **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        head = build_head("draft", settings or {"layers": [0, 2]}, target, torch.ones(target.vocab_size))
    return head.double()


def plain_logits(head: Any, tokens: list[int]) -> Tensor:
    """(T, V) by the model itself, without a cache and without masks of ours."""
    with torch.no_grad():
        logits: Tensor = head.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def feed(head: Any, state: DraftState, texts: list[list[int]], start: list[int], count: list[int], nodes: Any) -> None:
    """Extend the head by `count` positions of each row, with padding behind them."""
    M = max(max(count), 1) if nodes is None else nodes.shape[1]
    tokens = torch.full((len(texts), M + 1), 7)
    for row, (text, first, many) in enumerate(zip(texts, start, count, strict=True)):
        tokens[row, : many + 1] = torch.tensor(text[first : first + many + 1])
    none = torch.zeros(len(texts), M, 0)  # it reads no states
    head.extend(state, Observation(tokens, none, none, torch.tensor(start), torch.tensor(count), nodes))


def opened(head: Any, texts: list[list[int]], shape: str) -> DraftState:
    """The state that has read all of each text but its last token, the root."""
    state: DraftState = head.new_state(None, batch_size=len(texts), capacity=60, shape=parse_shape(shape))
    feed(head, state, texts, [0] * len(texts), [len(text) - 1 for text in texts], None)
    return state


def texts_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(2, V, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
@pytest.mark.parametrize("shape", ["chain:4", "tree:3x3x13", "static:3.2.1"])
def test_every_path_of_a_tree_scores_as_a_chain_would(family: str, shape: str) -> None:
    head, texts = make_head(make_target(family)), texts_of([9, 12])
    proposal = head.propose(opened(head, texts, shape), greedy)
    for row, text in enumerate(texts):
        for path, score in zip(token_paths(proposal, row), proposal.scores[row].tolist(), strict=True):
            logp = plain_logits(head, [*text, *path]).log_softmax(-1)
            total = sum(float(logp[len(text) - 1 + i, token]) for i, token in enumerate(path))
            assert score == pytest.approx(total, abs=1e-6)
            if shape == "chain:4" and path:  # the likeliest tokens
                assert path[-1] == int(logp[len(text) - 2 + len(path)].argmax())


@pytest.mark.parametrize(
    ("shape", "family", "dtype"),
    [
        ("tree:3x3x13", "gemma2", torch.float64),
        ("static:3.2.1", "qwen3", torch.float64),
        ("chain:3", "llama", torch.float32),
        ("tree:3x3x13", "llama", torch.float32),
    ],
)
def test_rounds_go_on_from_what_was_accepted(shape: str, family: str, dtype: torch.dtype) -> None:
    """Any path of any length is accepted, rows at their own pace, one of them done: the next draft is what a fresh
    state drafts from the whole text, and no accepted token but the last was read again. By the model itself, by a
    native decoder, and by the CPU kernels."""
    head, shape_ = make_head(make_target(family)).to(dtype), parse_shape(shape)
    chooser = torch.Generator().manual_seed(7)
    texts = texts_of([5, 9, 3])
    state = opened(head, texts, shape)
    done = list(texts[2])
    read: list[Tensor] = []
    forward = state.decoder.forward

    def watch(tokens: Tensor, *given: Any, **how: Any) -> Any:
        read.append(tokens)
        return forward(tokens, *given, **how)

    state.decoder.forward = watch  # type: ignore[method-assign]
    for _ in range(4):
        read.clear()
        proposal = head.propose(state, greedy)
        first, *later = read
        assert first.tolist()[:2] == [text[-2:] for text in texts[:2]]  # the fixed pair
        assert len(later) == max(shape_.depth - 1, 0)
        nodes = torch.zeros(3, shape_.depth + 1, dtype=torch.int64)
        starts, counts = [len(text) - 1 for text in texts], [0, 0, 0]
        for row in range(2):
            path = [int(torch.randint(shape_.nodes, (1,), generator=chooser))]
            while path[0]:
                path.insert(0, int(proposal.parents[row, path[0]]))
            nodes[row, : len(path)] = torch.tensor(path)
            texts[row] += [int(proposal.tokens[row, j]) for j in path[1:]]
            texts[row].append(int(torch.randint(2, V, (1,), generator=chooser)))
            counts[row] = len(path)
        read.clear()
        feed(head, state, texts, starts, counts, nodes)
        assert not read  # accepting reads nothing
        fresh = opened(head, [*texts[:2], done], shape)
        again, wanted = head.propose(state, greedy), head.propose(fresh, greedy)
        assert torch.equal(again.tokens, wanted.tokens)
        assert_close(again.scores, wanted.scores, roundings=16, precision=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_states_are_what_the_model_gives_each_document(family: str) -> None:
    target = make_target(family)
    head, batch = make_head(target), target_batch(target, [[7, 2, 9], [1, 12, 5]], labels_from=2)
    with torch.no_grad():
        logits = head.logits(head.states(batch))
    for row, lengths in enumerate(([7, 2, 9], [1, 12, 5])):
        at = 0
        for length in lengths:
            alone = plain_logits(head, batch.tokens[row, at : at + length].tolist())
            assert_close(logits[row, at : at + length], alone.to(logits.dtype), precision=torch.float32)
            at += length


@pytest.mark.parametrize(("family", "loss"), [("llama", "kl"), ("gemma2", "jsd"), ("granite", "labels")])
def test_the_loss_by_hand(family: str, loss: str) -> None:
    target = make_target(family)
    head = make_head(target, layers=[1, 3], loss=loss)
    batch = target_batch(target, [[7, 2, 9], [1, 12, 5]], labels_from=2)
    p = target.shared.lm_head(batch.hidden).double().softmax(-1)
    logits = head.model.lm_head(head.states(batch)) / (4.0 if family == "granite" else 1.0)
    if family == "gemma2":
        logits = 2.0 * torch.tanh(logits / 2.0)
    q, losses = logits.softmax(-1), []
    for b, t in product(range(2), range(1, 18)):
        if batch.loss_mask[b, t] and batch.documents[b, t] == batch.documents[b, t - 1]:
            of_labels = -q[b, t - 1, batch.tokens[b, t]].log()
            losses.append(of_labels if loss == "labels" else PLAIN[loss](p[b, t - 1], q[b, t - 1]))
    assert head.counts(batch).tolist() == [len(losses)]
    total, scale = torch.stack(losses).sum()[None], torch.tensor([1 / len(losses)], dtype=torch.float64)
    loss_agrees(head, batch, (total * scale).sum(), total, scale, rtol=1e-4, atol=1e-7)


def test_kept_layers_are_the_targets_own() -> None:
    target = make_target()
    head = make_head(target, layers=[1, 3])
    own = target.model.state_dict()
    for name, weight in head.model.state_dict().items():
        source = name.replace("layers.1.", "layers.3.").replace("layers.0.", "layers.1.")
        assert torch.equal(weight, own[source].to(weight.dtype)), name
    assert head.model.config.num_hidden_layers == 2 and len(target.layers) == 4
    windowed = make_head(make_target("gemma2"), layers=[1, 3])  # every other layer has a window, these have none
    assert windowed.model.config.layer_types == ["full_attention", "full_attention"]


def test_what_is_saved_is_a_hugging_face_model(tiny_target_dir: Path, tmp_path: Path) -> None:
    target = load_target(str(tiny_target_dir))
    fresh: dict[str, Any] = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    fresh["rope_parameters"] = {"rope_type": "default", "rope_theta": 123.0}
    head = build_head("draft", {"fresh": fresh}, target, torch.ones(128))
    save_head(head, tmp_path / "head", target=target_record(target))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "head")
    ids = torch.arange(20)[None]
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits, head.model(input_ids=ids).logits)
    torch.testing.assert_close(load_head(tmp_path / "head").model(input_ids=ids).logits, logits)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["draftsmith"]["kind"] == "draft"
    assert load_target(str(tmp_path / "head")).vocab_size == 128
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "head" / name).read_bytes() == (tiny_target_dir / name).read_bytes()


@pytest.mark.parametrize("rows", [100, 150])
def test_padded_vocabularies_meet_at_their_common_prefix(
    rows: int, target: FrozenTarget, tmp_path: Path, make_smaller: Callable[..., Path]
) -> None:
    """The draft proposes what both know; what is saved has the target's size."""
    path = make_smaller(tmp_path / "small", vocab_size=rows)
    head = build_head("draft", {"path": str(path)}, target, torch.ones(128))
    common = min(rows, 128)
    assert all(parameter.requires_grad for parameter in head.parameters())
    assert (head.config.vocab_size, head.config.common_size) == (128, common)
    own: Any = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(20)[None]
    wanted = own(input_ids=ids).logits
    with torch.no_grad():
        batch = target_batch(target, [[20]])
        states = head.states(replace(batch, tokens=ids))
        torch.testing.assert_close(head.logits(states), wanted[..., :common])
    save_head(head, tmp_path / "head", target=target_record(target))
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "head")
    assert saved.config.vocab_size == 128 and saved.get_output_embeddings().weight.shape[0] == 128
    torch.testing.assert_close(saved(input_ids=ids).logits[..., :common], wanted[..., :common])
    tail = saved.get_output_embeddings().weight[common:]
    assert torch.equal(tail, saved.get_output_embeddings().weight[:common].mean(0).expand_as(tail))


@pytest.fixture
def make_smaller(tiny_target_dir: Path) -> Callable[..., Path]:
    """(folder, settings of its config) -> a small model with the tiny target's tokenizer."""

    def make(folder: Path, **changes: Any) -> Path:
        make_model("llama", **{"max_position_embeddings": 512, **changes}).save_pretrained(folder)
        load_tokenizer(str(tiny_target_dir)).save_pretrained(folder)
        return folder

    return make


def test_another_tokenizer_is_refused(target: FrozenTarget, tmp_path: Path, make_smaller: Callable[..., Path]) -> None:
    path = make_smaller(tmp_path / "small", vocab_size=128)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["A"], vocab["Z"] = vocab["Z"], vocab["A"]  # the lower id is the first that differs
    file.write_text(json.dumps(tokenizer))
    said = refused(build_head, "draft", {"path": str(path)}, target, torch.ones(128))
    assert f"token {vocab['Z']} is 'Z' here and 'A' there" in said


def test_added_tokens_that_one_tokenizer_lacks_are_said(
    target: FrozenTarget, tmp_path: Path, make_smaller: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = make_smaller(tmp_path / "small", vocab_size=130)
    tokenizer = load_tokenizer(str(path))
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer.save_pretrained(path)
    build_head("draft", {"path": str(path)}, target, torch.ones(128))
    assert "128 ('<think>'), 129 ('</think>')" in caplog.text and str(path) in caplog.text


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_both_forms_of_a_rotation_are_saved(scaling: dict[str, Any] | None) -> None:
    """Of two rotations, the older form has the base of the sliding layers beside that of the others."""
    older: dict[str, Any] = {"rope_theta": 5e5, "rope_scaling": scaling}
    rotation: dict[str, Any] = {"rope_theta": 5e5, **(scaling or {"rope_type": "default"})}
    local = {"rope_type": "default", "rope_theta": 123.0}
    for family, parameters, more in (
        ("llama", rotation, {}),
        ("gemma3_text", {"full_attention": rotation, "sliding_attention": local}, {"rope_local_base_freq": 123.0}),
    ):
        config = AutoConfig.for_model(family, rope_parameters=deepcopy(parameters))
        saved = with_both_rotations(config.to_dict())
        assert {name: saved[name] for name in older | more} == older | more
        assert AutoConfig.for_model(**deepcopy(saved)).rope_parameters == config.rope_parameters


def test_rotary_frequencies_stay_as_they_are_when_the_weights_are_narrowed() -> None:
    head = make_head(make_target())
    exact = head.model.model.rotary_emb.inv_freq.clone()
    narrow = head.to(torch.bfloat16)
    assert narrow.model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(narrow.model.model.rotary_emb.inv_freq, exact) and exact.dtype != torch.bfloat16


def test_rows_longer_than_the_drafts_context_are_refused() -> None:
    target = make_target()
    head = make_head(target, fresh={"max_position_embeddings": 8})
    said = refused(head.loss, target_batch(target, [[18]]), torch.ones(1))
    assert "the draft model reads 8 positions, a row has 18" in said
