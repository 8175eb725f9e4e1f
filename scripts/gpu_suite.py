"""Everything that only a GPU can show, in under ten minutes, in one record: checks, kernels, identity, the roofline.

    python scripts/gpu_suite.py [--head runs/quickstart/head] [--out eval/results/DEVICE-DATE.json]

Needs torch, triton and transformers, and no network. Each group of parts runs in a process of its own; whatever fails
is written down beside what did not. Exit status: 0; 1 where a part failed; 2 with one line where there is no GPU.
"""

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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from eval.command import Parser, exit_status  # noqa: E402
from eval.environment import device_facts, versions  # noqa: E402
from eval.files import write_json  # noqa: E402
from eval.gpu.parts import GROUPS, Bench  # noqa: E402
from eval.grown import SHAPES  # noqa: E402
from heads.errors import UserError  # noqa: E402

SECONDS = {"checks": 90, "grown": 190, "identity": 90, "kernels": 40, "library": 130}
"""For each group, after which it begins no long part."""
GRACE, ALL = 30, 570
"""Seconds that a group may take beyond its own to end what it began; and for everything."""


def run_suite(options: argparse.Namespace) -> int:
    """Run every group and write the record."""
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    out = options.out or ROOT / "eval/results" / f"{name}-{datetime.date.today().isoformat()}.json"
    record: dict[str, Any] = {"device": device_facts(device), "versions": versions(), "shape": options.shape}
    begun = time.monotonic()
    for group in options.groups:
        started = time.monotonic()
        allowed = min(SECONDS[group] + GRACE, begun + ALL - started)
        if allowed <= GRACE:
            record[f"{group} error"] = "left out: no time was left"
            write_json(out, record)
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "group.json"
            command = [sys.executable, __file__, "--group", group, "--out", str(path), "--shape", options.shape]
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


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("Checks and measurements that need a GPU, in one record.")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the quickstart's target")
    parser.add_argument(
        "--shape", default="llama-3.1-8b", choices=sorted(SHAPES), help="whose shape the target is grown to"
    )
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--group", choices=list(GROUPS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    if not torch.cuda.is_available():
        raise UserError("no GPU is at hand: the suite measures one; take a machine that has one")
    return run_group(options) if options.group else run_suite(options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
