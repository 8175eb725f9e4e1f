"""Medusa-2: the target learns beside its heads, stays itself with the adapter off, and is audited with it on."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import kl_div

from eval.benchmark.loading import fitting_head
from heads.base import Batch
from heads.checkpoint import adapt_target, load_head
from heads.errors import UserError
from heads.registry import build_head
from heads.target.decoder import why_not_native
from heads.target.frozen import FrozenTarget, load_target
from tests.closeness import assert_close
from tests.faults import signal_at
from tests.runs import Settings, WriteRecipe, measured_run, same, the_error, weights
from tests.runs import train_in as train
from train.adapter import Joint
from train.data.packing import Rows
from train.entry import attempt
from train.features.source import make_batch
from train.interrupts import Interrupted
from train.optim import make_optimizer, set_lr
from train.recipe import Adapter, Train


@pytest.fixture
def small(settings: Settings) -> Settings:
    """A run in two stages of three steps that takes a second."""
    settings["head"] = {"kind": "medusa", "depth": 2, "tree_nodes": 6}
    settings["target"]["adapter"] = {"first_step": 3, "rank": 4, "alpha": 8.0}
    settings["train"] |= {"max_steps": 6, "log_every": 1, "checkpoint_every": 3}
    settings["eval"]["report"] = {"repeats": 1, "trees": ["head"]}
    return settings


@pytest.fixture
def target(tiny_target_dir: Path) -> FrozenTarget:
    return load_target(str(tiny_target_dir))


def make_joint(target: FrozenTarget, **changes: Any) -> Joint:
    torch.manual_seed(0)
    head = build_head("medusa", {"depth": 2}, target, torch.ones(128, dtype=torch.int64))
    return Joint(head, target, Adapter(**{"first_step": 1, "rank": 4, "dropout": 0.0, **changes}), seed=0)


def disturb(joint: Joint) -> None:
    """A trained adapter: its second matrices begin at zero."""
    with torch.no_grad():
        for matrix in joint.adapter.matrices.values():
            matrix.normal_(0.0, 0.1)


def rows_of(length: int = 24) -> Rows:
    torch.manual_seed(3)
    documents = torch.tensor([[0] * 10 + [1] * (length - 12) + [-1] * 2, [0] * length])
    positions = torch.tensor([[*range(10), *range(length - 12), 0, 0], [*range(length)]])
    return Rows(torch.randint(6, 128, (2, length)), (positions >= 2) & (documents >= 0), positions, documents)


def features(joint: Joint) -> Batch:
    with joint.original_target():
        return make_batch(joint.adapter.target, rows_of(), (), torch.float32)


def test_a_new_adapter_changes_nothing_and_off_it_never_does(target: FrozenTarget) -> None:
    ids = torch.arange(6, 30)[None]
    with torch.no_grad():
        before = target.model(input_ids=ids).logits
        joint = make_joint(target)
        assert torch.equal(target.model(input_ids=ids).logits, before)
        disturb(joint)
        assert not torch.allclose(target.model(input_ids=ids).logits, before, atol=0.1)
        with joint.original_target():
            assert torch.equal(target.model(input_ids=ids).logits, before)
    assert "has an adapter" in str(why_not_native(target))  # or the runtime would pass it over
    assert all(parameter.requires_grad for parameter in joint.adapter.matrices.values())
    frozen = [name for name, p in target.model.named_parameters() if "lora" not in name and p.requires_grad]
    assert not frozen


def test_the_joint_loss_is_the_heads_and_the_divergence_of_the_distributions(target: FrozenTarget) -> None:
    joint = make_joint(target, heads_weight=0.3)
    disturb(joint)
    joint.begin_step(1)
    rows = rows_of()
    counts = joint.counts(rows.loss_mask, rows.documents)
    assert counts[-1] == rows.loss_mask.sum()
    found = joint.loss(features(joint), torch.tensor(joint.depth_weights) / counts)
    batch = features(joint)
    on = target.packed_features(batch.tokens, batch.positions, batch.documents, ())
    own = joint.drafts.loss(dataclasses.replace(batch, hidden=on.hidden), torch.tensor([1.0, 0.8]) / counts[:2])
    distributions = [target.shared.lm_head(hidden).log_softmax(-1) for hidden in (batch.hidden, on.hidden)]
    at = (batch.loss_mask[:, 1:] & (batch.documents[:, 1:] == batch.documents[:, :-1])).nonzero(as_tuple=True)
    drift = kl_div(distributions[1][at], distributions[0][at], log_target=True, reduction="sum")
    torch.testing.assert_close(found.sums, torch.cat([own.sums, drift[None]]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.loss, 0.3 * own.loss + drift / counts[-1], rtol=1e-4, atol=1e-4)
    found.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in joint.parameters() if p.requires_grad)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_heads_learn_at_a_multiple_and_the_adapter_warms_up_on_its_own(optimizer: Any, target: FrozenTarget) -> None:
    joint = make_joint(target, first_step=10, head_lr_multiple=5.0)
    settings = Train(max_steps=20, lr=0.1, warmup_steps=3, schedule="wsd", decay_fraction=0.05, optimizer=optimizer)
    made = make_optimizer(joint.parts(), settings)
    ours = {id(p) for p in joint.adapter.matrices.values()}

    def rates(step: int) -> tuple[set[float], set[float]]:
        set_lr(made, step, settings)
        found: tuple[set[float], set[float]] = (set(), set())
        for group in made.param_groups:
            for parameter in group["params"]:
                found[id(parameter) in ours].add(round(group["lr"], 6))
        return found

    assert rates(0) == ({0.125}, {0.0})
    assert rates(9) == ({0.5}, {0.0})
    assert rates(10) == ({0.5}, {0.025})
    assert rates(13) == ({0.5}, {0.1})
    assert sum(len(group["params"]) for group in made.param_groups) == len(ours) + len(list(joint.head.parameters()))


def test_two_stages_go_on_bit_for_bit(small: Settings, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    """Broken in the second stage, dropout and all."""
    small["train"]["keep_checkpoints"] = 9
    unbroken = train(small, write_recipe)
    stages = [weights(unbroken, step) for step in (3, 6)]
    lora = [name for name in stages[0] if "lora_B" in name]
    assert lora and all(stages[0][name].abs().sum() == 0 for name in lora)  # not begun
    assert all(stages[1][name].abs().sum() > 0 for name in lora)
    small["output_dir"] = str(tmp_path / "broken")
    with signal_at(5), pytest.raises(Interrupted):
        train(small, write_recipe)
    assert (tmp_path / "broken/checkpoints/step-5").is_dir()
    broken = train(small, write_recipe)
    for name in ("head", "optimizer"):
        assert same(weights(unbroken, 6, name), weights(broken, 6, name))


def test_what_is_published_is_heads_and_adapter_and_its_audit_is_against_the_adapted_target(
    small: Settings, write_recipe: WriteRecipe, target: FrozenTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    small["train"] |= {"lr": 0.05, "max_steps": 8}
    small["eval"]["report"]["trees"] = ["head", "chain:2"]
    small["eval"]["report"]["temperatures"] = [0, 1]
    folder, results = measured_run("medusa", small, write_recipe)
    assert sorted(path.name for path in (folder / "head/adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert results["exact"]["prompts"] == 8
    assert results["target"]["adapter"]["rank"] == 4 and results["target"]["fingerprint"] == target.fingerprint
    said = capsys.readouterr().out
    for text in (said, (folder / "report.html").read_text(), (folder / "README.md").read_text()):
        assert "adapted target" in " ".join(text.split())

    ids, base = torch.arange(6, 40)[None], load_target(target.name)
    with torch.no_grad():
        with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # peft's own
            wrapped: Any = PeftModel.from_pretrained(base.model, str(folder / "head/adapter")).eval()
        expected, plain = wrapped(input_ids=ids).logits, target.model(input_ids=ids).logits
        adapt_target(folder, target)
        merged = target.model(input_ids=ids).logits
    assert_close(merged, expected, roundings=256)
    assert not torch.allclose(merged, plain, atol=1e-3)
    assert isinstance(fitting_head(str(folder), target), type(load_head(folder)))


def test_a_head_for_an_adapted_target_is_refused_elsewhere(
    small: Settings, write_recipe: WriteRecipe, target: FrozenTarget
) -> None:
    run = train(small, write_recipe)
    with pytest.raises(UserError, match="trained for the target with the adapter in its folder"):
        fitting_head(str(run), target)
    file = run / "head/adapter/adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UserError, match="not the adapter that the head was saved with"):
        adapt_target(run, target)
    shutil.rmtree(run / "head/adapter")
    with pytest.raises(UserError, match=r"adapter_config\.json: missing"):
        adapt_target(run, target)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"modules": ["no_proj"]}, "target.adapter.modules: 'no_proj' fits no linear layer of"),
        ({"modules": ["lm_head"]}, "but its output head, which stays as it is"),
        ({"modules": ["q_proj", "embed_tokens"]}, "'embed_tokens' fits no linear layer"),
        ({"first_step": 6}, "target.adapter.first_step: expected less than train.max_steps (6)"),
    ],
)
def test_bad_adapters_are_one_line_and_status_2(
    change: Settings, fault: str, small: Settings, write_recipe: WriteRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    small["target"]["adapter"] |= change
    assert attempt("medusa", [str(write_recipe(small))]) == 2
    assert fault in the_error(capsys)
    assert not Path(small["output_dir"]).exists()


def test_heads_that_read_aux_layers_are_not_trained_with_an_adapter(small: Settings, write_recipe: WriteRecipe) -> None:
    small["head"] = {"kind": "eagle3", "depth": 2, "intermediate_size": 32}
    small["eval"] |= {"tree": "chain:2", "report": {}}
    with pytest.raises(UserError, match="only heads on its last hidden state"):
        train(small, write_recipe)
