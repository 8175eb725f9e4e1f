"""Runner of the GPU suite: each group of parts runs in its own process, and all write into one record."""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eval.benchmark.environment import device_facts, versions
from heads.errors import UserError
from heads.files import write_json
from scripts.gpu.parts import GROUPS, ROOT, Bench, Part
from scripts.grown.shapes import SHAPES

SECONDS = {"checks": 330, "identity": 210, "compiled": 150, "rounds": 390, "kernels": 180}
"""Time limit of each group in seconds. A group that is stopped leaves its results so far in the record."""
ALL = 570
"""Time limit in seconds of a whole command."""
COMPILER = [sys.executable, "-m", "scripts.gpu.compile_ahead"]
"""Run as a module: the folder of a script would come first on `sys.path`, and its kernels.py would hide another."""


def run_suite(options: argparse.Namespace, script: Path, groups: Sequence[str], device: dict[str, Any]) -> int:
    """Run every group in its own process, which writes its results into the record as they come. Return the exit
    status."""
    record = read_record(options.out)
    record |= {"device": device, "versions": versions(), "shape": options.shape}
    write_json(options.out, record)
    begun, sound = time.monotonic(), True
    for group in groups:
        started = time.monotonic()
        allowed = min(SECONDS[group], begun + ALL - started)
        command = [sys.executable, str(script), group, "--group", "--out", str(options.out.absolute())]
        command += ["--shape", options.shape]
        command += ["--head", str(options.head.absolute())] if options.head else []
        trouble = run_process(COMPILER if group == "compiled" else command, allowed)
        record = read_record(options.out)
        record[f"{group} seconds"] = time.monotonic() - started
        record.pop(f"{group} error", None)
        if trouble:
            record[f"{group} error"] = trouble
        write_json(options.out, record)
        names = [part.__name__ for part in GROUPS.get(group, ())]
        sound = sound and not trouble and not any(failed(record.get(name)) for name in names)
    print(f"written to {options.out}")
    return 0 if sound else 1


def run_process(command: list[str], allowed: float) -> str | None:
    """Run a process. Return a description of its failure, or None."""
    if allowed <= 0:
        return "left out: no time was left"
    try:
        ended = subprocess.run(command, timeout=allowed, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return f"took more than {allowed:.0f} s"
    return f"ended with status {ended.returncode}" if ended.returncode else None


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of earlier commands."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def failed(found: Any) -> bool:
    """Return True if a part or one of its checks failed."""
    return isinstance(found, dict) and any(found.get(sign) for sign in ("error", "failed"))


def run_parts(bench: Bench, parts: Sequence[Part], out: Path) -> None:
    """Run the parts of a group, and write their results as they come."""
    record = read_record(out)
    bench.note = lambda: write_json(out, record)
    for part in parts:
        started = time.monotonic()
        found: dict[str, Any] = {}
        record[part.__name__] = found
        run_part(part, bench, found)
        print(f"{part.__name__}: {time.monotonic() - started:.0f} s", flush=True)
        bench.note()


def run_part(part: Any, bench: Bench, found: dict[str, Any]) -> None:
    """Run a part, and record its error if it fails."""
    try:
        part(bench, found)
    except Exception as error:  # of any kind: it is recorded, and the other parts still run
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:800]


def suite_command(options: argparse.Namespace, script: Path, groups: Sequence[str]) -> int:
    """Run the suite, or one of its groups in this process. Raise UserError if there is no GPU. Return the exit
    status."""
    if not torch.cuda.is_available():
        raise UserError("no GPU is at hand: the suite measures one; take a machine that has one")
    if not options.group:
        return run_suite(options, script, groups, device_facts(torch.device("cuda")))
    run_parts(Bench(torch.device("cuda"), SHAPES[options.shape], options.head), GROUPS[options.command], options.out)
    return 0
