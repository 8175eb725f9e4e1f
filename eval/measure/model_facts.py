"""Facts about the target and the head of a measurement, and the command that serves them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from eval.records.draft_schedule import draft_schedule
from eval.records.figures_schema import Measurement
from eval.records.head_schema import Head, HeadConfig, Origin, Point
from eval.records.provenance import Provenance, read_provenance
from eval.records.results import read_curve
from eval.records.schema import HEAD, TARGET, Target
from eval.records.speedup_checks import served_index, verdict_of
from heads.core.contract import HEAD_TREE, Drafter, DraftHead, split_draft
from heads.core.engines import ALL_ENGINES, READERS
from heads.core.errors import UserError
from heads.core.serve_commands import Setting
from heads.core.strict_settings import Settings
from heads.core.tree import TreeShape, parse_shape
from heads.formats.engine_folder import BOTH, Verdict, behind_lookup, check_contents, look_up_in_vllm, why_unserved
from heads.methods.two_drafts import LookupFirst
from heads.methods.untrained import EarlyExit, Lookup
from heads.registry import HEADS, kind_of
from heads.saved import check_loaders, find_head, read_config, target_record, trained_depth, weights_hash
from heads.targets.frozen_target import FrozenTarget
from heads.targets.quantization import weight_bytes

LATEST = (
    "vLLM copies what followed the first of the longest matches and drafts nothing without one; measured was what "
    "followed the latest: ngram:{ngram} drafts as vLLM does"
)
STEPS = 5
"""Tokens drafted in a round by a head that was neither measured nor trained to a depth."""


def target_facts(target: FrozenTarget) -> Target:
    facts = Target(
        name=target.name,
        architecture=target.architecture,
        **target.identity,
        quantize=target.quantize,
        weight_bytes=weight_bytes(target.model),
        parameters=num_parameters(target.model),
        layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        template=dict(target.template),
    )
    if getattr(target.model.generation_config, "min_p", None):
        facts.overrides = {"min_p": 0}
    if target.two_tables:
        facts.two_tables = True
    return facts


def head_facts(
    head: Drafter,
    path: str,
    target: FrozenTarget | None = None,
    *,
    name: str = "",
    measurements: Sequence[Measurement] = (),
) -> Head:
    """Return the identity and the size of the head. Weights that it shares with the target do not count. `target`: the
    one that it drafted for, for the command with which an engine serves the best of its `measurements`. `name`: of one
    of several heads."""
    match, folder = split_draft(path)
    own = head.head if isinstance(head, LookupFirst) else head
    trained = None if own.is_borrowed else own
    config: object = getattr(trained, "config", None)
    provenance: Provenance | None = None
    curve: list[Point] = []
    engines: list[Verdict] = []
    with suppress(UserError):  # an untrained draft, or a head of others
        provenance = read_provenance(find_head(folder))
        curve = read_curve(find_head(folder).parent / "metrics.jsonl")
    with suppress(UserError):  # files that are gone
        if target is not None:
            engines = engines_for(path, measurements, target_facts(target), head=head, target=target)
    unserved = None
    if provenance is not None and engines:
        unserved = why_unserved(engines) if match is None else why_unserved(engines, BOTH)
    made = provenance or Provenance()
    wanted = [READERS[name] for name in made.serve or ()]
    serving = [engine for engine in engines if engine.reader in ALL_ENGINES and engine.is_as_measured]
    serving.sort(key=lambda engine: engine.reader not in wanted)
    serve = serving[0].shown if serving else None
    budget = made.tokens
    if made.tokens and made.step and made.steps:
        budget = round(made.tokens * made.steps / made.step)
    facts = Head(
        kind=kind_of(head),
        path=path,
        sha256=weights_hash(folder),
        parameters=num_parameters(trained) if isinstance(trained, nn.Module) else 0,
        trained_tokens=made.tokens,
        aux_layer_ids=list(head.aux_layer_ids),
        budget_tokens=budget,
        data_sha256=made.data.sha256,
        context_length=made.data.sources.context_length,
        positions=head.positions,
        curve=curve,
        config=HeadConfig(**(config.model_dump() if isinstance(config, Settings) else {})),
        origin=None if head.origin is None else Origin(**asdict(head.origin)),
        unserved=unserved,
        serve=serve,
    )
    if isinstance(head, EarlyExit):
        facts.why_not = "no engine drafts with the target's own first layers"
    elif serve is None and unserved is None and engines:
        facts.why_not = "; ".join(f"{each.reader} {each.otherwise if each.serves else each.reason}" for each in engines)
    if name:
        facts.name = name
    return facts


def engines_for(
    path: str | Path,
    measurements: Sequence[Measurement],
    facts: Target,
    *,
    head: Drafter | None = None,
    target: FrozenTarget | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[Verdict]:
    """Return the verdicts of engines on the best setting of one head, those that serve it first, or on its best chain
    where an engine does not draft the tree that was better. `head`, `target`: as of `engine_verdicts`."""

    def verdicts(chosen: Sequence[Measurement]) -> list[Verdict]:
        return engine_verdicts(path, setting_of(chosen, facts, names), head, target)

    found = verdicts(measurements)
    chains = [m for m in measurements if m.tree.startswith("chain:")]
    if chains and not measurements[served_index(measurements)].tree.startswith("chain:"):
        best, chain = measurements[served_index(measurements)], chains[served_index(chains)]
        note = f"as {chain.tree} was measured{speedup_of(chain)}; {best.tree} was faster{speedup_of(best)}"
        if verdict_of(chain) != "does not pay":
            others = [replace(other, notes=(*other.notes, note)) for other in verdicts(chains)]
            pairs = zip(found, others, strict=True)
            found = [one if one.is_as_measured or not one.serves else other for one, other in pairs]
            found.sort(key=lambda verdict: note in verdict.notes)
    return found


def speedup_of(m: Measurement) -> str:
    return f" ({m.speedup.measured:.2f}x)" if m.speedup is not None and verdict_of(m) is not None else ""


def setting_of(measurements: Sequence[Measurement], target: Target, names: Mapping[str, str]) -> Setting:
    """Return what a command serves: the best setting of one head, with the names of its target and its folder."""
    given: dict[str, Any] = {"target": TARGET, "head": HEAD, **names}
    if not measurements:
        return Setting(**given)
    best = measurements[served_index(measurements)]
    schedule = [step[:3] for step in draft_schedule(measurements, best)]
    carried = TreeShape(depth=best.depth, top_k=2, nodes=best.nodes, paths=(), text=HEAD_TREE)
    return Setting(
        **given,
        steps=max((drafts for *_, drafts in schedule), default=best.depth),
        tree=carried if best.tree == HEAD_TREE else parse_shape(best.tree),
        schedule=schedule,
        rule=next((m.rule for m in measurements if m.temperature > 0), None),
        template=target.template,
        overrides=target.overrides,
        match=best.least_match,
    )


def engine_verdicts(
    path: str | Path, setting: Setting, head: Drafter | None = None, target: FrozenTarget | None = None
) -> list[Verdict]:
    """Return the verdict of each engine on a head, by the check of its folder. `head`, `target`: of a draft that is not
    in draftsmith's form. Without a measurement the draft tokens are those of the training."""
    if isinstance(head, Lookup):
        return [look_up_in_vllm(setting, head.ngram, [] if head.earliest else [LATEST.format(ngram=head.ngram)])]
    if isinstance(head, EarlyExit):
        return []
    if isinstance(head, LookupFirst):
        _, path = split_draft(str(path))
        verdicts = engine_verdicts(path, replace(setting, match=None), head.head, target)
        return [behind_lookup(verdict, setting.match or head.match, setting.steps) for verdict in verdicts]
    if isinstance(head, DraftHead) and head.origin is not None and target is not None:
        kind, dtype = kind_of(head), str(target.dtype).removeprefix("torch.")
        form, own, record = HEADS[kind].format, head.config, target_record(target)
        config = form.engine_config(own, record, dtype) | {"draftsmith": {"config": own.model_dump()}}
        shapes = {key: tuple(tensor.shape) for key, tensor in head.to_checkpoint().items()}
        verdicts = check_contents(config, shapes, form, kind, record, setting)
        misread = {engine: [line for line in head.origin.differs if line.startswith(engine)] for engine in ALL_ENGINES}
        return [replace(verdict, errors=(*verdict.errors, *misread.get(verdict.reader, ()))) for verdict in verdicts]
    record = read_config(find_head(path))
    if setting.tree is None:
        template = record["target"].get("template") or {}
        setting = replace(setting, steps=trained_depth(record) or STEPS, template=template)
    return check_loaders(path, setting)


def num_parameters(module: nn.Module) -> int:
    """Return the number of parameters. Tied parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())
