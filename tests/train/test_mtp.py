"""Whole runs of multi-token prediction: from scratch and from a checkpoint's own modules, audited at their end."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.runtime.engine import Request
from eval.runtime.sampling import Sampling
from heads.registry import build_head
from heads.targets.load import load_target
from tests.conftest import make_tiny_tokenizer
from tests.native_mtp import write_native
from tests.runs import Settings, WriteRecipe, audit, measured_run


@pytest.fixture
def small(settings: Settings) -> Settings:
    """A run that takes a second."""
    settings["train"] |= {"max_steps": 2, "log_every": 1}
    settings["eval"]["report"] = {"repeats": 1, "trees": ["chain:3", "tree:3x2x6"], "temperatures": [0, 1]}
    return settings


@pytest.mark.parametrize(
    "head",
    [{"draft_vocab_size": 100}, {"num_modules": 2, "layout": "deepseek"}],
    ids=["one module", "two modules"],
)
def test_from_scratch(
    head: Settings, small: Settings, write_recipe: WriteRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    small["head"] = {"kind": "mtp", "depth": 2, "intermediate_size": 32, **head}
    names = load_file(measured_run("mtp", small, write_recipe)[0] / "head/model.safetensors").keys()
    said = capsys.readouterr().err
    assert said.count("no engine serves it") == 1 and "use_aux_hidden_state: false" in said
    assert ("d2t" in names) == ("draft_vocab_size" in head)
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name or "shared_head.head" in name]


@pytest.mark.parametrize(
    ("family", "precision"), [("mimo", "bf16"), ("deepseek", "bf16"), ("glm", "fp32"), ("qwen_fused", "fp32")]
)
def test_a_checkpoints_own_modules_are_fine_tuned(
    family: str, precision: str, small: Settings, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    folder = tmp_path / "native"
    native = write_native(folder, family)
    make_tiny_tokenizer().save_pretrained(folder)
    small["target"]["path"] = str(folder)
    small["head"] = {"kind": "mtp", "native": True}
    small["train"] |= {"precision": precision, "lr": 1e-3}
    saved = load_file(measured_run("mtp", small, write_recipe)[0] / "head/model.safetensors")
    assert saved.keys() == native.keys()
    moved = [name for name, value in native.items() if not torch.equal(value, saved[name])]
    fixed = {name for name in native if "e_score_correction_bias" in name}  # no gradient reaches the choice of experts
    assert set(native) - set(moved) <= fixed | {name for name in native if ".experts." in name}
    assert all(saved[name].dtype == value.dtype for name, value in native.items())
    assert all((saved[name] - native[name]).abs().max() < 0.01 for name in native)


@pytest.mark.parametrize(("num_modules", "temperature"), [(3, 0.0), (1, 1.0)])
def test_output_is_the_targets_own(num_modules: int, temperature: float, tiny_target_dir: Path) -> None:
    torch.manual_seed(0)
    target = load_target(str(tiny_target_dir), dtype=torch.float64)
    head = build_head("mtp", {"num_modules": num_modules}, target, torch.ones(128)).double()
    requests = [
        Request(torch.randint(6, 128, (n,)).tolist(), 24, Sampling(temperature, seed=n))
        for n in (1, 2, 9, 5, 14, 3, 7, 4, 6)
    ]
    audit(target, head, requests, ("chain:4", "tree:4x3x12", "static:3.2.1"))
