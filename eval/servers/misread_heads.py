"""Heads as an engine may have read or run them, to be tried here: what reproduces the engine's counts is the cause."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.servers.rounded_target import round_block
from heads.blocks.backbone import BlockState, DraftBlockHead
from heads.core.contract import Drafter
from heads.parts.head_shape import low_middle_high
from heads.registry import HEADS, kind_of
from heads.targets.frozen_target import FrozenTarget

DROPPED = {
    "norm_output": (),
    "fc_norm": ("fc_norm.",),
    "norm_before_fc": ("input_norm.",),
    "norm_before_residual": (),
    "sliding_window": (),
}
"""Settings of EAGLE-3 heads that a reader may drop without a word, with the beginnings of their tensors' names."""
NEAR_TIE = "another order of its sums chooses otherwise where two draft tokens are as likely"
NUDGE = 1e-5
"""Relative difference of float32 weights that moves logits by about as much as another order of their sums does."""
NUDGES = 4
"""Tries of such differences."""


@dataclass(frozen=True)
class Cause:
    """A way in which an engine may run another head than this runtime, and how it is tried here."""

    name: str
    """In a sentence: `norm_output was dropped`."""
    by: str
    """The conversion or the engine."""
    head: Callable[[], Drafter] | None = None
    depth: int | None = None


@dataclass(frozen=True)
class Misreadings:
    """What an engine may have made of a head."""

    target: FrozenTarget
    head: Drafter
    engine: str
    """Name in options."""
    depth: int
    engine_depth: int
    """Draft tokens in a round that the engine names; 0: it names none."""

    def causes(self) -> Iterator[Cause]:
        """Yield what the engine may have made of the head, the least first."""
        for seed in range(NUDGES):
            yield Cause(NEAR_TIE, "rounding", partial(self.nudged, seed))
        head: Any = self.head
        drops: dict[str, object] = {}
        names: list[str] = []
        for name, prefixes in DROPPED.items() if kind_of(head) == "eagle3" else ():
            if getattr(head.config, name, None):
                value = None if name == "sliding_window" else False
                drops[name] = value
                names += prefixes
                yield Cause(f"{name} was dropped", "the conversion", self.variant({name: value}, prefixes))
        if len(drops) > 1:
            yield Cause(f"{' and '.join(drops)} were dropped", "the conversion", self.variant(drops, names))
        ids = list(head.aux_layer_ids)
        layers = self.target.num_layers
        others = {
            "its layers are one too deep": [k + 1 for k in ids],
            "its layers are one too shallow": [k - 1 for k in ids],
            "the default layers took the place of its own": list(low_middle_high(layers)),
        }
        for name, other in others.items() if ids else ():
            if other == ids or len(other) != len(ids) or min(other) < 0 or max(other) > layers:
                continue
            words = f"{name}, {other} for {ids}"
            yield Cause(words, "the engine", self.variant({"aux_layer_ids": other}))
            if drops:
                both = self.variant({"aux_layer_ids": other, **drops}, names)
                yield Cause(f"{words}, and {' and '.join(drops)} dropped", "the engine", both)
        if isinstance(head, DraftBlockHead):
            if (causal := getattr(head.config, "causal", None)) is not None:
                yield Cause("causal was misread", "the conversion", self.variant({"causal": not causal}))
            yield Cause("the first layer's norm of keys is applied in every layer", "the engine", self.one_norm_of_keys)
        if self.engine == "llama.cpp":
            yield Cause("its weights are in 8 bits (Q8_0)", "the conversion", self.in_8_bits)
        depths = [self.engine_depth] if self.engine_depth else range(1, self.depth)
        for depth in depths:
            if depth != self.depth:
                yield Cause(f"it drafts {depth} tokens a round, not {self.depth}", "the engine", depth=depth)

    def variant(self, changes: dict[str, object], dropped: Sequence[str] = ()) -> Callable[[], Drafter]:
        """Return a function that makes the head with other settings, without the tensors whose names begin so."""

        def make() -> Drafter:
            head: Any = self.head
            whole = head.to_checkpoint()
            weights = {name: value for name, value in whole.items() if not name.startswith(tuple(dropped))}
            config = head.config.model_dump(mode="json") | changes
            made: Any = HEADS[kind_of(head)].head.from_checkpoint(config, weights)
            return made.to(device=self.target.device, dtype=self.target.dtype).eval()  # type: ignore[no-any-return]

        return make

    def in_8_bits(self) -> Drafter:
        """Return the head with its matrices as a GGUF file in Q8_0 has them."""
        return self.with_matrices(lambda value: round_block(value, "q8_0"))

    def nudged(self, seed: int) -> Drafter:
        """Return the head with matrices that differ by as little as another order of sums makes."""
        noise = torch.Generator().manual_seed(seed)
        size = max(NUDGE, torch.finfo(self.target.dtype).eps)
        return self.with_matrices(lambda value: value * (1 + size * torch.randn(value.shape, generator=noise)))

    def with_matrices(self, change: Callable[[Tensor], Tensor]) -> Drafter:
        head: Any = self.variant({})()
        with torch.no_grad():
            for value in head.parameters():
                if value.dim() == 2:
                    value.copy_(change(value.float().cpu()))
        return head  # type: ignore[no-any-return]

    def one_norm_of_keys(self) -> Drafter:
        """Return a head of blocks that norms the keys of the context in every layer as in the first: so does vLLM
        0.32's kernel for CPUs."""
        head: Any = self.variant({})()
        extend = head.extend

        def changed(state: BlockState, observation: object) -> None:
            attentions = [layer.self_attn for layer in state.head.layers]
            norms = [attention.k_norm for attention in attentions]
            for attention in attentions:
                attention.k_norm = norms[0]
            extend(state, observation)
            for attention, norm in zip(attentions, norms, strict=True):
                attention.k_norm = norm

        head.extend = changed
        return head  # type: ignore[no-any-return]
