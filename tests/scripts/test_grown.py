"""Growing keeps the function: target, head, and what the runtime accepts; and its command, as a user types it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval import bench
from eval.command import exit_status
from eval.runtime.engine import Engine, EngineOptions, Request, Sampling
from heads.checkpoint import save_head, target_record
from heads.errors import UserError
from heads.registry import build_head
from heads.target.frozen import FrozenTarget, load_target
from heads.tree import parse_shape
from scripts import grow_target
from scripts.grown.heads import HeadSize, grow_head
from scripts.grown.shapes import ModelShape
from scripts.grown.target import Growth, grow_llama, shape_of
from tests.closeness import assert_close

BIG = ModelShape(48, num_hidden_layers=11, num_attention_heads=12, num_key_value_heads=3, head_dim=12,
    intermediate_size=80, vocab_size=150)  # fmt: skip


@pytest.fixture(scope="module")
def small(tiny_target_dir: Path) -> FrozenTarget:
    torch.manual_seed(0)
    target = load_target(str(tiny_target_dir), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return target


@pytest.fixture(scope="module")
def grown(small: FrozenTarget) -> FrozenTarget:
    return FrozenTarget(grow_llama(small.model, BIG), "grown")


def features(target: FrozenTarget, tokens: torch.Tensor, aux_layer_ids: tuple[int, ...]) -> Any:
    positions = torch.arange(tokens.shape[1])[None].expand(tokens.shape)
    return target.packed_features(tokens, positions, torch.zeros_like(positions), aux_layer_ids)


def test_a_grown_target_is_the_same_function(small: FrozenTarget, grown: FrozenTarget) -> None:
    assert shape_of(grown.config) == BIG
    tokens = torch.randint(6, 128, (2, 30), generator=torch.Generator().manual_seed(0))
    ours, theirs = features(grown, tokens, (2, 8)), features(small, tokens, (2, 8))
    logits, expected = grown.shared.lm_head(ours.hidden), small.shared.lm_head(theirs.hidden)
    assert_close(logits[..., :128], expected, precision=torch.float32)  # rotary tables are float32
    assert logits[..., 128:].amax() < expected.amin() - 100
    aux, expected = ours.aux_hidden_states, theirs.aux_hidden_states
    assert_close(aux[..., :32], expected[..., :32], precision=torch.float32)
    assert float(aux[..., 33:48].abs().max()) == 0


NORMED = {"fc_norm": True, "norm_output": True}
FAMILIES: dict[str, tuple[str, dict[str, Any], HeadSize]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": 100}, HeadSize(90, 110)),
    "eagle3.1": ("eagle3", {"draft_vocab_size": 100, **NORMED}, HeadSize(90, 110)),
    "eagle3, output normed": ("eagle3", {"norm_output": True}, HeadSize()),
    "mtp": ("mtp", {"draft_vocab_size": 100}, HeadSize(90)),
    "mtp, every id and step": ("mtp", {"num_modules": 3, "layout": "deepseek"}, HeadSize()),
    "medusa": ("medusa", {"draft_vocab_size": 100, "num_layers": 2, "tree_nodes": 0}, HeadSize()),
    "medusa, every id": ("medusa", {"tree_nodes": 0}, HeadSize()),
    "draft": ("draft", {"layers": [0, 7]}, HeadSize()),
    "dflash": ("dflash", {"num_layers": 2}, HeadSize(90)),
    "dflash2": ("dflash2", {"num_layers": 2, "conv_group_size": 8, "selector_rank": 6}, HeadSize()),
    "dspark": ("dspark", {"num_layers": 2, "markov_rank": 8}, HeadSize()),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, small: FrozenTarget) -> tuple[Any, Any]:
    """A head of random weights, and the same grown."""
    kind, settings, size = FAMILIES[request.param]
    torch.manual_seed(0)
    head: Any = build_head(kind, settings, small, torch.rand(128)).double()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.3)
    growth = Growth(shape_of(small.config), BIG, small.config.rms_norm_eps)
    return head, grow_head(head, growth, size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grown_head_drafts_and_is_accepted_alike(
    temperature: float, family: tuple[Any, Any], small: FrozenTarget, grown: FrozenTarget
) -> None:
    requests = [Request(torch.randint(6, 128, (n,)).tolist(), 24, Sampling(temperature, seed=n)) for n in (4, 9)]
    options = EngineOptions(shape=parse_shape("tree:3x3x9"), batch_size=2, max_length=64)
    pairs = zip((small, grown), family, strict=True)
    one, other = (Engine(target, head, options).generate(requests) for target, head in pairs)
    assert [output.tokens for output in one] == [output.tokens for output in other]
    assert [output.accepted for output in one] == [output.accepted for output in other]


def test_ids_that_were_added_are_never_drafted(small: FrozenTarget, grown: FrozenTarget) -> None:
    """Not even late in a long draft, where a state that is recycled might have lost what excludes them."""
    for settings in ({}, NORMED):
        torch.manual_seed(1)
        head = build_head("eagle3", {"draft_vocab_size": 100, **settings}, small, torch.rand(128)).double()
        growth = Growth(shape_of(small.config), BIG, small.config.rms_norm_eps)
        large: Any = grow_head(head, growth, HeadSize(draft_vocab_size=122))
        engine = Engine(grown, large, EngineOptions(shape=parse_shape("chain:12"), max_length=64))
        seen: list[int] = []
        draft = large.propose

        def recorded(*arguments: Any, draft: Any = draft, seen: list[int] = seen) -> Any:
            proposal = draft(*arguments)
            seen += proposal.tokens.flatten().tolist()
            return proposal

        large.propose = recorded
        engine.generate([Request([7, 9, 20], 24, Sampling(temperature=1.5, seed=3))])
        assert seen and max(seen) < 128


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("eagle3", HeadSize(draft_vocab_size=4096), "draft_vocab_size: a head of 128 draft ids can be grown"),
        ("mtp", HeadSize(8), "intermediate_size: a head of 64 cannot be grown to 8"),
        ("mtp", HeadSize(draft_vocab_size=200), "draft_vocab_size: only an EAGLE-3 head"),
        ("medusa", HeadSize(90), "intermediate_size: the head has no block"),
    ],
)
def test_sizes_that_a_head_cannot_have(kind: str, size: HeadSize, words: str, small: FrozenTarget) -> None:
    growth = Growth(shape_of(small.config), BIG, small.config.rms_norm_eps)
    with pytest.raises(UserError, match=words):
        grow_head(build_head(kind, {}, small, torch.ones(128)), growth, size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 16}, "hidden_size: a model of 32 cannot be grown to 16"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_key_value_heads: 2 query heads share a key head"),
        ({"num_attention_heads": 13}, "13 heads of 12 must be whole groups"),
        ({"hidden_size": 32}, "vocab_size: more ids need a wider model"),
    ],
)
def test_shapes_that_do_not_hold_the_small_model(change: dict[str, int], words: str, small: FrozenTarget) -> None:
    with pytest.raises(UserError, match=words):
        grow_llama(small.model, replace(BIG, **change))


def test_other_models_are_refused() -> None:
    config = LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, attention_bias=True)
    with pytest.raises(UserError, match="expected a Llama without biases"):
        grow_llama(LlamaForCausalLM(config), BIG)


def call(*words: object) -> int:
    return exit_status(lambda: grow_target.main([str(word) for word in words]))


def test_target_and_head_are_grown_and_fit(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(str(tiny_target_dir))
    for kind in ("eagle3", "medusa"):
        head = build_head(kind, {}, target, torch.ones(target.vocab_size))
        save_head(head, tmp_path / kind / "head", target=target_record(target))
    out = tmp_path / "big"
    sizes = "--hidden-size 48 --num-hidden-layers 11 --num-attention-heads 12 --num-key-value-heads 3 --head-dim 12"
    heads = [tmp_path / kind for kind in ("eagle3", "medusa")]
    assert call(tiny_target_dir, out, "--heads", *heads, *sizes.split()) == 0
    grown = load_target(str(out))
    assert shape_of(grown.config).hidden_size == 48 and grown.config.grown_from == target.name
    words = [out / "eagle3", out / "medusa", "--tree", "chain:2", "--out", tmp_path / "out"]
    words += ["--num-prompts", "2", "--repeats", "1", "--max-prompt-tokens", "200", "--max-new-tokens", "8"]
    assert exit_status(lambda: bench.main([str(word) for word in words])) == 0
    measured = capsys.readouterr().out
    assert measured.count("2 of 2") == 2 and "(grown from" in measured


def test_a_smaller_shape_is_refused_in_one_line(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tiny_target_dir, tmp_path / "grown", "--hidden-size", "16") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert not (tmp_path / "grown").exists()


def test_a_folder_that_holds_something_is_left_as_it_is(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "runs/mine/head/model.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"weeks of work")
    assert call(tiny_target_dir, tmp_path / "runs", "--num-hidden-layers", "11") == 2
    assert f"OUT {tmp_path / 'runs'}: is there already" in capsys.readouterr().err
    assert kept.read_bytes() == b"weeks of work" and [kept] == [path for path in tmp_path.rglob("*") if path.is_file()]
