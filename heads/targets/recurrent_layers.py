"""Recurrent layers of hybrid targets with an `HFCache`: gated delta nets (Qwen3-Next, Qwen3.5), Mamba and its
successors.

transformers' own modules compute everything. A prompt is read in one call. The tokens of a verified chain pass one by
one through the code for decoding a single token, and the state after each of them is kept (`HFCache.recall`), so that
the result for an accepted token does not depend on how many tokens were verified with it.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from heads.targets.cache import HFCache, cache_name


class Stepwise:
    """Forward pass of one recurrent module, which replaces the module's own."""

    def __init__(self, mixer: Any) -> None:
        name = state_name(mixer)
        assert name is not None
        self.whole = mixer.forward
        self.index = mixer.layer_idx
        self.name = name

    def __call__(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """Run the module on hidden_states (B, N, D) -> (B, N, D). Calls without an `HFCache` go to the module's own
        forward pass."""
        cache = kwargs.get(self.name)
        if not isinstance(cache, HFCache):
            whole: Tensor = self.whole(hidden_states, **kwargs)
            return whole
        state = cache.recall(self.index)
        width = 1
        if cache.prompt:
            width = hidden_states.shape[1]
        outputs = []
        for first in range(0, hidden_states.shape[1], width):
            outputs.append(self.whole(hidden_states[:, first : first + width], **kwargs | {self.name: state}))
            state.keep(first + width)
        return torch.cat(outputs, dim=1)


def state_name(module: nn.Module) -> str | None:
    """Return the name of a module's argument for a recurrent state; None if it has none. From transformers 5.24 on,
    attention layers have an argument of the same name, but no convolutions."""
    if isinstance(module.forward, Stepwise):
        return module.forward.name
    taken = inspect.signature(module.forward).parameters
    if "cache_params" in taken:
        return "cache_params"
    convolves = any(isinstance(part, nn.Conv1d) for part in module.children())
    return "cache" if convolves and "cache" in taken else None


def find_mixers(layers: nn.Module) -> list[nn.Module]:
    """Return the recurrent modules in `layers`: the innermost modules that take a recurrent state."""
    takers = [module for module in layers.modules() if state_name(module)]
    return [module for module in takers if not {*takers} & {*module.modules()} - {module}]


@torch.no_grad()
def single_steps(base: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """Return the states (B, count, D) of the last `count` tokens, computed token by token with transformers' own cache.
    Whole sequences may give other states: some recurrent layers clamp their steps only there."""
    states = []
    cache = None
    start = 0
    name = cache_name(base)
    for end in range(tokens.shape[1] - count, tokens.shape[1] + 1):
        positions = torch.arange(start, end, device=tokens.device)[None]
        out = base(input_ids=tokens[:, start:end], position_ids=positions, use_cache=True, **{name: cache})
        states.append(out.last_hidden_state)
        cache = out[name]
        start = end
    return torch.cat(states[1:], dim=1)
