"""Search for the fastest draft of a head on a target on this machine (`--tree auto`), by successive halving.

Every draft of a fixed grid that the head can draft is looked at: it decodes a few prompts in turns with plain decoding.
The faster half is looked at again on twice as many, until FINALISTS are left. These are then measured like any other
setting, on all prompts, and the fastest of them is chosen. So the chosen setting is always one that was measured, and
nothing is concluded from a speedup that is not reliable.
"""

from collections.abc import Sequence

from eval.core.command_line import AUTO
from eval.data.prompts import Prompt, spread
from eval.measure.compare import Draft, check_decoded, compare
from eval.records.figures_schema import Measurement
from eval.records.journal import Journal
from eval.records.measure_settings import BenchSettings
from eval.records.metrics import rate_ratio, tau
from eval.records.schema import Look, Search
from eval.records.speedup_checks import best_index, why_unreliable
from eval.runtime.sampling_params import check_rule
from heads.core.contract import Drafter
from heads.core.errors import UserError
from heads.core.tree import TreeShape, parse_shape
from heads.methods.two_drafts import LookupFirst
from heads.targets.frozen_target import FrozenTarget

GRID = (
    *("chain:1", "chain:2", "chain:3", "chain:4", "chain:5", "chain:6", "chain:8", "chain:10"),
    *("tree:2x2x7", "tree:2x4x12", "tree:3x2x8", "tree:3x4x16", "tree:4x4x24"),
    *("tree:5x4x16", "tree:5x8x32", "tree:6x4x32", "tree:8x4x24", "tree:8x8x64"),
)
MATCHES = (1, 2, 3, 4, 6)
"""Lengths of a match from which a lookup may draft before a head."""
LARGEST_TREE = 64
"""Number of nodes of the largest tree of the grid."""
FINALISTS = 4
FIRST_PROMPTS, LOOK_TOKENS = 4, 64
"""Number of prompts of the first look, and maximum number of new tokens of each prompt in a look."""


def search_drafts(
    target: FrozenTarget,
    head: Drafter,
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
    journal: Journal | None = None,
) -> Search:
    """Return a search that proposes its finalists. Raise UserError if the head drafts nothing of the grid."""
    finalists = [shape for shape in map(parse_shape, GRID) if can_draft(head, target, shape, settings.rule)]
    if not finalists:
        raise UserError(f"--tree {AUTO}: this head drafts no chain; name its tree")
    looks: dict[str, Look] = {}
    count = max(FIRST_PROMPTS, settings.batch_size)
    while len(finalists) > FINALISTS:
        drafts = [(head, shape) for shape in finalists]
        for look in look_at(target, drafts, spread(prompts, count), temperature, settings, journal):
            looks[look.tree] = look
        finalists.sort(key=lambda shape: -looks[shape.text].speedup)
        finalists = finalists[: max(FINALISTS, len(finalists) // 2)]
        count *= 2
    matches: list[Look] = []
    if isinstance(head, LookupFirst):
        drafts = [(head.after(match), finalists[0]) for match in sorted({*MATCHES, head.match})]
        matches = look_at(target, drafts, spread(prompts, count), temperature, settings, journal)
    return Search(
        temperature=temperature,
        curve=list(looks.values()),
        matches=matches,
        proposed=[shape.text for shape in finalists],
        measured={},
        unreliable=[],
        chosen=None,
        plain_is_faster=False,
    )


def choose_draft(search: Search, measurements: Sequence[Measurement]) -> None:
    """Choose the best of the drafts whose measured speedup is reliable, if there is one."""
    for m in measurements:
        if m.speedup is not None and why_unreliable(m) is None:
            search.measured[m.tree] = m.speedup.measured
        elif m.speedup is not None:
            search.unreliable.append(m.tree)
    if (best := best_index(measurements)) is not None:
        search.chosen = measurements[best].tree
        search.plain_is_faster = search.measured[search.chosen] < 1


def look_at(
    target: FrozenTarget,
    drafts: Sequence[Draft],
    prompts: Sequence[Prompt],
    temperature: float,
    settings: BenchSettings,
    journal: Journal | None = None,
) -> list[Look]:
    """Decode a few prompts once with each draft, in turns with plain decoding. Speedups on so few prompts rank drafts
    and are not printed."""
    tokens = min(settings.max_new_tokens, LOOK_TOKENS)
    brief = settings.model_copy(update={"max_new_tokens": tokens, "repeats": 1})
    where = f", a search on {len(prompts)} prompts"
    comparison = compare(target, drafts, prompts, temperature, brief, where, phases=False, journal=journal)
    check_decoded(comparison.plain.outputs[0].values(), f"--tree {AUTO}, on the first {len(prompts)} prompts")
    turns = comparison.timed_turns(range(len(comparison.units)))
    plain = comparison.rate(comparison.plain, turns)
    return [
        Look(
            tree=shape.text,
            depth=shape.depth,
            nodes=shape.nodes,
            width=shape.top_k,
            tokens=tau(list(variant.outputs[0].values())),
            speedup=rate_ratio(comparison.rate(variant, turns), plain),
            prompts=len(prompts),
            least_match=head.match if isinstance(head, LookupFirst) else None,
        )
        for (head, shape), variant in zip(drafts, comparison.drafting, strict=True)
    ]


def can_draft(head: Drafter, target: FrozenTarget, shape: TreeShape, rule: str) -> bool:
    try:
        check_rule(rule, shape)
        target.check_shape(shape)
        head.check_draft(shape)
    except UserError:
        return False
    return True
