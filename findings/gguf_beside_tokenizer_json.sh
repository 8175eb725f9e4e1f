#!/usr/bin/env bash
# transformers: a GGUF file's tokenizer loses its end token and chat template where tokenizer.json lies in the same folder.
# Expected: AutoTokenizer.from_pretrained(folder, gguf_file=FILE) gives the tokenizer of that GGUF file (page "GGUF"), or, where the folder has
#   tokenizer files of its own, the tokenizer that they make without the argument. Both have an end token and a chat template here.
# Seen: tokenizer.json alone is read. tokenizer_config.json, chat_template.jinja and the GGUF file's own entries are all dropped without a word:
#   no end token, no special tokens, no template. Without tokenizer.json, or without the argument, all three are there.
# Why it matters: repositories that hold a quantised file beside the original's files are common. A trainer that appends the tokenizer's end token
#   appends none, a server that stops at it does not stop, and chats cannot be rendered.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0 gguf==0.19.0 jinja2==3.1.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import shutil
from importlib.metadata import version
from pathlib import Path

from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

print({name: version(name) for name in ("transformers", "gguf", "tokenizers")})
letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Hi"]
ends = ["<|user|>", "<|end|>"]
raw = Tokenizer(models.BPE({token: place for place, token in enumerate(letters)}, [("H", "i")]))
raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ends])
template = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
saved = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=ends[0], eos_token=ends[1], chat_template=template)

saved.save_pretrained("both")
LlamaConfig(vocab_size=len(saved)).save_pretrained("both")
writer = GGUFWriter("both/model.gguf", "llama")
writer.add_context_length(64)
writer.add_embedding_length(32)
writer.add_block_count(1)
writer.add_feed_forward_length(64)
writer.add_head_count(4)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_vocab_size(len(saved))
writer.add_tokenizer_model("gpt2")
writer.add_token_list([*letters, *ends])
writer.add_token_types([TokenType.NORMAL] * len(letters) + [TokenType.CONTROL] * len(ends))
writer.add_token_merges(["H i"])
writer.add_bos_token_id(len(letters))
writer.add_eos_token_id(len(letters) + 1)
writer.add_chat_template(template)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
Path("alone").mkdir()
shutil.copy("both/model.gguf", "alone")

seen = {}
for folder, how in (("alone", {"gguf_file": "model.gguf"}), ("both", {}), ("both", {"gguf_file": "model.gguf"})):
    tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    seen[folder, bool(how)] = tokenizer.eos_token, tokenizer.chat_template == template
    print(f"{folder}, gguf_file {how.get('gguf_file')}: end token {tokenizer.eos_token}, template "
          f"{tokenizer.chat_template == template}, special tokens {tokenizer.all_special_tokens}")
assert seen["alone", True] == seen["both", False] == ("<|end|>", True)
assert seen["both", True] == (None, False)
PYTHON
