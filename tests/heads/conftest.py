"""Fixtures of the tests of heads/."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads.blocks import block_loss
from heads.parts import losses
from heads.registry import build_head
from heads.saved import save_head, target_record
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> FrozenTarget:
    """A Llama of 8 layers and 128 tokens."""
    return load_target(str(tiny_target_dir), dtype=torch.float32)


@pytest.fixture
def saved(target: FrozenTarget, tmp_path: Path) -> Callable[..., Path]:
    """A function (kind, settings of a head) that saves a new head of the target and returns its folder."""

    def save(kind: str, **settings: Any) -> Path:
        return save_new(tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}", target, kind, **settings)

    return save


def save_new(folder: Path, target: FrozenTarget, kind: str, **settings: Any) -> Path:
    head = build_head(kind, settings, target, torch.zeros(target.vocab_size))  # whose weights nothing reads
    save_head(head, folder, target=target_record(target))
    return folder


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the number of rows in a chunk of a loss."""

    def set_to(count: int) -> None:
        monkeypatch.setitem(losses.CHUNK_BYTES, "cpu", 0)
        for module in (losses, block_loss):
            monkeypatch.setattr(module, "MIN_ROWS", count)

    return set_to


def largest_tensor(action: Callable[[], object]) -> int:
    """Return the most elements of any tensor that an operation makes while an action runs."""
    most = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            out = func(*args, **(kwargs or {}))
            made = out if isinstance(out, (tuple, list)) else (out,)
            most = max([most, *(tensor.numel() for tensor in made if isinstance(tensor, Tensor))])
            return out

    watch: Any = Watch
    with watch():
        action()
    return most
