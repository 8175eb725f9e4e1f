"""Measurement of one or several heads in every setting, as the contents of results.json, compare.json or audit.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from eval.core.command_line import draft_shapes, print_line
from eval.data.prompts import Prompt
from eval.measure.compare import Comparison, compare, engine_options
from eval.measure.draft_search import LARGEST_TREE, can_draft, choose_draft, search_drafts
from eval.measure.figures import Audited, find_differences, judge, pooled_exactness
from eval.measure.machine import dtype_options, environment
from eval.measure.model_facts import head_facts, target_facts
from eval.measure.open_models import choose_prompts
from eval.measure.roofline import copy_bandwidth, roofline
from eval.records.figures_schema import Divergence
from eval.records.journal import Journal
from eval.records.measure_settings import BenchSettings
from eval.records.result_folders import short_name
from eval.records.schema import RecordedSettings, Results, Roofline, Search
from eval.records.speedup_checks import headline_index
from eval.runtime.engine import Engine, EngineOptions
from eval.runtime.graph import is_out_of_memory
from eval.runtime.sampling_params import ANY_TREE
from heads.core.contract import HEAD_TREE, Drafter
from heads.core.errors import UserError, first_line
from heads.core.tree import TreeShape, parse_shape
from heads.methods.two_drafts import LookupFirst
from heads.registry import untrained_kind
from heads.targets.frozen_target import FrozenTarget


@dataclass
class Measurements:
    """All that was measured so far."""

    measured: list[Audited] = field(default_factory=list)
    unrepeatable: list[Divergence] = field(default_factory=list)
    """Places where plain decoding did not repeat its own tokens, in another repeat or at another batch size."""
    searches: list[tuple[int, Search]] = field(default_factory=list)
    """Records of searches, each with the index of its head."""
    plain: dict[tuple[int | None, float], Comparison] = field(default_factory=dict)
    """Plain decoding at the first batch size, by context and temperature."""


def bench_heads(
    target: FrozenTarget,
    heads: Mapping[str, Drafter],
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    *,
    with_roofline: bool = False,
    journal: Journal | None = None,
) -> Results:
    """Measure heads, given by their paths, in one comparison per temperature, batch size and context. `with_roofline`:
    also time the parts of a round of the headline setting (`eval.measure.roofline`)."""
    settings, several, names = settings.as_served(target), len(heads) > 1, head_names(list(heads))
    shapes = [
        fitting_shapes(head, path, target, settings) if several else settings.shapes(head, target)
        for path, head in heads.items()
    ]
    drafts = [(head, shape) for head, of_head in zip(heads.values(), shapes, strict=True) for shape in of_head]
    nodes = max([head.longest(shape, 1).nodes for head, shape in drafts] + [LARGEST_TREE] * settings.is_auto)
    prompts = {
        context: choose_prompts(target, tokenizer, settings, nodes, context) for context in settings.contexts or (None,)
    }
    so_far = Measurements()
    for context, batch_size in settings.points:
        at = settings.model_copy(update={"batch_size": batch_size})
        try:
            measure_point(so_far, target, [*heads.values()], tokenizer, at, prompts[context], shapes, context, journal)
        except Exception as error:
            if len(settings.points) == 1 or not is_out_of_memory(error):
                raise
            print_line(f"batch {batch_size}, context {context or 'of the prompts'}: skipped, {first_line(error)}")
    if not so_far.measured:
        raise UserError("out of memory at every batch size and context; use smaller ones")
    measurements = [m.figures for m in so_far.measured]
    exact = pooled_exactness([m.exact for m in measurements], so_far.unrepeatable)
    if exact.divergences and settings.timing:
        for m in measurements:
            for part in (m, *m.suites.values()):
                part.speedup = None
    if several:
        for each in so_far.measured:
            each.figures.head = names[each.head]
        for n, search in so_far.searches:
            search.head = names[n]
    every = [prompt for chosen in prompts.values() for prompt in chosen]
    best = headline_index(measurements) if settings.timing and not several else 0
    facts = []
    for n, (path, head) in enumerate(heads.items()):
        of_head = [m.figures for m in so_far.measured if m.head == n]
        facts.append(head_facts(head, path, target, name=names[n] if several else "", measurements=of_head))
    results = Results(
        schema_version=1,
        target=target_facts(target),
        **environment(target),
        settings=RecordedSettings(**settings.record(every)),
        command=[
            "python",
            "eval/bench.py",
            *heads,
            "--target",
            target.name,
            *settings.options(),
            *dtype_options(target),
        ],
        heads=facts,
        exact=exact,
        measurements=measurements,
        chosen=best,
    )
    if settings.timing and not several:
        results.samples = so_far.measured[best].samples
    if so_far.searches:
        results.auto = [search for _, search in so_far.searches]
    if with_roofline:
        results.roofline = parts_of_headline(target, next(iter(heads.values())), every, settings, results)
    return results


def measure_point(
    so_far: Measurements,
    target: FrozenTarget,
    heads: Sequence[Drafter],
    tokenizer: PreTrainedTokenizerBase,
    settings: BenchSettings,
    prompts: Sequence[Prompt],
    shapes: Sequence[Sequence[TreeShape]],
    context: int | None,
    journal: Journal | None,
) -> None:
    """Measure each head's shapes, and with a search those that it finds, at one batch size and context and at every
    temperature."""
    point: dict[str, int] = {"batch_size": settings.batch_size} if settings.batch_sizes else {}
    point |= {"context": context} if context is not None else {}
    so_far.plain = {place: plain for place, plain in so_far.plain.items() if place[0] == context}  # frees other caches
    where = "".join(f", {name.removesuffix('_size')} {value}" for name, value in point.items())
    for temperature in settings.temperatures:
        searched = heads if settings.is_auto else ()
        searches = [search_drafts(target, head, prompts, temperature, settings, journal) for head in searched]
        proposed = [[*map(parse_shape, search.proposed)] for search in searches] or [[] for _ in heads]
        pairs = [(n, shape) for n, named in enumerate(shapes) for shape in dict.fromkeys([*named, *proposed[n]])]
        fitted = [at_best_match(*pair) for pair in zip(heads, searches, strict=True)] if searches else heads
        drafts = [(fitted[n], shape) for n, shape in pairs]
        result = compare(target, drafts, prompts, temperature, settings, where, phases=settings.timing, journal=journal)
        fresh, unrepeatable = judge(result, tokenizer, [n for n, _ in pairs])
        if (first := so_far.plain.get((context, temperature))) is None:
            so_far.plain[context, temperature] = replace(result, drafting=[], breakdowns=[])
        else:  # at another batch size plain decoding must give the same texts
            across = find_differences(first, result.plain, tokenizer)
            unrepeatable += [difference for difference in across if not difference.near_tie]
        for n, search in enumerate(searches):
            choose_draft(search, [m.figures for m in fresh if m.head == n])
            so_far.searches.append((n, search.model_copy(update=point)))
        for m in fresh:
            m.figures = m.figures.model_copy(update=point)
        so_far.measured += fresh
        so_far.unrepeatable += unrepeatable


def at_best_match(head: Drafter, search: Search) -> Drafter:
    """Return a head behind a lookup with the length of a match that a search found; any other head as it is."""
    if not isinstance(head, LookupFirst) or search.least_match is None:
        return head
    return head.after(search.least_match)


def fitting_shapes(head: Drafter, path: str, target: FrozenTarget, settings: BenchSettings) -> list[TreeShape]:
    """Return the trees of the settings that this head, one of several, can draft. Raise UserError if there are none."""
    has_tree = settings.rule in ANY_TREE and head.tree
    texts = tuple(tree for tree in settings.trees if tree != HEAD_TREE or has_tree)
    shapes = settings.model_copy(update={"trees": texts}).shapes(head, target)
    fitting = [shape for shape in shapes if can_draft(head, target, shape, settings.rule)]
    if not fitting and not settings.is_auto:
        raise UserError(f"{path}: drafts none of {', '.join(settings.trees)}; name a tree that it can")
    return fitting


def head_names(paths: Sequence[str]) -> list[str]:
    """Return short names of heads, or their paths if short names are not distinct. Raise UserError if a path occurs
    twice."""
    if len(set(paths)) < len(paths):
        raise UserError(f"{max(paths, key=list(paths).count)}: named twice; name each head once")
    names = [path if untrained_kind(path) else short_name(path) for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def parts_of_headline(
    target: FrozenTarget, head: Drafter, prompts: Sequence[Prompt], settings: BenchSettings, results: Results
) -> Roofline:
    """Return the roofline of the headline setting, in the middle of an output after a prompt of median length."""
    (shape,) = draft_shapes([results.headline.tree], head)
    batch_size = results.headline.batch_size or settings.batch_size
    settings = settings.model_copy(update={"batch_size": batch_size})
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    nodes = head.longest(shape, batch_size).nodes
    room = lengths[-1] + settings.max_new_tokens + nodes
    length = lengths[len(lengths) // 2] + settings.max_new_tokens // 2
    engine = Engine(target, head, engine_options(settings, shape, room))
    plain = Engine(target, None, EngineOptions(batch_size=settings.batch_size, max_length=room))
    length, bandwidth = min(length, room - 3 * nodes), copy_bandwidth(plain)
    return roofline(engine, plain, length=length, tau=results.headline.tau.mean, bandwidth=bandwidth)
