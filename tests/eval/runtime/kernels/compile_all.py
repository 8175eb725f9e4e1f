"""Compiles every kernel for an H100 or H200 at Llama-3.1-8B's and DeepSeek-V2-Lite's shapes, without a GPU: prints the
shared memory and spills of each."""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from eval.runtime.kernels import backend

SHARED_MEMORY = 227 * 1024


class NoDevice:
    """Stands in for the driver of a card that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: dict[str, Any] = {}


def compile_only(kernel: Any, grid: Any) -> Any:
    def launch(*args: Any, **options: Any) -> None:
        made = kernel.warmup(*args, grid=grid, **options)
        compiled[f"{kernel.fn.__name__}-{made.hash[:8]}"] = made

    return launch


def main() -> None:
    driver.set_active(NoDevice())
    JITFunction.__getitem__ = compile_only
    backend.ON_CPU = True
    from eval.runtime.kernels import accept, attention, choose, experts, gemm, layers

    bf16 = torch.bfloat16
    for N in (1, 8, 64):
        ids = torch.zeros(1, N, dtype=torch.int64)
        words, paths = attention.ancestor_words(ids, ids, 6)
        x, heads = torch.empty(N, 4096, dtype=bf16), torch.empty(1, N, 32, 128, dtype=bf16)
        slots = torch.empty(2048, 2, 8, 128, dtype=bf16)
        keys, values = slots[:, 0], slots[:, 1]
        length = torch.zeros(1, dtype=torch.int64)
        for own, window in ((None, 0), (paths, 0), (None, 100)):
            attention.tree_attention(heads, keys[None], values[None], words, length, ids, paths=own, window=window)
        latent = torch.empty(1, 2048, 1, 576, dtype=bf16)
        q = torch.empty(1, N, 16, 576, dtype=bf16)
        for own in (None, paths):
            attention.tree_attention(q, latent, latent[..., :512], words, length, ids, rope=64, paths=own)
        layers.add_norm(x, x, x[0], 1e-5)
        layers.add_norm(x, None, x[0], 1e-5)
        half = torch.empty(N, 64, dtype=bf16)
        norm = torch.empty(128, dtype=bf16)
        qkv = torch.empty(N, 6144, dtype=bf16)
        for own in (None, norm):
            layers.rope_write(qkv, half, half, ids[0], keys, values, num_heads=32, q_norm=own, k_norm=own)
        layers.silu_mul(torch.empty(N, 28672, dtype=bf16))
        for out in (6144, 28672):
            gemm.skinny_mm(x, torch.empty(out, 4096, dtype=bf16))
        gemm.skinny_mm(torch.empty(N, 14336, dtype=bf16), torch.empty(4096, 14336, dtype=bf16))
        weight = torch.empty(128256, 4096, dtype=bf16)
        for noisy in (False, True):
            choose.choose(x, weight, torch.zeros(N), ids[0], ids[0], noisy=noisy)
        choose.logits(x, weight)
        from heads.tree import Proposal

        accept.accept(Proposal(ids, ids, ids, ids), ids, 6)
        accept.compact(torch.empty(32, 1, 2048, 2048, dtype=bf16), length, ids[:, :1].expand(1, 7), length)
        chosen = torch.zeros(N, 6, dtype=torch.int64)
        up = torch.empty(64, 2816, 2048, dtype=bf16)
        experts.expert_mm(x[:, :2048], chosen, up)
        experts.expert_mm(torch.empty(N, 6, 1408, dtype=bf16), chosen, torch.empty(64, 2048, 1408, dtype=bf16))
    for name, made in compiled.items():
        assert made.metadata.shared <= SHARED_MEMORY, f"{name}: {made.metadata.shared} bytes of shared memory"
        print(f"{name:32} shared {made.metadata.shared:7}  warps {made.metadata.num_warps}")
    print(f"compiled {len(compiled)} kernels with Triton {triton.__version__}")


if __name__ == "__main__":
    main()
