"""Quality of a target as a language model of the held-out modules, and its README."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.benchmark.metrics import is_loop
from eval.runtime.engine import Engine, EngineOptions, Request
from heads.target.frozen import load_target

CONTEXT = 512
SAMPLES, SAMPLE_PROMPT, SAMPLE_TOKENS = 100, 96, 128


@dataclass(frozen=True)
class Making:
    """Record of how a target was made."""

    layers: int
    hidden_size: int
    vocab_size: int
    tokens: int
    """Number of tokens of the training text."""
    tokens_seen: int
    conversations: bool
    """True if the training text contains conversations."""
    command: str


@dataclass(frozen=True)
class Quality:
    """Measurements over a held-out split."""

    bits_per_byte: float
    accuracy: float
    tokens: int
    loops: int
    """Number of the `prompts` whose greedy continuation ends in a loop."""
    prompts: int
    samples: list[tuple[str, str]]
    """Pairs of a prompt and its greedy continuation."""


def measure_target(
    path: Path, held_out: np.ndarray, tokenizer: PreTrainedTokenizerBase, *, specials: set[str], device: str = "cpu"
) -> Quality:
    """Bits per byte and accuracy over held-out ids (n,), and greedy continuations of prompts from them.

    `specials` are the tokens that stand for no byte; every other token's name has one letter a byte.
    """
    target = load_target(str(path), dtype=torch.float32, device=device)
    ids = torch.from_numpy(held_out.astype(np.int64))
    windows = ids[: (len(ids) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    names = tokenizer.convert_ids_to_tokens(list(range(target.vocab_size)))
    sizes = torch.tensor([0 if name is None or name in specials else len(name) for name in names], device=device)
    positions = torch.arange(CONTEXT - 1, device=device)[None]
    nats, hits, count, size = 0.0, 0, 0, 0
    for some in windows.split(4):
        rows = some.to(device)
        spot = positions.expand(len(rows), -1)
        hidden = target.packed_features(rows[:, :-1], spot, torch.zeros_like(spot), ()).hidden
        logits = target.shared.lm_head(hidden)
        nats += nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
        hits += int((logits.argmax(-1) == rows[:, 1:]).sum())
        count += rows[:, 1:].numel()
        size += int(sizes[rows[:, 1:]].sum())
    step = max(1, len(windows) // SAMPLES)
    prompts = [row[:SAMPLE_PROMPT].tolist() for row in windows[::step][:SAMPLES]]
    engine = Engine(target, None, EngineOptions(batch_size=8, max_length=CONTEXT))
    outputs = engine.generate([Request(prompt, max_new_tokens=SAMPLE_TOKENS) for prompt in prompts])
    return Quality(
        bits_per_byte=nats / math.log(2) / size,
        accuracy=hits / count,
        tokens=count,
        loops=sum(is_loop(output.tokens) for output in outputs),
        prompts=len(prompts),
        samples=[
            (str(tokenizer.decode(p)), str(tokenizer.decode(o.tokens)))
            for p, o in zip(prompts[:3], outputs[:3], strict=True)
        ],
    )


def target_card(made: Making, found: Quality) -> str:
    """Return the README of a made target."""
    measured = f"{found.tokens / 1e6:.2f} million tokens, context {CONTEXT}"
    loops = f"{found.loops} of {found.prompts} ({SAMPLE_TOKENS} tokens each; `eval.benchmark.metrics.is_loop`)"
    samples = "\n\n".join(
        f"Prompt (held out):\n\n```python\n{prompt}\n```\n\nGreedy continuation:\n\n```python\n{output}\n```"
        for prompt, output in found.samples
    )
    source = "Python source of one machine: standard library and installed packages"
    source += "; conversations" if made.conversations else ""
    return f"""# A small real code model

A Llama-architecture model of {made.layers} layers and width {made.hidden_size} with a byte-level BPE of
{made.vocab_size} tokens, trained from scratch by `scripts/make_target.py` so that draft heads can be trained and
measured without a hub.

| | |
|---|---|
| data | {source}, {made.tokens / 1e6:.1f} million tokens |
| held out | whole modules, by a hash of their path (`eval/benchmark/corpus.py`); near copies are left out of training |
| tokens seen | {made.tokens_seen / 1e6:.1f} million |
| held-out bits per byte | {found.bits_per_byte:.3f} over {measured} |
| held-out next-token accuracy | {found.accuracy:.3f} |
| greedy continuations stuck in a loop | {loops} |

Make it again: `{made.command}`

## Samples

{samples}
"""
