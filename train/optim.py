"""AdamW, or Muon with it, and learning rates as pure functions of the step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from train.recipe import Train
from train.trained import Part


def make_optimizer(
    parts: Sequence[Part], settings: Train, products: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """AdamW, or Muon for inner matrices and AdamW for the rest; norms and biases, of one dimension, are not decayed.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate serves both.
    """
    inner: list[dict[str, Any]] = []
    outer: list[dict[str, Any]] = []
    for part in parts:
        trained = [(name, p) for name, p in part.module.named_parameters() if p.requires_grad]
        muon = [
            p
            for name, p in trained
            if part.by_muon and settings.optimizer == "muon" and p.dim() == 2 and not _is_end(name)
        ]
        others = [p for _, p in trained if not any(p is matrix for matrix in muon)]
        adamw = {"lr": settings.lr, "betas": (settings.betas[0], settings.betas[1]), **part.rates}
        inner.append({"params": muon, "lr": settings.lr, "weight_decay": settings.weight_decay, **part.rates})
        outer.append({"params": [p for p in others if p.dim() >= 2], "weight_decay": settings.weight_decay, **adamw})
        outer.append({"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, **adamw})
    inner, outer = ([group for group in groups if group["params"]] for groups in (inner, outer))
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(outer)
    return Paired(Muon(inner, products=products), torch.optim.AdamW(outer))


def _is_end(name: str) -> bool:
    """True for a matrix with a row for each token or position, whose updates should not be orthogonal."""
    return any(part in name for part in ("lm_head", "embed", "wte", "wpe", "markov"))


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024): the momentum of each matrix, made orthogonal by five Newton-Schulz iterations.

    The same update as `torch.optim.Muon` with `match_rms_adamw`, which computes in bfloat16 on every machine; here the
    dtype of the iterations' products is an argument. They need no more than bfloat16, but some processors emulate it.
    """

    def __init__(self, params: Any, *, momentum: float = 0.95, products: torch.dtype = torch.float32) -> None:
        """`params`: groups, each with its `lr` and `weight_decay`."""
        super().__init__(params, {"momentum": momentum})
        self.products = products

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            momentum = group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - momentum)
                update = orthogonal(p.grad.lerp(buffer, momentum), self.products)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.to(p.dtype), alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix with its singular values near 1: between 0.5 and 1.5, by a quintic iteration that favours speed."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(dtype)
    tall = len(x) > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Paired(torch.optim.Optimizer):
    """Two optimizers over different parameters, as the one that checkpoints and Accelerate expect."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups  # the parts' own, so that a rate set here is set there
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Both states under one numbering: the first part's parameters, then the second's."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for part in self.parts:
            own, offset = part.state_dict(), _num_parameters(groups)
            state |= {offset + index: value for index, value in own["state"].items()}
            groups += [
                {**group, "params": [offset + index for index in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        at = offset = 0
        for part in self.parts:
            groups = state_dict["param_groups"][at : at + len(part.param_groups)]
            count = _num_parameters(groups)
            own = {index - offset: value for index, value in state_dict["state"].items() if 0 <= index - offset < count}
            local = [{**group, "params": [index - offset for index in group["params"]]} for group in groups]
            part.load_state_dict({"state": own, "param_groups": local})
            at, offset = at + len(groups), offset + count
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def _num_parameters(groups: list[dict[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)


def lr_factor(step: int, settings: Train) -> float:
    """The learning rate of a step (from 0), in parts of `lr`: warm-up, then half a cosine, or a plateau and a fall."""
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    floor = settings.min_lr_ratio
    if settings.schedule == "cosine":
        done = (step - settings.warmup_steps) / max(1, settings.max_steps - settings.warmup_steps)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    decay_steps = max(1, round(settings.decay_fraction * settings.max_steps))
    left = (settings.max_steps - step) / decay_steps
    return floor + (1 - floor) * min(1.0, left)


def set_lr(optimizer: torch.optim.Optimizer, step: int, settings: Train) -> None:
    """The rate of every group; no scheduler object, which Accelerate would step once for every process.

    A group may have `lr_multiple`, and `lr_from`, the step with which it begins, by a warm-up of its own.
    """
    lr = settings.lr * lr_factor(step, settings)
    for group in optimizer.param_groups:
        begun = step - group.get("lr_from", 0)
        warm = min(1.0, max(0, begun + 1) / (settings.warmup_steps + 1)) if group.get("lr_from") else 1.0
        group["lr"] = lr * group.get("lr_multiple", 1.0) * warm
