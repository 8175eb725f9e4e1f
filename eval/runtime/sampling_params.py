"""Sampling settings of a request, and the names of the acceptance rules with the trees that each rule can judge.

`eval.runtime.distribution` chooses tokens with these settings. `eval.runtime.rules` implements the rules.

| rule | draft tokens | output | trees |
|---|---|---|---|
| match | the likeliest, under the target's own noise | the same tokens as plain decoding | all |
| ratio | drawn from the draft's distribution | a different sample from the target's distribution | chain, static |
| block | drawn from the draft's distribution | a different sample from the target's distribution | chain |

The command line reads these settings, so this file does not import torch.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from heads.core.errors import UserError
from heads.core.tree import TreeShape, is_chain

COLDEST, HOTTEST = 1e-6, 1e6
FILTERS = ("top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
Rule = Literal["match", "ratio", "block"]
RULES = get_args(Rule)


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a request. Temperature 0 is greedy: the filters and the seed then have no effect. Penalties
    change the logits before all else, at temperature 0, too, as in vLLM and transformers."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k likeliest tokens (lowest ids on ties); 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens until their total probability reaches this share; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest; 0 keeps all."""
    seed: int = 0
    repetition_penalty: float = 1.0
    """Divide the positive logits of tokens that stand in the prompt or the output so far by this number, and multiply
    the negative ones by it (CTRL, arXiv 1909.05858); 1 leaves them. With an encoder, the prompt is the decoder's."""
    presence_penalty: float = 0.0
    """Then subtract this number from the logits of tokens that stand in the output so far."""
    frequency_penalty: float = 0.0
    """Then subtract this number from a token's logit as often as the token stands in the output so far."""

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST):
            raise UserError(
                f"temperature: expected 0 (greedy) or a number from {COLDEST} to {HOTTEST:.0f}, got {self.temperature}"
            )
        if not 0 <= self.top_k < 2**63:
            raise UserError(f"top_k: expected a count, or 0 to keep all tokens, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: expected a share above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p: expected a share from 0 to 1, got {self.min_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed: expected an integer of at most 64 bits, got {self.seed}")
        if not COLDEST <= self.repetition_penalty <= HOTTEST:
            raise UserError(
                f"repetition_penalty: expected 1 (none) or a number from {COLDEST} to {HOTTEST:.0f}, got "
                f"{self.repetition_penalty}"
            )
        for name in PENALTIES[1:]:
            if not -2 <= getattr(self, name) <= 2:
                raise UserError(f"{name}: expected 0 (none) or a number from -2 to 2, got {getattr(self, name)}")

    @property
    def filters(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalties(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in PENALTIES)

    @property
    def penalises(self) -> bool:
        return self.penalties != (1, 0, 0)


def check_rule(rule: str, shape: TreeShape) -> None:
    if rule not in RULES:
        raise UserError(f"rule {rule!r}: expected one of {', '.join(RULES)}")
    if rule == "match" or is_chain(shape):
        return
    if rule == "block":
        raise UserError(
            f"rule block judges chains, not the tree {shape}; use rule ratio or match, or chain:{shape.depth}"
        )
    if shape.paths is None:
        raise UserError(
            f"rule {rule}: the tree {shape} keeps the nodes that the draft is surest of, and the distribution of what "
            "survives that is not the distribution they were drawn from; use rule match, or a chain or static tree"
        )
    for path in shape.paths:
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in shape.paths:
            raise UserError(
                f"rule {rule}: the static tree {shape} has node {path} without its elder sibling, rank {path[-1] - 1}; "
                "a draw that is left out changes the distribution of the next; use rule match, or number siblings "
                "from 0"
            )
