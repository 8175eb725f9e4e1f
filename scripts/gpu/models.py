"""Models for measurements on a GPU: the quickstart's target, and the same target grown to a big model's shape."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.checkpoint import load_head
from heads.registry import build_head
from heads.target.frozen import FrozenTarget, load_target
from scripts.grown.heads import HeadSize, grow_head
from scripts.grown.shapes import ModelShape
from scripts.grown.target import Growth, grow_llama, shape_of

ROOT = Path(__file__).resolve().parents[2]
TARGET, HEAD = ROOT / "recipes/quickstart/target", ROOT / "runs/quickstart/head"
LARGEST_DRAFT_VOCAB = 32_000
LONGEST = 1 << 17
"""Context length of the grown target for timing. Beyond the small target's context its output has no meaning."""


@dataclass(frozen=True)
class Models:
    """Target and head."""

    target: FrozenTarget
    head: Any
    head_name: str


def small_models(device: torch.device, head_path: Path | None = None) -> Models:
    """Return the quickstart's target in bfloat16 and a head for it, untrained if there is no trained head."""
    target = load_target(str(TARGET), dtype=torch.bfloat16, device="cpu")
    path = head_path or HEAD
    head: Any
    if path.is_dir():
        head = load_head(path, dtype=torch.bfloat16)
    else:
        head = build_head("eagle3", {}, target, torch.ones(target.vocab_size, dtype=torch.int64)).to(torch.bfloat16)
    target.model.to(device)  # type: ignore[arg-type]
    name = str(path) if path.is_dir() else "untrained: tau is no trained head's"
    return Models(target, head.to(device).eval(), name)


def grow_models(models: Models, shape: ModelShape, device: torch.device, draft_vocab: int) -> Models:
    """Return the models in another shape, on the device. New ids extend the draft vocabulary up to `draft_vocab`.
    Raise UserError if the head cannot be grown to this shape."""
    head = copy.deepcopy(models.head).to(torch.device("cpu"))
    growth = Growth(shape_of(models.target.config), shape, models.target.config.rms_norm_eps)
    grown = grow_llama(copy.deepcopy(models.target.model), shape)
    spare = shape.vocab_size - models.target.vocab_size
    surplus = min(spare, draft_vocab - head.config.draft_vocab_size)
    large = grow_head(head, growth, HeadSize(draft_vocab_size=head.config.draft_vocab_size + max(0, surplus)))
    untyped: Any = grown
    target = FrozenTarget(untyped.to(device), "grown quickstart")
    target.context_length = LONGEST
    return Models(target, large.to(device), models.head_name)
