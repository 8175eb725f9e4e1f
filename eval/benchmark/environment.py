"""Hardware and versions of a measurement, for results and provenance, and other work on its cores."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from heads.backends.cpu.compiling import find_compiler
from heads.backends.cpu.decoder import CompiledDecoder
from heads.backends.selection import select_backend
from heads.backends.torch.architectures import why_not_native
from heads.backends.triton.decoder import DTYPES
from heads.target.frozen import FrozenTarget

PACKAGES = (
    *("torch", "triton", "torchao", "transformers", "tokenizers"),
    *("accelerate", "datasets", "safetensors", "numpy"),
)
ROOT = Path(__file__).resolve().parents[2]
STAT = Path("/proc/stat")
LOOK_SECONDS = 0.3


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name and size of the device that decodes."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": facts.name, "memory_gib": round(facts.total_memory / 2**30, 1)}
    return {"type": device.type, "name": cpu_name(), "threads": torch.get_num_threads()}


def decoder_facts(target: FrozenTarget) -> str:
    """The code that decodes the target here, and why it is not faster code."""
    backend = select_backend(target)
    native = backend.native(target)
    if native is None:
        return f"its Hugging Face model ({why_not_native(target)})"
    if backend.name == "triton" and target.dtype in DTYPES:
        return "Triton kernels"
    if isinstance(native, CompiledDecoder) and native.stack is not None:
        return "C kernels"
    return "torch (no C compiler)" if backend.on_host and find_compiler() is None else "torch"


def setup_line(target: FrozenTarget, training: str | None = None) -> str:
    """The device, dtypes, threads and kernels of a run in one line; `training`: the dtype of products in training."""
    facts = device_facts(target.device)
    threads = f", {facts['threads']} thread{'s' * (facts['threads'] > 1)}" if "threads" in facts else ""
    dtype = str(target.dtype).removeprefix("torch.")
    trains = "" if training is None else f", trains in {training}"
    return f"{facts['name']}{threads}: decodes in {dtype} by {decoder_facts(target)}{trains}"


def contention(device: torch.device) -> str | None:
    """Return advice if other processes use cores that this one's threads need: threads that compute one product wait
    for the slowest, thousands of times a step. None if none do, or if it cannot be seen."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or not STAT.is_file():
        return None
    cores, started, before = len(os.sched_getaffinity(0)), time.perf_counter(), idle_seconds()
    time.sleep(LOOK_SECONDS)
    idle = (idle_seconds() - before) / (time.perf_counter() - started)
    if idle >= threads - 0.5:
        return None
    return (
        f"other processes use {cores - idle:.1f} of the {cores} cores on which {threads} threads are to run here, and "
        "every step waits for the slowest: OMP_NUM_THREADS=1 before the command may make it many times faster"
    )


def idle_seconds() -> float:
    """Return the idle seconds of this process's cores since the machine started, all together."""
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in STAT.read_text(encoding="ascii").splitlines()]
    return sum(int(row[4]) + int(row[5]) for row in rows if row[0] in own) / os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    """The processor's name as its maker gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python, the packages that numbers depend on, and this project's commit where it runs from a clone."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"draftsmith": commit()}


def commit() -> str:
    """The commit checked out, with a + where files differ from it; "unknown" outside a clone."""
    try:
        revision = _git("rev-parse", "--short=12", "HEAD")
        return revision + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    ).stdout.strip()
