"""Facts about a measurement: its target, head, hardware and versions, and whether other processes use its cores."""

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from eval.measure.results import read_curve
from eval.measure.schedule import draft_schedule
from eval.measure.schema import (
    HEAD,
    TARGET,
    Head,
    HeadConfig,
    Measurement,
    Origin,
    Point,
    Target,
)
from heads.core.contract import Drafter
from heads.core.errors import UserError
from heads.core.strict_settings import Settings
from heads.formats.engine_folder import ENGINES, Verdict, why_unserved
from heads.methods.untrained import EarlyExit
from heads.registry import kind_of
from heads.saved import check_loaders, find_head, read_config, trained_depth, weights_hash
from heads.targets.model import FrozenTarget
from heads.targets.native_decoder import why_not_native
from heads.targets.product import find_compiler, load
from heads.targets.quantization import weight_bytes
from heads.targets.triton_support import runs_kernels

PACKAGES = (
    *("torch", "triton", "torchao", "transformers", "tokenizers"),
    *("accelerate", "datasets", "safetensors", "numpy"),
)
ROOT = Path(__file__).resolve().parents[2]
LOOK_SECONDS = 0.3
STEPS = 5
"""Tokens drafted in a round by a head that was neither measured nor trained to a depth."""


def target_facts(target: FrozenTarget) -> Target:
    facts = Target(
        name=target.name,
        architecture=type(target.model).__name__,
        fingerprint=target.fingerprint,
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
    trained = None if isinstance(head, EarlyExit) else head
    config: Any = getattr(trained, "config", None)
    provenance: dict[str, Any] = {}
    curve: list[Point] = []
    unserved = serve = None
    with suppress(UserError):  # an untrained draft, or a head of others
        provenance = read_config(find_head(path))["provenance"]
        curve = read_curve(find_head(path).parent / "metrics.jsonl")
        engines = engine_verdicts(path, measurements, chosen, name=HEAD, base=TARGET)
        unserved = why_unserved(engines)
        serve = next((engine.shown for engine in engines if engine.reader in ENGINES and engine.serves), None)
    tokens, step, steps = (provenance.get(key) for key in ("tokens", "step", "steps"))
    facts = Head(
        kind=kind_of(head),
        path=path,
        sha256=weights_hash(path),
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
    path: str | Path, measurements: Sequence[Measurement], chosen: int, *, name: str, base: str
) -> list[Verdict]:
    """Return the verdict of each engine's check of a head, with as many draft tokens as in the measurement `chosen`, or
    by load as in all of them. If there are none, the number is that of the training."""
    record = read_config(find_head(path))
    schedule = [step[:3] for step in draft_schedule(measurements, measurements[chosen])] if measurements else []
    depth = max((drafts for *_, drafts in schedule), default=measurements[chosen].depth if measurements else 0)
    depth = depth or trained_depth(record) or STEPS
    modules = record["config"].get("num_modules", 1)  # vLLM drafts with all of them, once or several times
    steps = max(depth // modules, 1) * modules
    return check_loaders(path, name=name, base=base, steps=steps, schedule=schedule)


def environment(target: FrozenTarget) -> dict[str, Any]:
    dtype, decoder = str(target.dtype).removeprefix("torch."), decoder_facts(target)
    return {**machine(target.device), "dtype": dtype, "decoder": decoder}


def dtype_options(target: FrozenTarget) -> list[str]:
    """Return the options of a command that load the target in this dtype and quantisation."""
    quantize = ["--quantize", target.quantize] if target.quantize else []
    return ["--dtype", str(target.dtype).removeprefix("torch."), *quantize]


def machine(device: torch.device) -> dict[str, Any]:
    measured_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"measured_at": measured_at, "device": device_facts(device), "versions": versions()}


def num_parameters(module: nn.Module) -> int:
    """Return the number of parameters. Tied parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": facts.name, "memory_gib": round(facts.total_memory / 2**30, 1)}
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:(.*)", info.read_text(encoding="utf-8"), re.M) if info.is_file() else None
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return {"type": device.type, "name": name, "threads": torch.get_num_threads()}


def decoder_facts(target: FrozenTarget) -> str:
    """Return a description of the code that decodes the target, and the reason if it is not the native decoder."""
    if (reason := why_not_native(target)) is not None:
        return f"its Hugging Face model ({reason})"
    if target.device.type == "cuda":
        return "torch and Triton kernels" if runs_kernels(target.head.weight) else "torch"
    if target.dtype != torch.float32:
        return "torch"
    if load() is not None:
        return "torch and products in C"
    return "torch (no C compiler)" if find_compiler() is None else "torch (product.c could not be compiled)"


def setup_line(target: FrozenTarget, training: str | None = None) -> str:
    """Return the device, threads, kernels and dtypes of a run in one line. `training`: dtype of products in
    training."""
    facts = device_facts(target.device)
    threads = f", {facts['threads']} thread{'s' * (facts['threads'] > 1)}" if "threads" in facts else ""
    dtype = str(target.dtype).removeprefix("torch.")
    trains = "" if training is None else f", trains in {training}"
    decodes = f"the target's layers are {target.placement}, the rest in {dtype}"
    if target.placement == "whole":
        decodes = f"decodes in {dtype} by {decoder_facts(target)}"
    return f"{facts['name']}{threads}: {decodes}{trains}"


def contention(device: torch.device) -> str | None:
    """Return advice if other processes use cores that this process's threads need, else None. Threads of OpenMP spin
    while they wait, so two such processes slow each other many times over."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    if device.type != "cpu" or threads == 1:
        return None
    started, cpu_started = time.perf_counter(), time.process_time()
    shares = psutil.cpu_percent(LOOK_SECONDS, percpu=True)
    busy = (time.process_time() - cpu_started) / (
        time.perf_counter() - started
    )  # cores used by this process's own threads
    used = sum(share / 100 for core, share in enumerate(shares) if core in cores) - busy
    if len(cores) - used >= threads - 0.5:
        return None
    return (
        f"other processes use {used:.1f} of the {len(cores)} cores on which {threads} threads are to run here, and "
        "every step waits for the slowest: OMP_NUM_THREADS=1 before the command may make it many times faster"
    )


def versions() -> dict[str, str]:
    packages = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return packages | {"draftsmith": commit()}


def commit() -> str:
    """Return the commit that is checked out, with a + if files differ from it; "unknown" outside a clone."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
