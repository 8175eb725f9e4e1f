"""Training steps of a small head, as a program for any launch. It generates its own data, and measures nothing. The
command is:

    accelerate launch ... tests/support/training_steps.py JOB.json
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from heads.registry import build_head
from tests.support.small_targets import CPU, make_target
from train.core.processes import leave
from train.data.corpus import Document, corpus_of
from train.data.packing import Mixture, Pool
from train.features.feature_source import FeatureSource
from train.recipe.recipe import Train
from train.run.checkpoints import RunState, load_checkpoint, save_checkpoint
from train.steps.accelerate_launch import make_accelerator
from train.steps.parallel import LossModule
from train.steps.stepper import Interval, Stepper

T = 24


@dataclass(frozen=True)
class Job:
    """Settings of the steps from `begin` to `end`. They start from the checkpoint of `begin`, and end in another."""

    folder: str
    end: int
    begin: int = 0
    rows: int = 4
    dtype: str = "float64"
    kind: str = "eagle3"
    head: dict[str, Any] = field(default_factory=lambda: {"aux_layer_ids": [1, 2, 3], "depth": 2})
    train: dict[str, Any] = field(default_factory=dict)

    def write(self) -> Path:
        """Write the job to a file, and return its path."""
        path = Path(self.folder) / f"{self.begin}-{self.end}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return path


def make_mixture() -> Mixture:
    """Return texts of several lengths, in which some tokens are labels."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, T + 1, 64)
    documents = [
        Document(rng.integers(3, 61, n).astype(np.int32), rng.random(n) < share)
        for n, share in zip(lengths, np.resize([0.9, 0.3, 0.6], 64), strict=True)
    ]
    return Mixture([Pool(corpus_of(documents), T)], [1.0], seed=0)


def make_steps(job: Job) -> None:
    """Run a job in this process, as all processes of the launch do."""
    settings = Train(max_steps=100, batch_size=1, lr=0.01, weight_decay=0.1, precision="fp32", **job.train)
    dtype, folder = getattr(torch, job.dtype), Path(job.folder)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else CPU
    # Load the target before ZeRO-3 is on, which would shard it.
    target, mixture = make_target("llama", dtype, device, initializer_range=0.1), make_mixture()
    accelerator = make_accelerator(settings)
    torch.manual_seed(1)
    head = cast(nn.Module, build_head(job.kind, job.head, target, mixture.label_counts(61)))
    module = LossModule(head.to(accelerator.device, dtype))
    stepper = Stepper(settings, module, FeatureSource(target), mixture, accelerator, job.rows)
    if job.begin:
        load_checkpoint(stepper.strategy, folder / f"step-{job.begin}")
    for number in range(job.begin, job.end):
        stepper.step(number, Interval(), stop=False)
    state = RunState("", accelerator.num_processes, 1, job.rows, "no", job.end)
    save_checkpoint(stepper.strategy, folder, state, keep=9)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "head.safetensors") | load_file(folder / "optimizer.safetensors")


if __name__ == "__main__":
    make_steps(Job(**json.loads(Path(sys.argv[1]).read_text())))
    leave(0)
