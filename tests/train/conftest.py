"""A recipe in a folder of its own, and a head small enough that a whole run takes a second."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from heads.base import Batch, HeadLoss, Observation, Pick, SharedLayers
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, TreeShape

TEXT = "the sea is near the trees and the stone is on the sand; there are ten birds in the den. "


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """One matrix a depth."""

    depth: int = 2
    aux_layer_ids: tuple[int, ...] | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LinearConfig(LinearSettings):
    hidden_size: int = 0
    vocab_size: int = 0


class LinearHead(nn.Module):
    """Medusa's simplest form: depth k is a matrix on the last hidden state h_t and predicts x_{t+1+k}; no draft
    vocabulary."""

    Settings = LinearSettings
    aux_layer_ids: tuple[int, ...] = ()
    own_tree = None
    language_model = None

    def __init__(self, config: LinearConfig):
        super().__init__()
        self.config = config
        self.depth_weights = tuple(0.8**k for k in range(config.depth))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(config.depth)
        )
        self.register_buffer("scale", torch.tensor(config.scale))

    def masks(self, loss_mask: Tensor, documents: Tensor) -> list[Tensor]:
        """For each depth, the slots (B, T) whose label is supervised and lies in the same document."""
        out = []
        for k in range(1, self.config.depth + 1):
            shift = k + 1
            same = (documents[:, shift:] == documents[:, :-shift]) & (documents[:, shift:] >= 0) & loss_mask[:, shift:]
            out.append(nn.functional.pad(same, (0, shift)))
        return out

    def counts(self, loss_mask: Tensor, documents: Tensor) -> Tensor:
        return torch.stack([mask.sum().float() for mask in self.masks(loss_mask, documents)])

    def loss(self, batch: Batch, scale: Tensor) -> HeadLoss:
        sums, correct = [], []
        for k, (head, mask) in enumerate(
            zip(self.heads, self.masks(batch.loss_mask, batch.documents), strict=True), start=1
        ):
            labels = batch.tokens.roll(-k - 1, 1)[mask]
            logits = head(self.norm(batch.hidden[mask])).float()
            sums.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            correct.append((logits.argmax(-1) == labels).sum().float())
        summed = torch.stack(sums)
        return HeadLoss((scale * summed).sum(), summed.detach(), {"correct": torch.stack(correct)})

    def foresees(self, batch: Batch, depth: int) -> Tensor:
        guesses = [head(self.norm(batch.hidden)).argmax(-1) for head in self.heads[:depth]]
        return torch.stack([guess == batch.tokens.roll(-k - 2, 1) for k, guess in enumerate(guesses)])

    def new_state(
        self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape, backend: Any
    ) -> dict[str, Any]:
        if shape.top_k != 1 or shape.depth > self.config.depth:
            raise UserError("linear heads draft chains up to their depth")
        return {"shape": shape, "root": None, "hidden": None}

    def reset_rows(self, state: dict[str, Any], rows: Tensor) -> None:
        pass

    def extend(self, state: dict[str, Any], observation: Observation) -> None:
        rows = torch.arange(len(observation.count), device=observation.count.device)
        hidden = observation.hidden[rows, (observation.count - 1).clamp(min=0)]
        root = observation.tokens[rows, observation.count]
        live = observation.count > 0
        if state["root"] is None:
            state["root"], state["hidden"] = root.clone(), hidden.clone()
        state["root"] = torch.where(live, root, state["root"])
        state["hidden"] = torch.where(live[:, None], hidden, state["hidden"])

    def propose(self, state: dict[str, Any], pick: Pick) -> Proposal:
        shape, root = state["shape"], state["root"]
        normed = self.norm(state["hidden"])
        tokens = torch.stack([root, *(head(normed).argmax(-1) for head in self.heads[: shape.depth])], dim=1)
        depths = torch.arange(shape.nodes, device=root.device).expand(len(root), -1)
        return Proposal(tokens, (depths - 1).clamp(min=0), depths, -depths.float())


def build_linear(kind: str, settings: dict[str, Any], target: FrozenTarget, counts: Tensor) -> LinearHead:
    assert kind == "linear"
    return LinearHead(LinearConfig(**settings, hidden_size=target.hidden_size, vocab_size=target.vocab_size))


def save_linear(
    head: nn.Module, folder: Path, *, target: dict[str, Any], provenance: dict[str, Any], write_adapter: None
) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(head.state_dict(), folder / "weights.pt")


@pytest.fixture
def linear_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers head.kind `linear` for one test."""
    monkeypatch.setattr("train.head_settings.HEADS", {"linear": LinearHead})
    monkeypatch.setattr("train.loop.build_head", build_linear)
    monkeypatch.setattr("train.loop.save_head", save_linear)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps its state for the life of the process; every test begins without."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield


@pytest.fixture
def settings(tmp_path: Path, tiny_target_dir: Path) -> dict[str, Any]:
    """The settings of a complete small run on a text file."""
    (tmp_path / "data.jsonl").write_text("".join(f'{{"text": "{TEXT[n:]}{TEXT[:n]}"}}\n' for n in range(0, 80, 5)))
    (tmp_path / "prompts.jsonl").write_text('{"text": "the sea is near"}\n{"text": "there are ten"}\n')
    return {
        "output_dir": str(tmp_path / "run"),
        "target": {"path": str(tiny_target_dir)},
        "head": {"kind": "linear"},
        "data": {"sources": [{"kind": "text", "path": str(tmp_path / "data.jsonl")}], "context_length": 48},
        "train": {
            "max_steps": 6,
            "batch_size": 2,
            "lr": 0.01,
            "precision": "fp32",
            "log_every": 2,
            "checkpoint_every": 2,
        },
        "eval": {"prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 8, "tree": "chain:2"},
    }


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(tree: dict[str, Any]) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return write
