#!/usr/bin/env bash
# CTranslate2 converts Gemma 2 and leaves out its soft caps and its sliding windows.
# Expected: the page "Transformers" of CTranslate2 names Gemma 2 among the families that it converts, so a converted model gives the logits of
#   transformers. The configuration of Gemma 2 has a cap on attention scores (50), one on logits (30) and a window in every other layer.
# Seen: the converter writes none of the three, without a word (it does for Gemma 3 and 4). Logits stand above their cap. A model whose caps
#   are null and whose prompt is within the window is converted right.
# Why it matters: the caps change p at every temperature but 0, so drafts are accepted at another rate than against the real target, and
#   sampled text is not the target's. The window changes each text beyond 4,096 tokens, greedy ones too.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q ctranslate2==4.8.5 transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()
print({name: version(name) for name in ("ctranslate2", "transformers", "torch")})
words = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["<pad>", "<eos>", "<bos>", "<unk>"]
tokenizer = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[], unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")
sizes = dict(vocab_size=len(words), hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, head_dim=16)
sizes |= dict(num_key_value_heads=2, query_pre_attn_scalar=16, pad_token_id=256, eos_token_id=257, bos_token_id=258)
prompt = [place * 37 % 256 for place in range(24)]
none = dict(attn_logit_softcapping=None, final_logit_softcapping=None, sliding_window=64)
cases = {"no cap, wide window": {}, "final cap 5": {"final_logit_softcapping": 5.0}}
cases |= {"attention cap 1": {"attn_logit_softcapping": 1.0}, "window of 6": {"sliding_window": 6}}
wrong = {}
for name, changed in cases.items():
    config = Gemma2Config(**sizes, **{**none, **changed})
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(0, 0.3 if weight.ndim > 1 else 0.1, generator=generator)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    TransformersConverter("model").convert("converted", force=True)
    with torch.no_grad():
        right = model(torch.tensor([prompt])).logits[0].numpy()
    engine = ctranslate2.Generator("converted", compute_type="float32")
    found = np.array(engine.forward_batch([prompt], return_log_probs=False))[0]
    apart = np.abs(found - right).max(axis=1)
    wrong[name] = [place for place in range(24) if apart[place] > 1e-2][:1]
    print(f"{name:20s} largest logit {right.max():6.2f} in transformers, {found.max():6.2f} here; differ from position {wrong[name]} on")
    if name == "final cap 5":
        assert right.max() <= 5 < found.max()
assert wrong == {"no cap, wide window": [], "final cap 5": [0], "attention cap 1": [1], "window of 6": [6]}, wrong
PYTHON
