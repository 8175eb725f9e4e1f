"""The target as an engine with lower precision runs it: with the weights of the engine's file, and its cache rounded as
llama.cpp rounds it.

Blocks of 32 values share a scale in 16 bits. A quantised cache holds keys and values turned by an orthonormal Hadamard
matrix, where a head's width is a multiple of 64 (llama.cpp b11434, llama-kv-cache.cpp).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.runtime.engine import Engine, EngineOptions
from eval.servers.parity_counts import Step
from heads.core.errors import UserError
from heads.targets.cache import HFCache, KVCache
from heads.targets.frozen_target import FrozenTarget

BLOCK = 32
TURNED = {"LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "InternLM3ForCausalLM"}
"""Classes whose keys llama.cpp's converter reorders: the two halves of a head alternate."""
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
CACHES = {"f16": 16, "q8_0": 8, "q4_0": 4, "bf16": 16, "q5_0": 5, "q5_1": 5, "q4_1": 4}
"""Types of keys and values in a cache, apart from float32, and the bits of a value."""
MIXED = (("q8_0", "f32"), ("q4_0", "f32"), ("f32", "q8_0"), ("f32", "q4_0"), ("q8_0", "q4_0"))
"""Types of keys and values that are tried where they differ. One in 16 bits is as good as float32 beside fewer bits."""


@dataclass(frozen=True)
class Precision:
    """A way in which an engine's target may be less precise than this runtime's."""

    name: str = ""
    """In a sentence: `its KV cache is in 8 bits (q8_0)`."""
    cache: tuple[str, str] | None = None
    """Types of keys and values."""
    target: FrozenTarget | None = None


AS_HERE = Precision()


def precisions(kind: str, weights: FrozenTarget | None) -> Iterator[Precision]:
    """Yield what may be wrong with an engine's target. `kind`: of its weights, in the engine's words; `weights`: these
    weights, if they can be read here."""
    caches = [*((name, name) for name in CACHES), *MIXED]
    own = ""
    if weights is not None:
        own = f"its target's weights are {kind}"
        yield Precision(own, None, weights)
        own += ", and "
    for cache in caches:
        yield Precision(own + in_words(cache), cache, weights)


def in_words(cache: tuple[str, str]) -> str:
    keys, values = (f"{CACHES.get(kind, 32)} bits ({kind})" for kind in cache)
    if "f32" in cache:
        return f"its values are in {values}" if cache[0] == "f32" else f"its keys are in {keys}"
    return f"its KV cache is in {keys}" if keys == values else f"its keys are in {keys} and its values in {values}"


Probe = tuple[Sequence[int], Sequence[int], Sequence[Step]]
"""A prompt, a text after it, and what an engine's target makes of the text."""


def values_of(target: FrozenTarget, options: EngineOptions, precision: Precision, probes: Sequence[Probe]) -> Tensor:
    """Return the log-probabilities, by the target here with such a precision, of the tokens for which an engine gave
    its own."""
    engine = Engine(precision.target or target, None, options)
    round_cache(engine, precision)
    found = []
    for prompt, text, steps in probes:
        for row, step in zip(log_probabilities(engine, prompt, text), steps, strict=True):
            found += row[list(step.log_probabilities)].tolist()
    return torch.tensor(found)


def size(differences: Tensor) -> float:
    """Return the root mean square."""
    return float(differences.square().mean().sqrt()) if len(differences) else 0.0


def likeliest_gap(target: FrozenTarget, options: EngineOptions, probe: Probe) -> float:
    """Return the median, over a text's tokens, of how much likelier the target's own choice is than the engine's, in
    nats."""
    prompt, text, steps = probe
    ours = log_probabilities(Engine(target, None, options), prompt, text)
    gaps = sorted(float(row.max() - row[step.choice]) for row, step in zip(ours, steps, strict=True))
    return gaps[len(gaps) // 2]


def round_block(x: Tensor, kind: str) -> Tensor:
    """Round rows (..., n) as a cache of this kind holds them. llama.cpp has quantised ones only of whole blocks."""
    if kind in HALVES:
        return x.to(HALVES[kind]).to(x.dtype)
    if kind == "f32" or x.shape[-1] % BLOCK:
        return x
    try:
        from gguf import GGMLQuantizationType, dequantize, quantize
    except ImportError:
        raise UserError("values are rounded as llama.cpp rounds them with gguf; pip install gguf") from None
    form = GGMLQuantizationType[kind.upper()]
    return torch.from_numpy(dequantize(quantize(x.float().cpu().numpy(), form), form)).to(x)


def hadamard(width: int) -> Tensor:
    """Return the orthonormal, symmetric Hadamard matrix (width, width) of a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix / width**0.5
    return scaled


def round_states(x: Tensor, kind: str, *, alternate: bool) -> Tensor:
    """Round keys or values (..., H, d) of all heads. `alternate`: the halves of a head alternate in llama.cpp."""
    d = x.shape[-1]
    order = torch.arange(d).view(2, -1).T.flatten() if alternate else torch.arange(d)
    held = x[..., order]
    widths = (512, 256, 128, 64) if kind.startswith("q") else ()
    width = next((width for width in widths if d % width == 0), 0)
    if width:
        matrix = hadamard(width).to(x.dtype)
        held = (held.unflatten(-1, (-1, width)) @ matrix).flatten(-2)
    held = round_block(held.flatten(-2), kind).unflatten(-1, x.shape[-2:])
    if width:
        held = (held.unflatten(-1, (-1, width)) @ matrix).flatten(-2)
    back: Tensor = held[..., order.argsort()]
    return back


def round_cache(engine: Engine, precision: Precision) -> None:
    """Make an engine's target keep its keys and values as a cache of such a precision does."""
    if (kinds := precision.cache) is None:
        return
    alternate = type(engine.target.model).__name__ in TURNED
    whole = engine.decoder.target.cache
    cache: Any = whole  # whose methods are replaced
    if isinstance(whole, KVCache):
        write: Callable[[int, Tensor], tuple[Tensor, Tensor]] = whole.write
        forms = whole.forms
        heads, width = forms[0]

        def rounded(layer: int, states: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = states.split([heads * width, states.shape[1] - heads * width], 1)
            parts = [
                round_states(part.unflatten(1, (-1, size)), kind, alternate=swaps).flatten(1)
                for part, (_, size), kind, swaps in zip((keys, values), forms, kinds, (alternate, False), strict=True)
            ]
            return write(layer, torch.cat(parts, 1))

        cache.write = rounded
    elif isinstance(whole, HFCache):
        update = whole.update

        def rounded_update(
            keys: Tensor, values: Tensor, layer: int, *rest: object, **more: object
        ) -> tuple[Tensor, Tensor]:
            rows = [part.transpose(1, 2) for part in (keys, values)]
            keys, values = (
                round_states(row, kind, alternate=swaps).transpose(1, 2)
                for row, kind, swaps in zip(rows, kinds, (alternate, False), strict=True)
            )
            return update(keys, values, layer, *rest, **more)

        cache.update = rounded_update


@torch.inference_mode()
def log_probabilities(engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """Return (len(text), V): the target's log-probabilities before each token of a text, in one pass over it."""
    decoder = engine.decoder.target
    tokens = torch.tensor([[*prompt, *text[:-1]]], device=engine.target.device)
    hidden = decoder.prefill(0, tokens, 0).hidden[:, len(prompt) - 1 :]
    return decoder.logits(hidden)[0].float().log_softmax(-1).cpu()
