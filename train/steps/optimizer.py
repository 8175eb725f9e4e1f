"""Optimizers, AdamW or Muon with AdamW, and learning rates as pure functions of the step."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from train.recipe.recipe import Train

MOMENTUM = 0.95
"""Momentum of Muon."""
GATED = {nn.GRU: 3, nn.LSTM: 4}
STACKED = {"in_proj_weight": 3, "gate_up_proj.weight": 2}
"""Number of matrices that lie one above the other in one parameter, by the module's class or the end of the name."""


def make_optimizer(head: nn.Module, settings: Train, products: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """Return AdamW, or Muon for inner matrices and AdamW for the rest.

    Norms, biases and channel scales are not decayed. Muon's updates are scaled to the size of AdamW's, so that both
    groups take one learning rate. AdamW alone wants a lower one (`train.plan.derive.ADAMW_RATE`).
    """
    tables = table_ids(head)
    stacked = matrices_of(head)
    inner: dict[int, list[Tensor]] = {}
    decayed: list[Tensor] = []
    scales: list[Tensor] = []
    for name, p in head.named_parameters():
        if not p.requires_grad:
            continue
        if settings.optimizer == "muon" and p.dim() == 2 and id(p) not in tables:
            inner.setdefault(stacked.get(name, 1), []).append(p)
        elif p.dim() < 2 or name.endswith("base_kernel"):  # of a per-channel convolution that starts as the identity
            scales.append(p)
        else:
            decayed.append(p)
    alike = {"lr": settings.lr, "betas": (settings.betas[0], settings.betas[1])}
    muon = {"momentum": MOMENTUM, "weight_decay": settings.weight_decay, **alike}
    groups: list[dict[str, object]] = [
        *({"params": params, "matrices": count, **muon} for count, params in inner.items()),
        {"params": decayed, "weight_decay": settings.weight_decay, **alike},
        {"params": scales, "weight_decay": 0.0, **alike},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups) if settings.optimizer == "adamw" else Muon(groups, products=products)


def table_ids(head: nn.Module) -> set[int]:
    """Return the ids of the parameters with a row or column for each token or position, whose updates should not be
    orthogonal: embeddings, a draft model's output head, and what modules name in `tables`."""
    tables: list[object] = []
    for module in head.modules():
        if isinstance(module, nn.Embedding):
            tables.append(module.weight)
        tables += [module.get_parameter(name) for name in getattr(module, "tables", ())]
    if (model := getattr(head, "language_model", None)) is not None:
        tables.append(model.get_output_embeddings().weight)
    return {id(parameter) for parameter in tables}


def matrices_of(head: nn.Module) -> dict[str, int]:
    """Return the names of the parameters that hold several matrices, such as a GRU's gates, and how many they hold."""
    found = {}
    for name, _ in head.named_parameters():
        owner = type(head.get_submodule(name.rpartition(".")[0]))
        counts = [count for kind, count in GATED.items() if issubclass(owner, kind)]
        counts += [count for end, count in STACKED.items() if name.endswith(end)]
        if counts:
            found[name] = counts[0]
    return found


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al., 2024) for the parameter groups with a `momentum`, and AdamW for the other groups.

    Five Newton-Schulz iterations orthogonalise the momentum. The update equals that of `torch.optim.Muon` with
    `match_rms_adamw`, which always computes in bfloat16. Here the dtype of the iterations' products is an argument:
    bfloat16 is precise enough, but some processors only emulate it. A group's `matrices` is the number of matrices in
    each of its parameters, which are orthogonalised one by one.
    """

    def __init__(self, params: list[dict[str, object]], *, products: torch.dtype = torch.float32) -> None:
        """`params`: groups, each with its `lr` and `weight_decay`."""
        super().__init__(params)
        self.products = products

    def __setstate__(self, state: dict[str, object]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's reads `step`, which a matrix has not

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        for group in groups:
            if "momentum" in group:
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, p.grad, group)
        self.param_groups = [group for group in groups if "momentum" not in group]
        super().step()
        self.param_groups = groups

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(grad))
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"])
        if isinstance(update, DTensor):
            whole = self._direction(update.full_tensor(), group["matrices"])
            update = distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)
        else:
            update = self._direction(update, group["matrices"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"])

    def _direction(self, stacked: Tensor, matrices: int) -> Tensor:
        parts = stacked.chunk(matrices)
        length = 0.2 * math.sqrt(max(parts[0].shape))
        return torch.cat([length * orthogonal(part, self.products).to(part.dtype) for part in parts])


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix with its singular values moved near 1, between 0.5 and 1.5, by a fast quintic iteration."""
    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = matrix.to(dtype)
    tall = len(x) > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
