#!/usr/bin/env bash
# llama.cpp's server: /props of a server that drafts says "speculative.types": "none", and no answer says how it drafts.
# Expected: the kind of its drafts (draft-simple here), as each answer's `generation_settings` name it, or no field.
# Seen: "none" in /props, while `timings` of an answer count drafted tokens. The length of a draft (--spec-draft-n-max) and the probability at which it
#   ends (--spec-draft-p-min) stand neither in /props nor in an answer.
# Why it matters: a dashboard or a benchmark that reads /props takes a speculative server for a plain one; and two servers that draft differently look
#   alike, so a low acceptance is looked for in the draft model.
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
params.endpoint_slots = True
params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
params.speculative.draft.mparams.path = "model.gguf"  # the model drafts for itself: every draft token is right
params.speculative.draft.n_max = 4
params.speculative.draft.p_min = 0.25
server = xllamacpp.Server(params)


def ask(path, **body):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


answer = ask("/completion", prompt=[1, 270, 280, 290], n_predict=24, temperature=0, ignore_eos=True)
drafted = {name: value for name, value in answer["timings"].items() if name.startswith("draft")}
props = ask("/props")
defaults = props["default_generation_settings"]["params"]
said = {
    "/props": {name: value for name, value in defaults.items() if "spec" in name},
    "generation_settings of the answer": {n: v for n, v in answer["generation_settings"].items() if "spec" in n},
}
print("timings:", drafted)
for place, found in said.items():
    print(place, found)
assert drafted["draft_n"] > 0
assert [*said.values()] == [{"speculative.types": "none"}, {"speculative.types": "draft-simple"}]
whole = json.dumps([props, answer["generation_settings"]])
assert "n_max" not in whole and "p_min" not in whole
print("as described")
os._exit(0)
PYTHON
"$work/venv/bin/python" find.py 2>log || { tail -n 20 log; exit 1; }
