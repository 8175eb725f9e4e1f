#!/usr/bin/env bash
# transformers loads a GGUF file without settings that stand in it.
# Expected: from_pretrained(folder, gguf_file=FILE) gives the model of that file (page "GGUF", which names Starcoder2 and Phi3; the source knows
#   Gemma 2 too). llama.cpp's converter writes "starcoder2.rope.freq_base", "phi3.attention.sliding_window", "gemma2.attn_logit_softcapping"
#   and "gemma2.final_logit_softcapping". Of other families transformers reads the base (Llama) and the window (Gemma 2).
# Seen: the tables of transformers lack these keys. The model gets the default of its class (base 10,000, no window, caps of 50 and 30), and a note
#   is written at level info, which is not shown. Logits are exactly those of the same weights with the default.
# Why it matters: StarCoder2 was published with bases of 100,000 and 1,000,000, Phi-3-mini-4k with a window of 2,047. A draft head that is trained on
#   such a quantised file, or a perplexity measured on it, is that of another model, and the loss is put down to the quantisation.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import gguf
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Phi3Config, PreTrainedModel, Starcoder2Config
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("transformers", "gguf", "torch")})
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
sizes |= dict(max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
prompt = torch.tensor([[3 + place * 37 % 253 for place in range(24)]])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(prompt).logits[0]


def write(model: PreTrainedModel, arch: gguf.MODEL_ARCH, epsilon: str, floats: dict, whole: dict) -> None:
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter("model.gguf", name)
    counts = {"context_length": 128, "embedding_length": 64, "feed_forward_length": 96, "block_count": 3, "vocab_size": 256}
    counts |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16} | whole
    for key, count in counts.items():
        writer.add_uint32(f"{name}.{key}", count)
    for key, value in {f"attention.{epsilon}": 1e-5, **floats}.items():
        writer.add_float32(f"{name}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {place}" for place in range(256)])
    for place, special in enumerate(("padding", "bos", "eos")):
        writer.add_uint32(f"tokenizer.ggml.{special}_token_id", place)
    names = gguf.get_tensor_name_map(arch, 3)
    for tensor_name, tensor in model.state_dict().items():
        # As llama.cpp's converter: Gemma's norms multiply by 1 + weight, and its file holds that sum.
        added = 1 if name == "gemma2" and "norm" in tensor_name else 0
        if tensor_name != "lm_head.weight" or not model.config.tie_word_embeddings:
            writer.add_tensor(names.get_name(tensor_name, try_suffixes=(".weight", ".bias")), tensor.numpy() + added)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(config: type, arch: str, epsilon: str, own: dict, default: dict, floats: dict, whole: dict) -> None:
    model = AutoModelForCausalLM.from_config(config(**sizes, **own), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        weight.data.normal_(1 if "norm" in name and "weight" in name else 0, 0.2, generator=generator)
    write(model, gguf.MODEL_ARCH[arch], epsilon, floats, whole)
    loaded = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", attn_implementation="eager", dtype=torch.float32)
    other = AutoModelForCausalLM.from_config(config(**sizes, **own | default), attn_implementation="eager")
    other.load_state_dict(model.state_dict())
    gap = float((logits(loaded) - logits(model)).abs().max())
    gap_default = float((logits(loaded) - logits(other)).abs().max())
    print(f"{arch} with {floats | whole}: loaded {gap:.5f} from the model that was written, {gap_default:.5f} from it with {default}")
    assert gap_default < 1e-3 and (gap > 0.1) == (own != own | default), (gap, gap_default)

def base(value: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


for value in (1e4, 1e5, 1e6):
    compare(Starcoder2Config, "STARCODER2", "layer_norm_epsilon", base(value), base(1e4), {"rope.freq_base": value}, {})
rms = "layer_norm_rms_epsilon"
compare(Phi3Config, "PHI3", rms, {"sliding_window": None}, {"sliding_window": None}, {}, {})
compare(Phi3Config, "PHI3", rms, {"sliding_window": 6}, {"sliding_window": None}, {}, {"attention.sliding_window": 6})
for caps in ((50.0, 30.0), (2.0, 30.0), (50.0, 5.0)):
    own = dict(zip(("attn_logit_softcapping", "final_logit_softcapping"), caps))
    default = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    compare(Gemma2Config, "GEMMA2", rms, {"head_dim": 16, "rms_norm_eps": 1e-5, **own}, default, own, {"attention.key_length": 16})
PYTHON
