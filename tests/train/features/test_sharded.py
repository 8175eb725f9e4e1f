"""A target whose layers two processes share: the same features, half of the weights, one copy in the node's memory."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eval.runtime.engine import Engine, EngineOptions
from heads.core.errors import UserError
from heads.targets.load import load_target
from heads.targets.placement import drop_layers
from tests.conftest import make_tiny_tokenizer
from tests.packed_rows import packed_rows
from tests.processes import finish, launcher, start
from tests.runs import Settings, write_recipe
from train.accelerator import load_recipe_target
from train.open_run import sharding
from train.recipe import Target

ROOT = Path(__file__).resolve().parents[3]
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


def work(rank: int, port: str, path: str, dtype: Any, out: Path) -> None:
    """Write the features, the share of the layers and the peak memory of one of two processes that share a target."""
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


def make(folder: Path, layers: int, **sizes: Any) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, num_hidden_layers=layers, num_attention_heads=4, **sizes)
    model: Any = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_processes_share_a_target(tmp_path: Path) -> None:
    # Of so many layers that one is a small part; the objects of as many are in memory before, by the small one.
    make(tmp_path / "big", 96, hidden_size=448, intermediate_size=1232)
    make(tmp_path / "tiny", 96, hidden_size=32, intermediate_size=64)
    # Smaller buffers than real layers' are otherwise kept by the allocator for later ones.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.train.features.test_sharded"]
    arguments = ["29731", str(tmp_path / "big"), "float32", str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(rank), *arguments], env=environment, cwd=ROOT) for rank in range(WORLD)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    whole, rows = load_target(str(tmp_path / "big"), dtype=torch.float32), packed_rows()
    own = whole.packed_features(rows.tokens, rows.positions, rows.documents, AUX_LAYER_IDS)
    for rank in range(WORLD):
        found = load_file(tmp_path / f"features-{rank}.safetensors")
        assert torch.equal(found["aux"], own.aux_hidden_states) and torch.equal(found["hidden"], own.hidden)
        facts = json.loads((tmp_path / f"facts-{rank}.json").read_text())
        assert facts["share"] <= 0.55 and facts["peak"] <= 1.1 and facts["fingerprint"] == whole.fingerprint, facts


@pytest.mark.slow
def test_sharded_training_is_training(settings: Settings, tmp_path: Path) -> None:
    settings["head"] = {"kind": "eagle3", "depth": 2}
    recipe, two = write_recipe(settings), launcher("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    runs: dict[str, Any] = {}
    for kind in ("process", "sharded"):
        finish(start(recipe, f"output_dir={tmp_path / kind}", f"features.kind={kind}", launcher=two))
        runs[kind] = load_file(tmp_path / kind / "checkpoints/step-6/head.safetensors")
        assert (tmp_path / kind / "results.json").is_file()
    assert all(torch.equal(tensor, runs["process"][name]) for name, tensor in runs["sharded"].items())


def test_a_target_without_layers_decodes_nothing(tiny_target_dir: Path) -> None:
    lean = load_target(str(tiny_target_dir), dtype=torch.float32, place=drop_layers)
    whole = load_target(str(tiny_target_dir), dtype=torch.float32)
    assert lean.fingerprint == whole.fingerprint and lean.num_layers == whole.num_layers
    assert torch.equal(lean.lm_head_weight, whole.lm_head_weight)
    assert all(parameter.is_meta for parameter in lean.layers.parameters())
    with pytest.raises(UserError, match="cannot decode here: its decoder layers are absent"):
        Engine(lean, None, EngineOptions(max_length=16))


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5]))
