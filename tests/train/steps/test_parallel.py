"""The forms in which several processes train one head make the same steps, and go on from each other's checkpoints."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.core.errors import UserError
from tests.support.processes import ROOT, finish, form_launcher, start
from tests.support.training_steps import Job, stored
from train.recipe.recipe import Train
from train.steps.stepper import rows_of_process, rows_per_step

FORMS = ["ddp", "fsdp", "zero2", "zero3"]
DOUBLE = ("ddp", "fsdp")  # DeepSpeed keeps weights in float32
BLOCK = {"num_layers": 1, "block_size": 4, "mask_token_id": 2, "aux_layer_ids": [1, 2]}
JOBS: dict[str, dict[str, Any]] = {
    "adamw": {"end": 20, "train": {"optimizer": "adamw"}},
    "muon": {"end": 9, "train": {"optimizer": "muon"}},
    "d_pace": {"end": 20, "kind": "dflash", "head": BLOCK | {"weights": "d_pace"}},
    "domino": {"end": 9, "kind": "domino", "head": BLOCK | {"gru_hidden_dim": 8, "emb_dim": 8}},
}
Alone = Callable[[str, str], dict[str, torch.Tensor]]


@pytest.mark.parametrize(("batch", "processes"), [(4, 1), (1, 1), (2, 2), (1, 2), (1, 4)])
def test_a_step_sees_the_same_rows_however_it_is_cut_up(batch: int, processes: int) -> None:
    own = [rows_of_process(5, 4, batch, process, processes) for process in range(processes)]
    seen = [row for same_pass in zip(*own, strict=True) for place in same_pass for row in place]
    assert seen == [20, 21, 22, 23]


def test_the_passes_of_a_step_follow_from_its_tokens() -> None:
    train = Train(max_steps=1, batch_size=2, tokens_per_step=4096)
    assert [rows_per_step(train, 256, processes) for processes in (1, 2, 4, 8)] == [16] * 4
    with pytest.raises(UserError, match=r"train\.tokens_per_step: 4096 .* 1536 tokens .* 3 processes.* 3072 or 4608"):
        rows_per_step(train, 256, 3)
    with pytest.raises(UserError, match=r"expected 8192,"):
        rows_per_step(train, 2048, 2)


def run(job: Job, form: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors that a job leaves; in one process, or in two of a form."""
    launch = None if form is None else form_launcher(form)
    finish(start(job.write(), launcher=launch, script=ROOT / "tests/support/training_steps.py"))
    return stored(Path(job.folder) / f"step-{job.end}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """(job, dtype) -> the tensors that it leaves in one process, made once."""

    @cache
    def make(what: str, dtype: str) -> dict[str, torch.Tensor]:
        return run(Job(str(tmp_path_factory.mktemp("alone")), dtype=dtype, **JOBS[what]))

    return make


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((tensor.double() - b[name].double()).abs().max()) for name, tensor in a.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "form"), [*(("adamw", form) for form in FORMS), ("d_pace", "ddp"), ("d_pace", "zero3"), ("domino", "fsdp")]
)
def test_two_processes_are_one(what: str, form: str, alone: Alone, tmp_path: Path) -> None:
    dtype = "float64" if form in DOUBLE else "float32"
    two = run(Job(str(tmp_path), dtype=dtype, **JOBS[what]), form)
    assert furthest(alone(what, dtype), two) < (1e-10 if form in DOUBLE else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_in_another_number_of_processes(form: str, alone: Alone, tmp_path: Path) -> None:
    """Two, one, two processes of a form, with the optimizer's state, against one unbroken run of one."""
    what, dtype = ("muon", "float64") if form in DOUBLE else ("adamw", "float32")
    end = JOBS[what]["end"]
    for begin, until, some in ((0, 3, form), (3, end - 3, None), (end - 3, end, form)):
        last = run(Job(str(tmp_path), begin=begin, dtype=dtype, **JOBS[what] | {"end": until}), some)
    assert furthest(alone(what, dtype), last) < (1e-10 if form in DOUBLE else 1e-5)
