"""The machine that measures: hardware, versions, the code that decodes, and whether other processes use its cores."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import psutil
import torch

from heads.kernels.compiled import find_compiler
from heads.kernels.product import load
from heads.kernels.triton_support import runs_kernels
from heads.targets.frozen_target import FrozenTarget
from heads.targets.native_decoder import why_not_native

PACKAGES = (
    *("torch", "triton", "torchao", "transformers", "tokenizers"),
    *("accelerate", "datasets", "safetensors", "numpy"),
)
ROOT = Path(__file__).resolve().parents[2]
LOOK_SECONDS, LOOKS = 0.3, 3


def environment(target: FrozenTarget) -> dict[str, Any]:
    dtype = str(target.dtype).removeprefix("torch.")
    decoder = decoder_facts(target)
    return {**machine(target.device), "dtype": dtype, "decoder": decoder}


def dtype_options(target: FrozenTarget) -> list[str]:
    """Return the options of a command that load the target in this dtype and quantisation, with this tokenizer."""
    quantize = ["--quantize", target.quantize] if target.quantize else []
    fix = target.fix_mistral_regex
    tokenizer = [] if fix is None else ["--fix-mistral-regex", str(fix).lower()]
    return ["--dtype", str(target.dtype).removeprefix("torch."), *quantize, *tokenizer]


def machine(device: torch.device) -> dict[str, Any]:
    measured_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"measured_at": measured_at, "device": device_facts(device), "versions": versions()}


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


def busy_cores(device: torch.device) -> float | None:
    """Return how many cores other processes use, if they leave fewer than this process's threads need, else None: what
    every clock asks before it starts. What ends within a second does not count."""
    cores, needed = os.sched_getaffinity(0), torch.get_num_threads() - 0.5
    for _ in range(LOOKS if device.type == "cpu" else 0):
        started, cpu_started = time.perf_counter(), time.process_time()
        shares = psutil.cpu_percent(LOOK_SECONDS, percpu=True)
        own = (time.process_time() - cpu_started) / (time.perf_counter() - started)  # cores used by its own threads
        used = sum(share / 100 for core, share in enumerate(shares) if core in cores) - own
        if len(cores) - used >= needed:
            return None
    return used if device.type == "cpu" else None


def settle_threads(device: torch.device) -> str | None:
    """Go on with one thread if other processes use cores that more would need, unless the user has set OMP_NUM_THREADS.
    Return a line about it, or None. Threads of OpenMP spin while they wait, so two such processes slow each other many
    times over."""
    threads, used = torch.get_num_threads(), busy_cores(device)
    if used is None:
        return None
    line = f"other processes use {used:.1f} of the {len(os.sched_getaffinity(0))} cores"
    if threads == 1:
        return f"{line}: times measured now are of a busy machine"
    line += f" on which {threads} threads were to run here, and every step would wait for the slowest"
    if "OMP_NUM_THREADS" in os.environ:
        return f"{line}: OMP_NUM_THREADS=1 before the command may make it many times faster"
    torch.set_num_threads(1)
    return f"{line}: it runs with 1 thread (OMP_NUM_THREADS={threads} before the command keeps {threads})"


def versions() -> dict[str, str]:
    packages = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return packages | {"draftsmith": commit()}


def commit() -> str:
    """Return the commit that is checked out, with a + if files differ from it. Outside a clone it is the one that pip
    installed, or the one that DRAFTSMITH_COMMIT names, such as for a copy of the files; else "unknown"."""

    # Not that of a clone around these files.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables["GIT_CEILING_DIRECTORIES"] = str(ROOT.parent)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        options: Any = {"capture_output": True, "text": True, "check": True, "stdin": subprocess.DEVNULL}
        return str(subprocess.run(command, env=variables, **options).stdout)

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        with suppress(PackageNotFoundError, LookupError, TypeError):
            package = distribution("draftsmith")
            if Path(str(package.locate_file(""))).resolve() == ROOT:
                installed = json.loads(package.read_text("direct_url.json") or "null")
                return str(installed["vcs_info"]["commit_id"])[:12]
        return os.environ.get("DRAFTSMITH_COMMIT") or "unknown"
