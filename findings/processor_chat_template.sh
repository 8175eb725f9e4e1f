#!/usr/bin/env bash
# transformers: a processor and the tokenizer inside it render two prompts from one folder.
# Expected: processor.apply_chat_template and tokenizer.apply_chat_template of one folder give the same text (page "Multimodal chat templates":
#   the template is saved as chat_template.jinja; chat_template.json is the former file). A template that was changed and saved is what is loaded.
# Seen: where a folder has both files the processor takes the former one, and its own tokenizer and AutoTokenizer take the newer one, without a
#   word. save_pretrained writes chat_template.jinja and leaves chat_template.json, so that a changed template is lost at the next load.
# Why it matters: Gemma 3 and Qwen2.5-VL were published with chat_template.json. Features for a draft head are cached by the
#   tokenizer, and a server that renders with the processor asks the target with another prompt.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q transformers==5.24.0 pillow==13.0.0 jinja2==3.1.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import warnings
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

print({name: version(name) for name in ("transformers", "jinja2", "pillow")})
words = {chr(33 + place): place for place in range(94)} | {"<image>": 94, "<eos>": 95}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(words, [])), eos_token="<eos>")
first = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
second = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
chat = [{"role": "user", "content": "Hi"}]

LlavaProcessor(image_processor=CLIPImageProcessorPil(), tokenizer=tokenizer).save_pretrained("folder")
Path("folder/chat_template.json").write_text(json.dumps({"chat_template": first}))
processor = LlavaProcessor.from_pretrained("folder")
print("as published:", processor.apply_chat_template(chat))
assert processor.apply_chat_template(chat) == "[user]Hi"

processor.chat_template = second
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    processor.save_pretrained("folder")
    again = LlavaProcessor.from_pretrained("folder")
said = [str(warning.message) for warning in caught if "template" in str(warning.message)]
prompts = {
    "the processor that was saved": processor.apply_chat_template(chat),
    "the processor, loaded again": again.apply_chat_template(chat),
    "its own tokenizer": again.tokenizer.apply_chat_template(chat, tokenize=False),
    "AutoTokenizer": AutoTokenizer.from_pretrained("folder").apply_chat_template(chat, tokenize=False),
}
print("files:", sorted(path.name for path in Path("folder").glob("chat_template*")), "warnings:", said)
for who, prompt in prompts.items():
    print(f"{who}: {prompt}")
assert list(prompts.values()) == ["<user>Hi", "[user]Hi", "<user>Hi", "<user>Hi"] and not said
PYTHON
