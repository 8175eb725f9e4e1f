"""Facts about the target and the head of a measurement, and the command that serves them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from eval.records.draft_schedule import draft_schedule
from eval.records.results import read_curve
from eval.records.schema import HEAD, TARGET, Head, HeadConfig, Measurement, Origin, Point, Target
from heads.core.contract import Drafter, split_draft
from heads.core.engines import ALL_ENGINES
from heads.core.errors import UserError
from heads.core.strict_settings import Settings
from heads.formats.engine_folder import Verdict, behind_lookup, why_unserved
from heads.methods.two_drafts import LookupFirst
from heads.registry import kind_of
from heads.saved import check_loaders, find_head, read_config, trained_depth, weights_hash
from heads.targets.frozen_target import FrozenTarget
from heads.targets.quantization import weight_bytes

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
    if target.two_tables:
        facts.two_tables = True
    return facts


def head_facts(
    head: Drafter, path: str, *, name: str = "", measurements: Sequence[Measurement] = (), chosen: int = 0
) -> Head:
    """Return the identity and the size of the head. Weights that it shares with the target do not count. `name`: of one
    of several heads. `measurements`, `chosen`: as of `engine_verdicts`, for the command with which an engine serves
    it."""
    match, folder = split_draft(path)
    own = head.head if isinstance(head, LookupFirst) else head
    trained = None if own.is_borrowed else own
    config: Any = getattr(trained, "config", None)
    provenance: dict[str, Any] = {}
    curve: list[Point] = []
    unserved = serve = None
    with suppress(UserError):  # an untrained draft, or a head of others
        provenance = read_config(find_head(folder))["provenance"]
        curve = read_curve(find_head(folder).parent / "metrics.jsonl")
        engines = engine_verdicts(folder, measurements, chosen, name=HEAD, base=TARGET, match=match)
        unserved = why_unserved(engines)
        serve = next((engine.shown for engine in engines if engine.reader in ALL_ENGINES and engine.serves), None)
    tokens, step, steps = (provenance.get(key) for key in ("tokens", "step", "steps"))
    facts = Head(
        kind=kind_of(head),
        path=path,
        sha256=weights_hash(folder),
        parameters=num_parameters(trained) if isinstance(trained, nn.Module) else 0,
        trained_tokens=tokens,
        aux_layer_ids=list(head.aux_layer_ids),
        budget_tokens=round(tokens * steps / step) if tokens and step and steps else tokens,
        data_sha256=provenance.get("data", {}).get("sha256"),
        context_length=data_of(provenance).get("context_length"),
        positions=head.positions,
        curve=curve,
        config=HeadConfig(**(config.model_dump() if isinstance(config, Settings) else {})),
        origin=None if head.origin is None else Origin(**asdict(head.origin)),
        unserved=unserved,
        serve=serve,
    )
    if name:
        facts.name = name
    return facts


def data_of(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's section `data` in a head's provenance. Some have the sources alone."""
    data: Any = (provenance.get("data") or {}).get("sources") or {}
    return data if isinstance(data, dict) else {"sources": data}


def engine_verdicts(
    path: str | Path,
    measurements: Sequence[Measurement],
    chosen: int,
    *,
    name: str,
    base: str,
    match: int | None = None,
) -> list[Verdict]:
    """Return the verdict of each engine's check of a head, with as many draft tokens as in the measurement `chosen`, or
    by load as in all of them. If there are none, the number is that of the training. `match`: of a head behind a lookup
    after a match of so many tokens, unless that measurement had another length."""
    record = read_config(find_head(path))
    schedule = [step[:3] for step in draft_schedule(measurements, measurements[chosen])] if measurements else []
    depth = max((drafts for *_, drafts in schedule), default=measurements[chosen].depth if measurements else 0)
    depth = depth or trained_depth(record) or STEPS
    modules = record["config"].get("num_modules", 1)  # vLLM drafts with all of them, once or several times
    steps = max(depth // modules, 1) * modules
    verdicts = check_loaders(path, name=name, base=base, steps=steps, schedule=schedule)
    if match is None:
        return verdicts
    match = (measurements[chosen].least_match if measurements else None) or match
    return [behind_lookup(verdict, match, steps) for verdict in verdicts]


def num_parameters(module: nn.Module) -> int:
    """Return the number of parameters. Tied parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())
