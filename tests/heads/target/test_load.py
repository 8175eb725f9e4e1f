"""Targets with a peft adapter, and targets in a GGUF file: after loading they are as any other."""

import json
import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from heads.target.load import load_target, load_tokenizer
from tests.heads.target.test_model import make_model
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # caused by peft

TOKENS = torch.randint(3, 120, (1, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def adapter_dir(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """A LoRA adapter of the tiny target, whose matrices are all random."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def test_an_adapter_is_merged_into_the_weights(tiny_target_dir: Path, adapter_dir: Path) -> None:
    plain = load_target(str(tiny_target_dir))
    target = load_target(str(tiny_target_dir), adapter=str(adapter_dir))
    assert target.fingerprint != plain.fingerprint and target.merged_adapter == str(adapter_dir)
    base = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    merged = PeftModel.from_pretrained(base, adapter_dir).merge_and_unload()
    with torch.no_grad():
        assert torch.equal(target.model(TOKENS).logits, merged(TOKENS).logits)
        assert not torch.allclose(target.model(TOKENS).logits, plain.model(TOKENS).logits, atol=0.1)


def test_an_adapter_of_another_model_is_named(
    tiny_target_dir: Path, adapter_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.symlink_to(tiny_target_dir)
    with caplog.at_level(logging.WARNING, "draftsmith"):
        load_target(str(other), adapter=str(adapter_dir))
    (line,) = [record.message for record in caplog.records if record.name == "draftsmith"]
    assert str(tiny_target_dir) in line and str(other) in line
    make_model("gpt2").save_pretrained(tmp_path / "gpt2")
    assert str(adapter_dir) in refused(load_target, str(tmp_path / "gpt2"), adapter=str(adapter_dir))
    (adapter_dir / "adapter_model.safetensors").unlink()
    words = refused(load_target, str(tiny_target_dir), adapter=str(adapter_dir))
    assert "found no adapter_model.safetensors" in words


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(folder: Path, path: Path) -> None:
    """Write a Llama of this folder as llama.cpp's converter does, in float32."""
    gguf = pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    config, tokenizer = model.config, load_tokenizer(str(folder))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.model.__getstate__())["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, tensor in model.state_dict().items():
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        if "attn_q." in name or "attn_k." in name:  # llama.cpp turns neighbouring pairs, not halves of a head
            heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_holds_weights_and_tokenizer(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tiny_target_dir, tmp_path / "tiny.gguf")
    target = load_target(str(tmp_path), gguf_file="tiny.gguf", dtype=torch.float32)
    plain = load_target(str(tiny_target_dir), dtype=torch.float32)
    ours, theirs = target.model.state_dict(), plain.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with torch.no_grad():
        assert torch.equal(target.model(TOKENS).logits, plain.model(TOKENS).logits)
    tokenizers = load_tokenizer(str(tmp_path), gguf_file="tiny.gguf"), load_tokenizer(str(tiny_target_dir))
    ours, theirs = (each("return the line", add_special_tokens=False).input_ids for each in tokenizers)
    assert ours == theirs and tokenizers[0].decode(ours) == "return the line"
    assert "found no other.gguf" in refused(load_target, str(tmp_path), gguf_file="other.gguf")
    monkeypatch.setattr("heads.target.load.find_spec", lambda name: None)
    assert "pip install -e '.[gguf]'" in refused(load_target, str(tmp_path), gguf_file="tiny.gguf")
