"""Features of packed rows on a CPU: the pass over whole rows beside the Hugging Face model, in turns.

    python scripts/bench_features.py recipes/quickstart/target
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 python scripts/bench_features.py ...

The second command is what a processor without AVX-512 does. The least of the repeats counts: other work only adds.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch

from eval.command import Parser, count, exit_status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("The pass over whole rows beside the Hugging Face model.")
    parser.add_argument("target", help="a folder or hub id")
    parser.add_argument("--rows", type=count, default=2)
    parser.add_argument("--tokens", type=count, default=256, help="of a row")
    parser.add_argument("--repeats", type=count, default=30)
    options = parser.parse_args(arguments)
    from heads.backends.cpu.whole import whole_pass
    from heads.processor import fastest_dtype
    from heads.target.frozen import load_target

    target = load_target(options.target, dtype=torch.float32)
    B, T = options.rows, options.tokens
    documents = (torch.arange(T) >= T // 3).long().expand(B, -1)
    positions = torch.arange(T) - documents * (T // 3 + (T % 3 > 0))
    packed = torch.randint(target.vocab_size, (B, T)), positions, documents
    layers = (2, target.num_layers // 2, target.num_layers - 3)
    dtype = fastest_dtype(target.device)  # as training takes it
    whole = whole_pass(target, dtype)
    assert whole is not None
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        both = {"whole rows": whole, "Hugging Face": target.packed_features}
        best = least(both, lambda read: read(*packed, layers), options.repeats)
    ratio = best["Hugging Face"] / best["whole rows"]
    print(f"{dtype}: " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in best.items()) + f", ratio {ratio:.2f}")
    return 0


def least(
    forms: dict[str, Callable[..., object]], run: Callable[[Callable[..., object]], object], repeats: int
) -> dict[str, float]:
    """The least seconds of each form, run in turns."""
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(repeats + 1):
        for name, form in forms.items():
            started = time.perf_counter()
            run(form)
            best[name] = min(best[name], time.perf_counter() - started)
    return best


if __name__ == "__main__":
    sys.exit(exit_status(main))
