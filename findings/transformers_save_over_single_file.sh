#!/usr/bin/env bash
# transformers: a model saved in shards over an older single file is not the one that is loaded.
# Expected: save_pretrained, then from_pretrained of the same folder, gives the model that was saved. save_pretrained removes the weights of a
#   former save from the folder ("Clean the folder from a previous save", says its source).
# Seen: it removes former shards, but neither a former model.safetensors nor a former index. from_pretrained prefers model.safetensors and says
#   nothing: after a save in shards it returns the OLD weights. After a save in one file, the old index stays and names files that are gone.
# Why it matters: a target that is tuned or merged again, in a larger dtype or with another max_shard_size, stays the old one for a draft head's
#   training, while a program that goes by the index runs the new one. The head then fits a model that nobody serves.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("transformers", "safetensors", "torch")})
config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
old = LlamaForCausalLM(config)
new = LlamaForCausalLM(config)


def head_by_index(folder: str) -> torch.Tensor:
    names = json.loads(Path(folder, "model.safetensors.index.json").read_text())["weight_map"]
    return load_file(f"{folder}/{names['lm_head.weight']}")["lm_head.weight"]


old.save_pretrained("model")
new.save_pretrained("model", max_shard_size="20KB")
files = sorted(path.name for path in Path("model").glob("*.safetensors*"))
loaded = AutoModelForCausalLM.from_pretrained("model").lm_head.weight
is_old = torch.equal(loaded, old.lm_head.weight)
index_is_new = torch.equal(head_by_index("model"), new.lm_head.weight)
print(f"one file, then shards: {files}")
print(f"  from_pretrained gives the {'old' if is_old else 'new'} weights, the index names the {'new' if index_is_new else 'old'} ones")
assert is_old and index_is_new and not torch.equal(loaded, new.lm_head.weight)

old.save_pretrained("again", max_shard_size="20KB")
new.save_pretrained("again")
files = sorted(path.name for path in Path("again").glob("*.safetensors*"))
print(f"shards, then one file: {files}")
named = set(json.loads(Path("again/model.safetensors.index.json").read_text())["weight_map"].values())
print(f"  the index names {len(named)} files, of which {len(named & set(files))} are there")
assert files == ["model.safetensors", "model.safetensors.index.json"] and not named & set(files)
PYTHON
