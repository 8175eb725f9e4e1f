"""One of two processes that shard a target: python -m tests.sharded_worker RANK PORT TARGET DTYPE OUT.

Each process writes its features of packed rows, its share of the layers' weights, the target's fingerprint, and the
peak memory of both processes while they load the target and run the forward pass.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import save_file

from tests.packed_rows import packed_rows
from train.features.opening import sharding
from train.launch import load_recipe_target
from train.recipe import Target

WORLD = 2
AUX_LAYER_IDS = (2, 4, 8)


def memory(process: int) -> int:
    """Return the memory of a process in bytes. Shared memory is divided equally between its users."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


class Peak(threading.Thread):
    """A thread that measures the peak memory of several processes together, above their memory at its creation."""

    def __init__(self, processes: list[int]) -> None:
        super().__init__(daemon=True)
        self.processes, self.bytes, self.is_over = processes, 0, False
        self.before = sum(map(memory, processes))

    def run(self) -> None:
        while not self.is_over:
            self.bytes = max(self.bytes, sum(map(memory, self.processes)) - self.before)
            time.sleep(0.002)


def main(rank: int, port: str, path: str, dtype: Any, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    accelerator = Accelerator(cpu=True)
    place = sharding(accelerator)
    load_recipe_target(Target(path=path.replace("big", "tiny"), dtype=dtype), accelerator, place=place)  # libraries
    processes: list[Any] = [None] * WORLD
    dist.all_gather_object(processes, os.getpid())
    peak = Peak(processes)
    dist.barrier()
    peak.start()
    target, _ = load_recipe_target(Target(path=path, dtype=dtype), accelerator, place=place)
    rows = packed_rows()
    found = target.packed_features(rows.tokens, rows.positions, rows.documents, AUX_LAYER_IDS)
    dist.barrier()
    peak.is_over = True
    save_file({"aux": found.aux_hidden_states, "hidden": found.hidden}, out / f"features-{rank}.safetensors")
    layers: list[Any] = list(target.layers.parameters())
    facts = {
        "share": sum(part.to_local().numel() for part in layers) / sum(part.numel() for part in layers),
        "fingerprint": target.fingerprint,
        "peak": peak.bytes / sum(part.numel() * target.dtype.itemsize for part in target.model.parameters()),
    }
    (out / f"facts-{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5]))
