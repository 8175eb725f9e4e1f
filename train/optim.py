"""AdamW over two parameter groups, and learning rates as pure functions of the step."""

import math

import torch
from torch import nn

from train.recipe import Train


def make_optimizer(head: nn.Module, settings: Train) -> torch.optim.AdamW:
    """AdamW; norms and biases, which have one dimension, are not decayed."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.betas[0], settings.betas[1]))


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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One rate for all groups; no scheduler object, which Accelerate would step once for every process."""
    for group in optimizer.param_groups:
        group["lr"] = lr
