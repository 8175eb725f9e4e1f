"""The groups of parts of the GPU suite, each in a process of its own, and the record of all."""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eval.benchmark.environment import device_facts, versions
from eval.files import write_json
from eval.gpu.parts import GROUPS, Bench
from heads.errors import UserError

SECONDS = {"checks": 90, "grown": 190, "identity": 90, "kernels": 40, "library": 130}
"""For each group, after which it begins no long part."""
GRACE, ALL = 30, 570
"""Seconds that a group may take beyond its own to end what it began; and for everything."""


def run_suite(options: argparse.Namespace, script: Path) -> int:
    """Run every group that is asked for by `script`, each in a process of its own, and write the record."""
    groups = options.groups or list(GROUPS)
    if unknown := set(groups) - GROUPS.keys():
        raise UserError(f"--groups: expected some of {', '.join(GROUPS)}, got {min(unknown)}")
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    out = options.out or script.parents[1] / "eval/results" / f"{name}-{datetime.date.today().isoformat()}.json"
    record: dict[str, Any] = {"device": device_facts(device), "versions": versions(), "shape": options.shape}
    begun = time.monotonic()
    for group in groups:
        started = time.monotonic()
        allowed = min(SECONDS[group] + GRACE, begun + ALL - started)
        if allowed <= GRACE:
            record[f"{group} error"] = "left out: no time was left"
            write_json(out, record)
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "group.json"
            command = [sys.executable, str(script), "--group", group, "--out", str(path), "--shape", options.shape]
            command += ["--head", str(options.head)] if options.head else []
            try:
                ended = subprocess.run(command, timeout=allowed)
                trouble = f"ended with status {ended.returncode}" if ended.returncode else None
            except subprocess.TimeoutExpired:
                trouble = f"took more than {allowed:.0f} s"
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        record |= found
        record[f"{group} seconds"] = time.monotonic() - started
        if trouble:
            record[f"{group} error"] = trouble
        write_json(out, record)
    print(f"written to {out}")
    return 1 if any(failed(value) for value in record.values()) or any("error" in key for key in record) else 0


def failed(found: Any) -> bool:
    """Whether a part broke, or one of its checks, or had no time for all of it."""
    return isinstance(found, dict) and any(found.get(sign) for sign in ("error", "failed", "left_out"))


def run_group(options: argparse.Namespace) -> int:
    """Run one group's parts, writing what there is as it is found."""
    bench = Bench(torch.device("cuda"), options.shape, options.head, time.monotonic() + SECONDS[options.group])
    record: dict[str, Any] = {}
    bench.note = partial(write_json, options.out, record)
    for part in GROUPS[options.group]:
        started = time.monotonic()
        found = record.setdefault(part.__name__, {})
        if bench.out_of_time:
            found["error"] = "left out: no time was left"
        else:
            run_part(part, bench, found)
        print(f"{part.__name__}: {time.monotonic() - started:.0f} s", flush=True)
        bench.note()
    return 0


def run_part(part: Any, bench: Bench, found: dict[str, Any]) -> None:
    """Have a part write down what it finds, and what broke it."""
    try:
        part(bench, found)
    except Exception as error:  # whatever breaks, the record is to say so and the others are to run
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:800]


def suite_command(options: argparse.Namespace, script: Path) -> int:
    """Run the suite, or be one of its groups. UserError where there is no GPU."""
    if not torch.cuda.is_available():
        raise UserError("no GPU is at hand: the suite measures one; take a machine that has one")
    return run_group(options) if options.group else run_suite(options, script)
