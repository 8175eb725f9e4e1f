"""Compile every Triton kernel ahead of time, in parallel processes.

    python -m scripts.gpu.compile_ahead [--few]    # two sizes of step instead of ten

Kernels are compiled in both dtypes at the shapes of Llama-3.1-8B, Qwen2.5-7B, DeepSeek-V2-Lite and the GPU checks. With
a GPU they are compiled for it, so that later processes find them in Triton's cache. Without a GPU they are compiled for
an H100 or H200. Prints the resources that each kernel uses of a multiprocessor, and how many of its programs fit there.
Fails if a kernel needs more than there is.
"""

import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from heads.backends.selection import TRITON
from heads.backends.torch.commit import RoundState
from heads.backends.triton import availability as backend
from heads.backends.triton.commit import TritonCommit

SHARED_MEMORY, REGISTERS, THREADS, PROGRAMS = 227 * 1024, 1 << 16, 2048, 32
"""Resources of a multiprocessor of an H100 or H200. A program needs 1 KB of shared memory in addition to its own."""
MOST_SPILLED = {torch.bfloat16: 256, torch.float32: 2048}
"""Maximum number of bytes spilled per thread, which depends on Triton's version. float32 is for checks, not for
speed."""
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NO_DEVICE = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)
"""Replacement for Triton's driver on a machine without a GPU."""
Empty = Callable[..., Tensor]


def layer(empty: Empty, N: int) -> None:
    """Run the kernels of a layer of Llama-3.1-8B and of the choice of a token, which take nearly all of a step's
    time."""
    from heads.backends.triton import attention, choose, gemm, layers

    ids, length = torch.zeros(1, N, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    x, half, slots = empty(N, 4096), empty(N, 64), empty(2048, 2, 8, 128)
    words, _ = attention.ancestor_words(ids, ids, 6)
    q = empty(1, N, 32, 128)
    attention.tree_attention(q, slots[:, 0][None], slots[:, 1][None], words, length, None)
    for tile in gemm.TILES:
        if tile.least <= N:
            qkv = gemm.skinny_parts(x, empty(6144, 4096), tile)
            layers.rope_write(qkv, half, half, ids[0], slots[:, 0], slots[:, 1], num_heads=32)
            gemm.skinny_parts(x, empty(28672, 4096), tile, gated=True)
            for width in (4096, 14336):
                layers.add_norm(x, gemm.skinny_parts(empty(N, width), empty(4096, width), tile), x[0], 1e-5)
    weight = empty(128256, 4096)
    for noisy in (False, True):
        choose.choose(x, weight, torch.zeros(N), ids[0], ids[0], noisy=noisy)


def attend(empty: Empty, N: int) -> None:
    """Run attention with groups of 4, 7 and 1 heads, head dimensions 64 and 128, and a latent of 512 and 64."""
    from heads.backends.triton import attention

    ids, length = torch.zeros(1, N, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    words, paths = attention.ancestor_words(ids, ids, 6)
    for H, Hkv, d in ((32, 8, 128), (28, 4, 128), (8, 2, 64), (4, 4, 128)):
        slots = empty(2048, 2, Hkv, d)
        keys, values = slots[:, 0][None], slots[:, 1][None]
        for own, window in ((None, 0), (paths, 0), (None, 100)):
            q = empty(1, N, H, d)
            attention.tree_attention(q, keys, values, words, length, ids, paths=own, window=window)
    q, slots = empty(1, N, 32, 128), empty(2048, 2, 8, 128)
    keys, values = slots[:, 0][None], slots[:, 1][None]
    attention.tree_attention(q, keys, values, words, length, ids, behind=40, window=100)  # in a draft head
    latent, q = empty(1, 2048, 1, 576), empty(1, N, 16, 576)
    for own in (None, paths):
        attention.tree_attention(q, latent, latent[..., :512], words, length, ids, rope=64, paths=own)


def step(empty: Empty, N: int) -> None:
    """Run the other kernels of a step of N tokens, including those used with the library's products."""
    from heads.backends.triton import accept, choose, compaction, experts, gemm, layers, per_head, pick
    from heads.tree import Proposal

    ids = torch.zeros(1, N, dtype=torch.int64)
    x, norm, half = empty(N, 4096), empty(128), empty(N, 64)
    slots, qkv = empty(2048, 2, 8, 128), empty(N, 6144)
    for added in (x, None):
        layers.add_norm(x, added, x[0], 1e-5)
    for own in (None, norm):
        layers.rope_write(qkv, half, half, ids[0], slots[:, 0], slots[:, 1], num_heads=32, q_norm=own, k_norm=own)
    layers.silu_mul(empty(N, 28672))
    gemm.add_parts(torch.empty(2, N, 4096), x.dtype)
    choose.logits(x, empty(128256, 4096))
    for count in (1, 8):
        noise = pick.Noise(ids[:, :1].expand(-1, N), torch.zeros(1), ids[0, :1])
        for sampled, named in ((None, None), (noise, torch.zeros(32000, dtype=torch.int64))):
            pick.best_columns(empty(1, N, 32000), count, named, sampled)
    length = torch.zeros(1, dtype=torch.int64)
    accept.match(Proposal(ids, ids, ids, ids), ids, None, 6)
    path = torch.zeros(1, 7, dtype=torch.int64)
    compaction.compact(empty(32, 1, 2048, 2048), length, path, length)
    accept.take_path(empty(1, N, 3 * 4096), empty(1, N, 4096), path)
    chosen = torch.zeros(N, 6, dtype=torch.int64)
    experts.expert_mm(x[:, :2048], chosen, empty(64, 2816, 2048))
    experts.expert_mm(empty(N, 6, 1408), chosen, empty(64, 2048, 1408))
    experts.weigh_visits(empty(N, 6, 2048), torch.zeros(N, 6), x[:, :2048])
    decompress = empty(16, 256, 512)
    per_head.per_head_mm(empty(N, 16, 192)[..., :128], decompress[:, :128], empty(N, 16, 576)[..., :512])
    per_head.per_head_mm(empty(N, 16, 512), decompress[:, 128:].mT)


def commit() -> None:
    """Run the commit of rounds of several depths, with several numbers of EOS ids."""
    for depth, eos, nodes in ((0, [2], 0), (6, [], 32), (6, [2, 5, 9], 64)):
        state = RoundState.new(batch_size=2, capacity=500, depth=depth, device=torch.device("cpu"), rounds=4)
        depths, emitted = torch.zeros(2, 2, nodes, dtype=torch.int64), state.output[:, : depth + 1]
        commit = TritonCommit(state, torch.tensor(eos, dtype=torch.int64), depth)
        commit(state.length, emitted, depths[0] if nodes else None)


def grow_trees() -> None:
    """Grow trees of the usual sizes and of the largest size that kernels support."""
    from heads.growth import grow
    from heads.tree import parse_shape

    def pick(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        shape = (*logits.shape[:2], count)
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)

    root = torch.zeros(1, dtype=torch.int64)
    for text in ("tree:6x8x32", "tree:8x10x60", "tree:4x32x1000", "static:3.2.1", "static:9.9.9"):
        grow(parse_shape(text), root, root, torch.zeros(1, 1, 99), pick, expand, None, TRITON.select)


def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
    return torch.zeros(*tokens.shape, 99)


def draft(dtype: torch.dtype) -> None:
    """Read prompts and draft chains and trees with EAGLE-3 and MTP. The heads are on the meta device, because nothing
    is computed."""
    from heads.backends.slot_mapping import Drafted, Observed
    from heads.backends.triton.inputs import stand
    from heads.tree import parse_shape
    from scripts.gpu.draft_steps import large_head, some_news
    from scripts.grown.shapes import SHAPES

    for name in ("eagle3", "mtp"):
        head, shared = large_head(name, SHAPES["llama-3.1-8b"], torch.device("meta"), dtype)
        for text in ("chain:5", "tree:6x8x32", "tree:6x20x64"):
            state = head.new_state(shared, batch_size=1, capacity=2048, shape=parse_shape(text), backend=TRITON)
            for M in (6, 64, 256):
                head.extend(state, some_news(state, M))
            head.propose(state, TRITON.sampling(1, torch.device("meta")).pick)
    slot, length, paths = (torch.zeros(*size, dtype=torch.int64) for size in ((2048,), (1,), (1, 8, 3)))
    for mapping in (
        Observed(length, None, slot, 2),
        Observed(length, length, slot, 64),
        Drafted(length, paths, slot, False),
    ):
        stand(mapping, behind=40)


def resources(made: Any) -> dict[str, int]:
    """Return a kernel's registers and spilled bytes per thread, its shared memory in bytes, and the number of its
    programs that fit on a multiprocessor at once."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", said)}
    shared, threads = made.metadata.shared, 32 * made.metadata.num_warps
    room = REGISTERS // (-(-used["REG"] // 8) * 8 * threads), (SHARED_MEMORY + 1024) // (shared + 1024)
    return {
        "registers": used["REG"], "spilled": used["STACK"], "shared": shared,
        "programs": min(*room, THREADS // threads, PROGRAMS),
    }  # fmt: skip


def everything(few: bool) -> list[tuple[torch.dtype, str, int]]:
    """Return pieces of work as (dtype, name, number of tokens). Each compiles kernels that no other piece compiles."""
    steps = {torch.bfloat16: (1, 6, 8, 16, 32, 64, 192), torch.float32: (1, 9, 64)}
    pieces = []
    for dtype, sizes in ({torch.bfloat16: (1, 32)} if few else steps).items():
        pieces += [(dtype, "draft", 0), (dtype, "round", 0)]
        pieces += [(dtype, "attend", N) for N in sizes]
        pieces += [(dtype, name, N) for N in sizes if N <= 64 for name in ("layer", "step")]
    return pieces


def compile_piece(piece: tuple[torch.dtype, str, int]) -> dict[str, dict[str, int]]:
    """Compile the kernels of a piece. Return the resources of each kernel by its name."""
    dtype, name, N = piece
    compiled: dict[str, Any] = {}

    def compile_only(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            made = kernel.warmup(*args, grid=grid, **options)
            compiled[f"{kernel.fn.__name__}-{made.hash[:8]}"] = made

        return launch

    def empty(*size: int) -> Tensor:
        return torch.empty(*size, dtype=dtype)

    if not torch.cuda.is_available():
        driver.set_active(NO_DEVICE)
    JITFunction.__getitem__ = compile_only
    backend.ON_CPU = True
    if name == "round":
        commit()
        grow_trees()
    elif name == "draft":
        draft(dtype)
    else:
        {"layer": layer, "attend": attend, "step": step}[name](empty, N)
    return {key: resources(made) for key, made in compiled.items()}


def main() -> None:
    pieces = everything("--few" in sys.argv)
    names = set()
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for (dtype, piece, N), compiled in zip(pieces, pool.map(compile_piece, pieces), strict=True):
            for name, used in compiled.items():
                names.add((dtype, name))
                print(f"{piece:6} {N:3}  {name:32} " + "  ".join(f"{key} {value:6}" for key, value in used.items()))
                assert used["shared"] <= SHARED_MEMORY, f"{name}: {used['shared']} bytes of shared memory"
                assert used["spilled"] <= MOST_SPILLED[dtype], f"{name}: spills {used['spilled']} bytes a thread"
    print(f"compiled {len(names)} kernels with Triton {triton.__version__}")


if __name__ == "__main__":
    main()
