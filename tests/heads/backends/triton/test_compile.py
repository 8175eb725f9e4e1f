"""Every kernel compiles for the cards it is meant for, at real sizes; Triton brings the whole compiler along."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton")

HOT = {
    ("_attention", 1): (136, 40, 3),
    ("_attention", 32): (224, 82, 2),
    ("_skinny", 1): (72, 82, 2),
    ("_skinny", 32): (88, 98, 2),
    ("_best_of_tile", 1): (104, 22, 4),
    ("_best_of_tile", 32): (160, 26, 3),
    ("_add_norm", 32): (64, 1, 4),
    ("_rope_write", 32): (32, 1, 12),
}
"""Kernels of a step of N nodes at the shape of Llama-3.1-8B: most registers a thread, KB of shared memory, and fewest
programs that a processor holds at once."""
DISTINCT = {"layer": 24, "attend": 16, "step": 24, "round": 28, "draft": 74}
"""Most kernels of a piece of work in bfloat16: each is compiled before the first step."""


@pytest.mark.slow
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """And take no more of a processor than they should."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[4]
    made = subprocess.run(
        [sys.executable, "-m", "scripts.gpu.compile_ahead", "--few"],
        cwd=root,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    *lines, last = made.stdout.splitlines()
    assert "compiled" in last
    kernels: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    hot: defaultdict[tuple[str, int], list[tuple[int, float, int]]] = defaultdict(list)
    for piece, nodes, name, *figures in map(str.split, lines):
        registers, _, memory, programs = map(int, figures[1::2])
        kernels[piece, nodes].add(name)
        if piece == "layer":
            hot[name.split("-")[0], int(nodes)].append((registers, memory / 1024, programs))
    for (piece, nodes), names in kernels.items():
        assert len(names) <= DISTINCT[piece], (piece, nodes, len(names))
    for kernel, (most_registers, most_shared, least_programs) in HOT.items():
        for registers, shared, programs in hot[kernel]:
            assert registers <= most_registers and shared <= most_shared, (kernel, registers, shared)
            assert programs >= least_programs, (kernel, programs)
        assert hot[kernel], f"{kernel} is not compiled"
