#!/usr/bin/env bash
# transformers: with prompt lookup, text goes on behind a stop string.
# Expected: generate ends once the text holds a stop string ("stop_strings", class StopStringCriteria). Prompt lookup gives the text of the target
#   alone (page "Generation strategies"), and an end token among accepted drafts does end it.
# Seen: a round emits several tokens, and only the end of the last one is compared. A stop string that ends before it is passed over, and the text
#   goes on up to the limit of new tokens, or to the next place where a round happens to end there. Nothing is said. With an assistant model, stop
#   strings raise an error, though the tokenizer was given.
# Why it matters: an answer is several times as long, the more so the better the drafts are, and a program that reads up to the stop string (of a tool
#   call, of a few-shot prompt) waits for text that it does not want.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0
"$work/venv/bin/pip" install -q transformers==5.24.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from copy import deepcopy
from importlib.metadata import version

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print({name: version(name) for name in ("transformers", "tokenizers", "torch")})
letters = [chr(48 + number) for number in range(64)]
plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
plain.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
settings = {"max_new_tokens": 48, "do_sample": False}
lookup = {"prompt_lookup_num_tokens": 6}
stops, passed = 0, 0
for seed in range(6):
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.1, generator=generator)
    prompt = torch.randint(64, (1, 12), generator=generator)
    prompt = model.generate(prompt, **settings)  # ends in a loop, which goes on below
    whole = model.generate(prompt, **settings)
    assert torch.equal(whole, model.generate(prompt, **settings, **lookup))
    text = tokenizer.decode(whole[0, prompt.shape[1] :])
    for stop in sorted(set(text)):
        until = text.index(stop) + 1
        alone, drafted = (
            model.generate(prompt, stop_strings=[stop], tokenizer=tokenizer, **settings, **more).shape[1] - prompt.shape[1]
            for more in ({}, lookup)
        )
        assert alone == until <= drafted, (seed, stop)
        stops += 1
        passed += drafted > until
        if drafted > until:
            print(f"seed {seed}, stop string {stop!r} after {until} tokens: alone {alone}, with prompt lookup {drafted}")
try:
    model.generate(prompt, stop_strings=[stop], tokenizer=tokenizer, assistant_model=deepcopy(model), **settings)
except ValueError as error:
    assert "could not locate a tokenizer" in str(error), error
    print("with an assistant model: ValueError, no tokenizer was given")
else:
    raise AssertionError("an assistant model takes stop strings")
print(f"{passed} of {stops} stop strings were passed over")
assert passed > 5
PYTHON
