#!/usr/bin/env bash
# torchao leaves layers unquantized, without a word, whose width is no multiple of the group size.
# Expected: quantize_(model, Int4WeightOnlyConfig()) quantizes every linear layer, or says which it cannot. Its page names group sizes, but no
#   condition on the layer. IntxWeightOnlyConfig with groups of the same size raises an error at the same layer.
# Seen: a layer of 576 or 960 inputs (SmolLM2-135M, -360M) keeps its 16 bits with the default groups of 128: the handler writes a line at level
#   info, which is not shown, and returns the weight. No layer of such a model is changed, and the call succeeds.
# Why it matters: one measures "4 bits cost the draft head nothing", and the reason is that nothing was quantized. Where only fc or down_proj has
#   a width that divides, a part of the model is in 4 bits, and sizes and speeds are off without an explanation.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q torchao==0.18.0
cd "$work"
"$work/venv/bin/python" - 2>errors <<'PYTHON' || { cat errors; exit 1; }
import warnings
from importlib.metadata import version

import torch
from torchao.quantization import Int4WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup

print({name: version(name) for name in ("torchao", "torch")})


def layer(inputs: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(inputs, 64, bias=False)).to(torch.bfloat16)


for inputs in (576, 960):
    model = layer(inputs)
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_(model, Int4WeightOnlyConfig())
    after = model[0].weight.data
    same = type(after) is torch.Tensor and after.dtype == torch.bfloat16 and torch.equal(after, before)
    said = [str(warning.message) for warning in caught if "group" in str(warning.message)]
    print(f"{inputs} inputs, Int4WeightOnlyConfig(): {after.dtype}, unchanged: {same}, warnings about groups: {said}")
    assert same and not said
    try:
        quantize_(layer(inputs), IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128)))
        raise SystemExit("IntxWeightOnlyConfig took the layer")
    except AssertionError as error:
        print(f"{inputs} inputs, IntxWeightOnlyConfig(PerGroup(128)): error: {error}")
model = layer(1024)
quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128)))
print(f"1024 inputs, IntxWeightOnlyConfig(PerGroup(128)): {type(model[0].weight).__name__}")
assert type(model[0].weight).__name__ == "IntxUnpackedToInt8Tensor"
PYTHON
if grep -i "skipping" errors; then exit 1; fi
