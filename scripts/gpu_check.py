"""The first session on a card: are the kernels right, are the texts exact, how fast is a round? One JSON file.

    python scripts/gpu_check.py facts   # every kernel in bfloat16 against float64, three times
    python scripts/gpu_check.py texts   # drafted texts against plain ones at 8B widths, native and Hugging Face's model
    python scripts/gpu_check.py speed   # steps and rounds of an 8B model against the bandwidth, transformers beside
    TRITON_INTERPRET=1 python scripts/gpu_check.py facts --small      # on a CPU, in Triton's interpreter, in float32

Each command is sized for eight minutes on a card of 80 GB, where it has not run yet, and adds its part to the file.
Weights are random and dense, as a model's are. A command exits with status 1 if a fact does not hold: a kernel that is
off or does not repeat itself, a text that differs by more than a near-tie, or an engine that left its kernels or its
CUDA graphs out.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.measure.command import Parser, exit_status

if TYPE_CHECKING:
    import torch

    from eval.runtime.engine import Engine
    from heads.targets.model import FrozenTarget


@dataclass(frozen=True)
class Sizes:
    """Sizes of the random models, by the names of transformers' configs, and of the work."""

    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 14_336
    vocab_size: int = 128_256
    layers: int = 32  # of the model of `speed`; that of `texts` has four
    slots: int = 5120  # of the cache that `facts` reads: they cross the kernel's splits, and the chunks of splits
    nodes: tuple[int, ...] = (1, 6, 32, 64)
    trees: tuple[str, ...] = ("chain:5", "tree:6x8x32")
    texts: int = 8
    prompt: int = 64
    tokens: int = 128
    buffer: int = 1 << 31  # elements of the tensor that measures the bandwidth


SMALL = Sizes(64, 4, 2, 16, 96, 300, 4, 1100, (6,), ("chain:2", "tree:2x2x4"), 1, 8, 8, 1 << 22)
WINDOW = 48


def facts(sizes: Sizes, device: "torch.device", dtype: "torch.dtype") -> dict[str, Any]:
    import torch

    from heads.targets.choose_token import choose_in_tiles, logits_in_tiles
    from heads.targets.gumbel import gumbel
    from heads.targets.masks import additive
    from heads.targets.slots import TreeSlots, ancestors
    from heads.targets.tree_attention import for_groups, masked_attention, tree_attention

    found: dict[str, Any] = {}
    H, Hkv, d = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
    S, D, V = sizes.slots, sizes.hidden_size, sizes.vocab_size
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-4

    def rand(*size: int) -> Any:
        return torch.randn(*size, device=device).to(dtype)

    def note(name: str, made: list[Any], error: float, limit: float) -> None:
        steady = all(torch.equal(one, made[0]) for one in made)
        found[name] = {"error": error, "repeats_itself": steady, "ok": steady and error < limit}  # NaN is not ok

    for N in sizes.nodes:
        parents = torch.tensor([[0, *(int(torch.randint(max(0, j - 9), j, ())) for j in range(1, N))]], device=device)
        above = ancestors(parents, N)
        q, (keys, values) = rand(1, N, H, d), rand(2, 1, S, Hkv, d)
        for length in sorted({0, 61, 1022, S - N}):
            at = torch.tensor([length], device=device)
            tree = TreeSlots(at, parents, above.sum(-1) - 1, above, torch.arange(S, device=device))
            for window in (None, WINDOW):
                visible = tree.visible(0, S)
                assert visible is not None
                if window is not None:
                    visible &= tree.positions[..., None] - tree.key_positions(S)[:, None] < window
                mask = for_groups(additive(visible, torch.float64)[:, 0], H // Hkv)
                true = masked_attention(q.double(), keys.double(), values.double(), mask)
                made = [tree_attention(q, keys, values, tree.visible_slots(), window=window) for _ in range(3)]
                error = float((made[0].double() - true).norm() / true.norm())
                note(f"tree_attention, {N} nodes after {length} tokens, window {window}", made, error, limit)
    weight = rand(V, D) * D**-0.5
    for N in sizes.nodes:
        hidden, ids, warmth = rand(N, D), torch.arange(N, device=device), torch.full((N,), 0.8, device=device)
        true = hidden.double() @ weight.double().T
        logits = [logits_in_tiles(hidden, weight) for _ in range(3)]
        note(f"logits, {N} rows", logits, float((logits[0].double() - true).norm() / true.norm()), 1e-4)
        for noisy in (False, True):
            noise = gumbel(7 * ids, ids[:, None], torch.arange(V, device=device))[:, 0]
            score = true / 0.8 + noise if noisy else true
            made = [choose_in_tiles(hidden, weight, warmth, 7 * ids, ids, noisy=noisy) for _ in range(3)]
            short = score.amax(1) - score.gather(1, made[0][:, None])[:, 0]  # 0 where the choice is the best
            note(f"choose, {N} rows, {'sampled' if noisy else 'greedy'}", made, float(short.max()), 1e-3)
    return found


def random_target(family: str, layers: int, sizes: Sizes, device: Any, dtype: Any, **more: Any) -> "FrozenTarget":
    from transformers import AutoConfig, AutoModelForCausalLM

    from heads.targets.model import FrozenTarget

    shape: dict[str, Any] = {name: value for name, value in vars(sizes).items() if "size" in name or "head" in name}
    shape |= {"num_hidden_layers": layers, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **shape, **more, eos_token_id=0, pad_token_id=0)
    with device:
        return FrozenTarget(AutoModelForCausalLM.from_config(config, dtype=dtype), family)


def forms(engine: "Engine") -> dict[str, bool]:
    decoder, has_graphs = engine.decoder.step.decoder, engine.rounds.capture is not None
    kernels = not decoder.reads_masks and decoder.in_tiles
    return {"kernels": kernels, "graphs": has_graphs, "ok": kernels and (has_graphs or engine.on_host)}


def texts(sizes: Sizes, device: "torch.device", dtype: "torch.dtype") -> dict[str, Any]:
    from eval.runtime.engine import Engine, EngineOptions, Request
    from eval.runtime.identity import Judge
    from eval.runtime.sampling_params import Sampling
    from heads.core.tree import parse_shape
    from heads.registry import build_untrained

    found: dict[str, Any] = {}
    room = sizes.prompt + sizes.tokens + max(parse_shape(tree).nodes for tree in sizes.trees)
    windows = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
    for family, more in (("llama", {}), ("gemma3_text", windows)):
        target = random_target(family, 4, sizes, device, dtype, **more)
        draft: Any = build_untrained("early_exit:3", target)
        plain = Engine(target, None, EngineOptions(max_length=room))
        for tree in sizes.trees:
            engine = Engine(target, draft, EngineOptions(shape=parse_shape(tree), max_length=room))
            judge = Judge(engine, plain)
            for temperature in (0.0, 1.0):
                requests = [
                    Request(prompt(sizes, i), sizes.tokens, Sampling(temperature, seed=i), ignore_eos=True)
                    for i in range(sizes.texts)
                ]
                pairs = list(zip(requests, plain.generate(requests), engine.generate(requests), strict=True))
                found[f"{family}, {tree}, T = {temperature:g}"] = fact = {
                    "texts": len(pairs),
                    "identical": sum(own.tokens == drafted.tokens for _, own, drafted in pairs),
                    "near_ties": sum(judge.compare(r, a.tokens, b.tokens).is_near_tie for r, a, b in pairs),
                    "tau": sum(len(b.tokens) - 1 for *_, b in pairs) / sum(b.rounds for *_, b in pairs),
                    **forms(engine),
                }
                fact["ok"] = fact["ok"] and fact["identical"] + fact["near_ties"] == len(pairs)
    return found


def prompt(sizes: Sizes, number: int = 0) -> list[int]:
    return [3 + (37 * number + 11 * j) % (sizes.vocab_size - 3) for j in range(sizes.prompt)]


def speed(sizes: Sizes, device: "torch.device", dtype: "torch.dtype") -> dict[str, Any]:
    import torch

    from eval.runtime.engine import Engine, EngineOptions, Request
    from heads.core.tree import ROOT_ONLY, parse_shape
    from heads.registry import build_head
    from heads.targets.quantization import weight_bytes

    target: Any = random_target("llama", sizes.layers, sizes, device, dtype)
    buffer = torch.randn(sizes.buffer, device=device, dtype=dtype)
    bandwidth = buffer.nbytes / min(seconds(buffer.sum, device) for _ in range(10))
    bytes_read = weight_bytes(target.model) - sizes.vocab_size * sizes.hidden_size * dtype.itemsize  # no embeddings
    found: dict[str, Any] = {"read_bandwidth": bandwidth, "bytes_of_a_step": bytes_read}
    head: Any = build_head("eagle3", {"aux_layer_ids": [1, 2, 3]}, target, torch.ones(sizes.vocab_size).long())
    head = head.to(device=device, dtype=dtype).eval()
    plain, request = 0.0, Request(prompt(sizes), sizes.tokens, ignore_eos=True)
    for name in ("plain", *sizes.trees):
        shape = ROOT_ONLY if name == "plain" else parse_shape(name)
        options = EngineOptions(shape=shape, max_length=sizes.prompt + sizes.tokens + shape.nodes)
        engine, best = Engine(target, None if name == "plain" else head, options), float("inf")
        for _ in range(3):
            (output,) = engine.generate([request])
            best = min(best, engine.timings.decode_seconds / engine.timings.rounds)
        tau, plain = (len(output.tokens) - 1) / output.rounds, plain or best
        found[name] = {"ms": 1e3 * best, "over_plain": best / plain, "tau": tau, "tokens_per_second": tau / best}
        found[name] |= forms(engine)
    found["plain"]["share_of_bandwidth"] = bytes_read / bandwidth / plain
    generate, ids = target.model.generate, torch.tensor([request.prompt], device=device)
    for name, cache in (("generate", "dynamic"), ("generate with torch.compile", "static")):

        def run(count: int, cache: str = cache) -> float:
            given: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "cache_implementation": cache}
            return seconds(lambda: generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **given), device)

        try:
            run(sizes.tokens)  # with a static cache on a GPU, transformers compiles its forward pass
            step = (min(run(sizes.tokens) for _ in range(2)) - min(run(2) for _ in range(2))) / (sizes.tokens - 2)
            found[name] = {"ms": 1e3 * step, "over_plain": step / plain, "tokens_per_second": 1 / step}
        except Exception as error:  # a baseline that fails is noted, and no fault of ours
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    return found


def seconds(work: Callable[[], Any], device: "torch.device") -> float:
    """Return the seconds of `work`, until the device has finished."""
    import torch

    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {"facts": facts, "texts": texts, "speed": speed}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Facts, exact texts and speed on a card that no engine has run on yet.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--small", action="store_true", help="tiny sizes, for Triton's interpreter on a CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="file that the part is added to")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    import torch

    from eval.measure.environment import machine
    from heads.targets import triton_support

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    triton_support.ON_CPU = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    started = time.perf_counter()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter multiplies no bfloat16
    with torch.no_grad():
        found = COMMANDS[options.command](SMALL if options.small else Sizes(), device, dtype)
    record = json.loads(options.out.read_text()) if options.out.is_file() else {}
    record[options.command] = {**machine(device), "minutes": (time.perf_counter() - started) / 60, "found": found}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [name for name, fact in found.items() if isinstance(fact, dict) and not fact.get("ok", True)]
    for name, fact in found.items():
        print(f"{'WRONG ' if name in wrong else ''}{name}: {json.dumps(fact)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
