#!/usr/bin/env bash
# llama.cpp's server: a reply's probabilities leave out tokens after which a character is unfinished, and those after move up.
# Expected: with n_probs (and with OpenAI's logprobs), one entry for each generated token, as the server's README and OpenAI's protocol say.
# Seen: a token that begins a UTF-8 character and does not end it has no entry, in /completion as in /v1/completions. Nothing says so: usage and
#   `tokens` count it. Entry i is then not token i's. A reply of such tokens alone has no list.
# Why it matters: tokens of bytes are common in Chinese, emoji and code. Whoever adds up log-probabilities, distils from them or compares two runs token
#   by token pairs the wrong numbers, or finds a text likelier than it is.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cd "$work"
cat >find.py <<'PYTHON'
import json
import os
import urllib.request
from importlib.metadata import version

import numpy
import xllamacpp
from gguf import GGUFWriter, TokenType

print({name: version(name) for name in ("xllamacpp", "gguf")})
width, layers, heads = 64, 2, 2
tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(f"w{n}" for n in range(61))]
kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 61]
writer = GGUFWriter("model.gguf", "llama")
writer.add_context_length(256)
writer.add_embedding_length(width)
writer.add_block_count(layers)
writer.add_feed_forward_length(2 * width)
writer.add_head_count(heads)
writer.add_head_count_kv(heads)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(width // heads)
writer.add_vocab_size(len(tokens))
writer.add_tokenizer_model("llama")
writer.add_token_list(tokens)
writer.add_token_scores([0.0] * len(tokens))
writer.add_token_types(kinds)
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
draw = numpy.random.default_rng(0)


def add(name, *shape):
    writer.add_tensor(name, draw.normal(0, 0.3, shape).astype("float32"))


add("token_embd.weight", len(tokens), width)
add("output.weight", len(tokens), width)
writer.add_tensor("output_norm.weight", numpy.ones(width, "float32"))
for layer in range(layers):
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.{layer}.{name}.weight", numpy.ones(width, "float32"))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.{layer}.{name}.weight", width, width)
    for name in ("ffn_gate", "ffn_up"):
        add(f"blk.{layer}.{name}.weight", 2 * width, width)
    add(f"blk.{layer}.ffn_down.weight", width, 2 * width)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

params = xllamacpp.CommonParams()
params.model.path = "model.gguf"
params.n_ctx = 256
params.n_parallel = 1
server = xllamacpp.Server(params)


def ask(path, **body):
    request = urllib.request.Request(
        server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


prompt, count = [1, 270, 280, 290], 24
own = ask("/completion", prompt=prompt, n_predict=count, temperature=0, n_probs=1, return_tokens=True, ignore_eos=True)
entries = [entry["id"] for entry in own["completion_probabilities"]]
openai = ask("/v1/completions", prompt=prompt, max_tokens=count, temperature=0, logprobs=1, ignore_eos=True)
listed = openai["choices"][0]["logprobs"]["content"]
print("tokens", own["tokens"])
print("entries", entries)
print("/completion:", len(own["tokens"]), "tokens,", len(entries), "entries")
print("/v1/completions:", openai["usage"]["completion_tokens"], "tokens,", len(listed), "entries")
shifted = next(place for place, pair in enumerate(zip(own["tokens"], entries)) if pair[0] != pair[1])
print("entry", shifted, "is of token", entries[shifted], "and stands where token", own["tokens"][shifted], "was generated")
assert len(own["tokens"]) == openai["usage"]["completion_tokens"] == count
assert 0 < len(entries) < count and 0 < len(listed) < count
print("as described")
os._exit(0)
PYTHON
"$work/venv/bin/python" find.py 2>log || { tail -n 20 log; exit 1; }
