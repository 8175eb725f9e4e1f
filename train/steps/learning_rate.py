"""The learning rate of each step."""

import math

from train.recipe.recipe import Train


def learning_rate(step: int, settings: Train) -> float:
    """Return the learning rate of a step (from 0): a warm-up to `lr`, then half a cosine, or a plateau and a linear
    decay."""
    if step < settings.warmup_steps:
        return settings.lr * ((step + 1) / (settings.warmup_steps + 1))
    floor = settings.min_lr_ratio
    if settings.schedule == "cosine":
        done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
        return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    decay_steps = max(1, round(settings.decay_fraction * settings.steps))
    left = (settings.steps - step) / decay_steps
    return settings.lr * (floor + (1 - floor) * min(1.0, left))
