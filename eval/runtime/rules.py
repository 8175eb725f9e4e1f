"""The acceptance rules by name, and the trees that each can judge; `eval.runtime.judges` implements them.

| rule | drafts | what comes out | trees |
|---|---|---|---|
| match | the likeliest, by the target's own noise | plain decoding's tokens, one for one | all |
| ratio | drawn from the draft's distribution | another draw of the target's distribution | chain, static |
| block | drawn from the draft's distribution | another draw of the target's distribution | chain |

The rule that emits most depends on the shape: scripts/bench_rules.py measures it (figures: eval/results/rules.json).

The command line offers these rules, so this file imports no torch.
"""

from heads.errors import UserError
from heads.tree import TreeShape, is_chain

RULES = ("match", "ratio", "block")


def check_rule(rule: str, shape: TreeShape) -> None:
    """Raise UserError if `rule` cannot judge trees of this shape."""
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


def check_adaptive(rule: str) -> None:
    """Raise UserError if drafts must not change from round to round."""
    if rule != "match":
        raise UserError(
            f"rule {rule} with adaptive drafts: which token is drawn would depend on the clock, and no text could be "
            "repeated; use rule match, or fixed drafts"
        )
