"""Target, head and provenance of a run, each made from its own section of the recipe."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.benchmark.environment import device_facts, versions
from eval.benchmark.opening import load_pair
from heads.base import DraftHead
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from train.launch import unpartitioned
from train.recipe import Target


def load_recipe_target(settings: Target, accelerator: Accelerator) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """The frozen target on this process's device, and its tokenizer."""
    with unpartitioned(accelerator):
        return load_pair(
            settings.path,
            dtype=settings.dtype,
            device=accelerator.device,
            trust_remote_code=settings.trust_remote_code,
            quantize=settings.quantize,
        )


def make_head(settings: dict[str, Any], target: FrozenTarget, token_counts: Tensor | None = None) -> DraftHead:
    """A new head by a recipe's `head`.

    token_counts (V,) int64: occurrences of each token as a label. Without them the head serves only to check the
    settings against the target, before time is spent on data.
    """
    if token_counts is None:
        token_counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    given = {name: value for name, value in settings.items() if name != "kind"}
    head: DraftHead = build_head(settings["kind"], given, target, token_counts)
    return head


def make_provenance(
    sources: dict[str, Any], target: FrozenTarget, data_hash: str, *, num_processes: int
) -> dict[str, Any]:
    """The content of provenance.json; `sources` are the settings of the data."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "device": device_facts(target.device),
        "num_processes": num_processes,
        "target": {
            "path": target.name,
            "fingerprint": target.fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
        },
        "data": {"sources": sources, "sha256": data_hash},
    }
