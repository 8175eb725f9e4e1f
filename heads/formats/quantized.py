"""Heads whose projections are saved in 8 bits, in the form of compressed-tensors that vLLM 0.33 and SGLang 0.5.23 read.

    scale_o = max |W_o| / largest value     for each row o;     saved: W / scale in fp8 (e4m3) or int8, and the scales

Both engines also quantise a projection's input, token by token while they run, so nothing is calibrated. SGLang reads
8-bit weights in no form without that. Its `fc` is never quantised, and output heads are not, so both stay as they are.
Here, weights are multiplied by their scales again when a head is loaded.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from heads.core.errors import UserError

PROJECTIONS = tuple(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
WHOLE = ("lm_head.weight", "embed_tokens.weight", "fc.weight")
SCALE = "_scale"
TYPES = {"fp8": ("float", torch.float8_e4m3fn, 448.0), "int8": ("int", torch.int8, 127.0)}
"""dtype -> its type in config.json, torch's dtype, and the largest value."""


def quantization_config(dtype: str) -> dict[str, object]:
    kind = TYPES[dtype][0]
    number = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*fc$"],
    }


def quantized(weights: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return a head's tensors with its projections in 8 bits. Raises UserError for matrices that engines would take for
    quantised ones, too."""
    _, kind, largest = TYPES[dtype]
    known = (*PROJECTIONS, *WHOLE)
    if others := [name for name, weight in weights.items() if weight.ndim == 2 and not name.endswith(known)]:
        raise UserError(f"tensor {others[0]}: layers with such a matrix are not quantised; give another head")
    result = dict(weights)
    for name, weight in weights.items():
        if name.endswith(PROJECTIONS):
            scale = (weight.float().abs().amax(1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
            scaled = weight.float() / scale  # scale (O, 1)
            rounded = scaled if dtype == "fp8" else scaled.round()
            result |= {name: rounded.clamp(-largest, largest).to(kind), name + SCALE: scale}
    return result


def dequantized(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, quantised or not, with float32 in place of 8 bits and their scales."""
    result = dict(weights)
    for name in weights:
        if name + SCALE in weights:
            result[name] = result[name].float() * result.pop(name + SCALE).float()
    return result
