"""Sampling settings of a request, and the names of the acceptance rules with the trees that each rule can judge.

`eval.runtime.distribution` chooses tokens with these settings. `eval.runtime.acceptance_rules` implements the rules.

| rule | draft tokens | output | trees |
|---|---|---|---|
| match | the likeliest, under the target's own noise | the same tokens as plain decoding | all |
| ratio | drawn from the draft's distribution | a different sample from the target's distribution | chain, static |
| block | drawn from the draft's distribution | a different sample from the target's distribution | chain |
| likeliest | the likeliest | a different sample from the target's distribution | all |

The command line reads these settings, so this file does not import torch.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationError

from heads.core.errors import UserError
from heads.core.strict_settings import MAX_NUMBER, Settings, first_fault
from heads.core.tree import TreeShape, is_chain

COLDEST, HOTTEST = 1e-6, 1e6
FILTERS = ("top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
Rule = Literal["match", "ratio", "block", "likeliest"]
RULES = get_args(Rule)
ANY_TREE = ("match", "likeliest")
"""Rules that judge any tree, because they draw no draft tokens."""


def check_temperature(temperature: float) -> float:
    if not (temperature == 0 or COLDEST <= temperature <= HOTTEST):
        raise ValueError(f"expected 0 (greedy) or a number from {COLDEST} to {HOTTEST:.0f}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(check_temperature)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class SharedSampling(Settings):
    """What every request of a measurement samples with, whatever its temperature and seed."""

    top_k: Annotated[int, Field(ge=0, lt=MAX_NUMBER)] = 0
    """Sample from this many most likely tokens, the lowest ids on ties; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability; 1 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens whose probability is below this fraction of the largest one; 0 keeps all."""
    repetition_penalty: Annotated[float, Field(ge=COLDEST, le=HOTTEST)] = 1.0
    """Divide the positive logits of tokens of the prompt and of the answer so far by this number, and multiply the
    negative ones by it (CTRL, arXiv 1909.05858), at any temperature; 1 is none. With an encoder, the prompt is the
    decoder's."""
    presence_penalty: Penalty = 0.0
    """Subtract this number from the logits of tokens of the answer so far; 0 is none."""
    frequency_penalty: Penalty = 0.0
    """Subtract this number from a token's logit for each time that it occurs in the answer so far; 0 is none."""

    @property
    def penalties(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in PENALTIES)

    @property
    def penalises(self) -> bool:
        return self.penalties != (1, 0, 0)

    def shared(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in SharedSampling.model_fields}


class Sampling(SharedSampling):
    """Sampling settings of a request. Temperature 0 is greedy: the filters and the seed then have no effect. Penalties
    change the logits before all else, at temperature 0, too, as in vLLM and transformers."""

    temperature: Temperature = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as failure:
            raise UserError(first_fault(failure)) from None

    def with_seed(self, seed: int) -> "Sampling":
        return self.model_copy(update={"seed": seed})

    @property
    def filters(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def check_rule(rule: str, shape: TreeShape) -> None:
    if rule not in RULES:
        raise UserError(f"rule {rule!r}: expected one of {', '.join(RULES)}")
    if rule in ANY_TREE or is_chain(shape):
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
