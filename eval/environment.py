"""What a measurement ran on: hardware and versions, for results and provenance."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("torch", "triton", "torchao", "transformers", "tokenizers"),
    *("accelerate", "datasets", "safetensors", "numpy"),
)
ROOT = Path(__file__).resolve().parents[1]


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name and size of the device that decodes."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": facts.name, "memory_gib": round(facts.total_memory / 2**30, 1)}
    return {"type": device.type, "name": cpu_name(), "threads": torch.get_num_threads()}


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
