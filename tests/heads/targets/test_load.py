"""Opening of targets: with a peft adapter, from a GGUF file, and what is refused, each in one line."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel, PreTrainedTokenizerBase

from eval.measure.open_models import load_pair
from heads.registry import build_head
from heads.saved import save_head, target_record
from heads.targets.hub import repo_and_revision
from heads.targets.load import load_target, unused_weights
from heads.targets.target_files import load_end_ids, load_tokenizer
from tests.conftest import make_tiny_tokenizer
from tests.heads.targets.test_frozen_target import make_model
from tests.support.annotations import Log, Patch
from tests.support.native_mtp import change_config, change_weights
from tests.support.refusals import refused

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
    target = load_target(str(tiny_target_dir), adapter=str(adapter_dir))
    assert target.fingerprint != load_target(str(tiny_target_dir)).fingerprint
    assert target.merged_adapter == str(adapter_dir)
    base = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    merged = PeftModel.from_pretrained(base, adapter_dir).merge_and_unload()
    with torch.no_grad():
        assert torch.equal(target.model(TOKENS).logits, merged(TOKENS).logits)


def test_an_adapter_beside_weights_is_not_read_unasked(
    tiny_target_dir: Path, adapter_dir: Path, tmp_path: Path, caplog: Log
) -> None:
    """Engines read the weights alone."""
    both = shutil.copytree(tiny_target_dir, tmp_path / "both")
    shutil.copytree(adapter_dir, both, dirs_exist_ok=True)
    plain = load_target(str(tiny_target_dir))
    assert load_target(str(both)).fingerprint == plain.fingerprint
    assert "is not read" in caplog.text and f"target.adapter={both} merges" in caplog.text
    assert load_target(str(both), adapter=str(both)).fingerprint != plain.fingerprint
    (both / "model.safetensors").unlink()
    for folder in (both, adapter_dir):
        assert "and this adapter with target.adapter" in refused(load_target, str(folder))


def test_an_adapter_of_another_model_is_named(
    tiny_target_dir: Path, adapter_dir: Path, tmp_path: Path, caplog: Log
) -> None:
    other = tmp_path / "other"
    other.symlink_to(tiny_target_dir)
    load_target(str(other), adapter=str(adapter_dir))
    (line,) = [record.message for record in caplog.records if record.name == "draftsmith"]
    assert str(tiny_target_dir) in line and str(other) in line
    make_model("gpt2").save_pretrained(tmp_path / "gpt2")
    resized_adapter(tiny_target_dir, tmp_path / "more", ["embed_tokens", "lm_head"])
    for adapter in (adapter_dir, tmp_path / "more"):
        words = refused(load_target, str(tmp_path / "gpt2"), adapter=str(adapter))
        assert f"{adapter}: no adapter that can be merged into" in words
    (adapter_dir / "adapter_model.safetensors").unlink()
    words = refused(load_target, str(tiny_target_dir), adapter=str(adapter_dir))
    assert "found no adapter_model.safetensors" in words
    assert f"; {adapter_dir} holds one" in refused(load_target, str(tiny_target_dir), adapter=str(tmp_path))
    (adapter_dir / "adapter_model.bin").touch()
    assert "pickled ones" in refused(load_target, str(tiny_target_dir), adapter=str(adapter_dir))


def test_files_of_two_checkpoints_are_not_told_apart_by_chance(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Engines read the files that the index names, and transformers model.safetensors, where both are there."""
    both = shutil.copytree(tiny_target_dir, tmp_path / "both")
    names = dict.fromkeys(load_file(both / "model.safetensors"), "model-00001-of-00001.safetensors")
    (both / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert "engines read those" in refused(load_target, str(both))
    (both / "model.safetensors").rename(both / "model-00001-of-00001.safetensors")
    assert load_target(str(both)).fingerprint == load_target(str(tiny_target_dir)).fingerprint
    (both / "model-00001-of-00001.safetensors").unlink()
    assert "lacks 1 of the files" in refused(load_target, str(both))


def resized_adapter(
    base: Path, folder: Path, saved: list[str], settings: PeftConfig | None = None
) -> PreTrainedTokenizerBase:
    """Write an adapter that was trained with two tokens more than its base, with those tables of tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), load_tokenizer(str(base))
    tokenizer.add_tokens(["<|tool|>", "<|end|>"], special_tokens=True)
    tokenizer.chat_template = "{{ '<|tool|>' }}"
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    settings = settings or LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved)
    get_peft_model(model, settings).save_pretrained(str(folder), save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_an_adapter_brings_tokens_of_its_own(tiny_target_dir: Path, tmp_path: Path, caplog: Log) -> None:
    tokenizer = resized_adapter(tiny_target_dir, tmp_path / "more", ["embed_tokens", "lm_head"])
    how: dict[str, Any] = {"dtype": "float32", "device": torch.device("cpu"), "trust_remote_code": False}
    target, own = load_pair(str(tiny_target_dir), adapter=str(tmp_path / "more"), **how)
    assert own.get_vocab() == tokenizer.get_vocab() and own.chat_template == tokenizer.chat_template
    assert target.vocab_size == target.checkpoint_config.vocab_size == 130
    saved = load_file(tmp_path / "more/adapter_model.safetensors")
    assert torch.equal(target.lm_head_weight, saved["base_model.model.lm_head.weight"])
    said = " ".join(record.message for record in caplog.records if record.name == "draftsmith")
    assert "has 130 tokens, which replace the 128 of" in said and "brings a tokenizer and its chat template" in said
    resized_adapter(tiny_target_dir, tmp_path / "half", ["embed_tokens"])
    words = refused(load_target, str(tiny_target_dir), adapter=str(tmp_path / "half"))
    assert "model.embed_tokens has 130 rows there and 128 in" in words and "no lm_head of 130" in words
    single = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[128, 129])
    resized_adapter(tiny_target_dir, tmp_path / "single", [], single)
    words = refused(load_target, str(tiny_target_dir), adapter=str(tmp_path / "single"))
    assert "row of token 129 alone, and model.embed_tokens has 128 rows in" in words


def test_a_tokenizer_that_its_library_doubts_is_said(tmp_path: Path, caplog: Log) -> None:
    """transformers doubts Mistral's large tokenizers of before its version 5, and offers another pattern."""
    make_tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"<|r{n}|>": n for n in range(128, 100_200)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "transformers_version": "4.51.0"}))
    found = {}
    for fix in (None, False, True):
        caplog.clear()
        found[fix] = load_tokenizer(str(tmp_path), fix_mistral_regex=fix).tokenize("a\n b")
        assert ("target.fix_mistral_regex=true" in caplog.text) == (fix is None)
    assert found == {None: ["a", "ĊĠ", "b"], False: ["a", "ĊĠ", "b"], True: ["a", "Ċ", "Ġ", "b"]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_version": "4.51.0"}))
    assert "has no effect" in refused(load_tokenizer, str(tmp_path), fix_mistral_regex=True)


@pytest.mark.parametrize(
    "settings",
    [
        LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6]),
        TrainableTokensConfig(token_indices=[5, 6], target_modules=["embed_tokens"]),
        LoHaConfig(r=4, target_modules=["q_proj", "lm_head"]),
        LoKrConfig(r=4, target_modules=["q_proj", "lm_head"]),
    ],
    ids=lambda settings: type(settings).__name__,
)
def test_an_adapter_that_changes_rows_brings_no_tokens(
    settings: PeftConfig, tiny_target_dir: Path, tmp_path: Path
) -> None:
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_target_dir), settings)
    adapted.save_pretrained(str(tmp_path), save_embedding_layers=False)
    assert load_target(str(tiny_target_dir), adapter=str(tmp_path)).vocab_size == 128


GGUF_NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}

GGUF_KEYS = {
    **{name: name for name in ("vocab_size", "bos_token_id", "eos_token_id")},
    **{"block_count": "num_hidden_layers", "context_length": "max_position_embeddings"},
    **{"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size"},
    **{"head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads"},
    "layer_norm_rms_eps": "rms_norm_eps",
}


def write_gguf(folder: Path, path: Path) -> None:
    """Write a Llama of this folder as llama.cpp's converter does, in float32."""
    gguf = pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    config, tokenizer = model.config, load_tokenizer(str(folder))
    writer = gguf.GGUFWriter(path, "llama")
    for theirs, ours in GGUF_KEYS.items():
        getattr(writer, f"add_{theirs}")(getattr(config, ours))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.model.__getstate__())["merges"]
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    for name, tensor in model.state_dict().items():
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        if "attn_q." in name or "attn_k." in name:  # llama.cpp turns neighbouring pairs, not halves of a head
            heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(name, tensor.numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def test_a_gguf_file_holds_weights_and_tokenizer(tiny_target_dir: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    write_gguf(tiny_target_dir, tmp_path / "tiny.gguf")
    target = load_target(str(tmp_path), gguf_file="tiny.gguf", dtype=torch.float32)
    plain = load_target(str(tiny_target_dir), dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(target.model(TOKENS).logits, plain.model(TOKENS).logits)
    tokenizers = load_tokenizer(str(tmp_path), gguf_file="tiny.gguf"), load_tokenizer(str(tiny_target_dir))
    ours, theirs = (each("return the line", add_special_tokens=False).input_ids for each in tokenizers)
    assert ours == theirs and tokenizers[0].decode(ours) == "return the line"
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_target_dir / file, tmp_path)
    beside = load_tokenizer(str(tmp_path), gguf_file="tiny.gguf")
    for name in ("eos_token", "chat_template"):  # transformers 5.24 reads tokenizer.json alone, and drops these
        assert getattr(beside, name) == getattr(tokenizers[1], name) is not None
    assert "found no other.gguf" in refused(load_target, str(tmp_path), gguf_file="other.gguf")
    monkeypatch.setattr("heads.targets.target_files.find_spec", lambda name: None)
    assert "pip install -e '.[gguf]'" in refused(load_target, str(tmp_path), gguf_file="tiny.gguf")


def test_a_generation_config_that_cannot_be_fetched_is_not_an_absent_one(
    tiny_target_dir: Path, monkeypatch: Patch
) -> None:
    def cached_file(*_: object, **__: object) -> None:
        raise OSError("no route to the hub") from LocalEntryNotFoundError("generation_config.json")

    arguments = str(tiny_target_dir), load_tokenizer(str(tiny_target_dir))
    monkeypatch.setattr("heads.targets.target_files.cached_file", cached_file)
    monkeypatch.setattr("heads.targets.target_files.is_offline_mode", lambda: False)
    assert "no route to the hub" in refused(load_end_ids, *arguments)
    monkeypatch.setattr("heads.targets.target_files.is_offline_mode", lambda: True)
    assert load_end_ids(*arguments)


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


BERT = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "unknown family": (lambda folder: (folder / "config.json").write_text('{"model_type": "no-such"}'), "no-such"),
    "encoder": (lambda folder: BertModel(BERT).save_pretrained(folder), "BertModel"),
    "no mask": (lambda folder: make_model("bloom", n_layer=2, n_head=2).save_pretrained(folder), "4-D mask"),
    "a tensor is missing": (partial(change_weights, model__norm__weight=None), "model.norm.weight"),
    "another width": (partial(change_config, intermediate_size=28), "config.json describes"),
    "a package is missing": (partial(change_config, quantization_config=AWQ), "requires gptqmodel"),
    "pickled": (pickle_weights, "pickled weights (.bin) are not read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_target_is_refused_in_one_line(case: str, tiny_target_dir: Path, tmp_path: Path) -> None:
    damage, words = REFUSED[case]
    folder = shutil.copytree(tiny_target_dir, tmp_path / "model")
    damage(folder)
    text = refused(load_target, str(folder))
    assert str(folder) in text and words in text


def test_names_that_lead_nowhere(tiny_target_dir: Path, tmp_path: Path) -> None:
    assert "no such folder" in refused(load_target, str(tmp_path / "none"))
    assert "no/such-model: neither a folder here nor found on the Hub" in refused(load_target, "no/such-model")
    assert "x: neither a folder here nor" in refused(load_target, "x" * 300)
    (shutil.copytree(tiny_target_dir, tmp_path / "damaged") / "tokenizer.json").write_text("{")
    assert "no tokenizer" in refused(load_tokenizer, str(tmp_path / "damaged"))


def test_the_processors_chat_template_stands_before_the_tokenizers_as_in_vllm(
    tiny_target_dir: Path, tmp_path: Path, caplog: Log
) -> None:
    shutil.copytree(tiny_target_dir, tmp_path, dirs_exist_ok=True)
    own = load_tokenizer(str(tmp_path)).chat_template

    def template(**files: Any) -> Any:
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return load_tokenizer(str(tmp_path)).chat_template

    assert template(chat_template={"chat_template": "a"}) == own  # without a processor
    both = {"default": "a", "tool_use": own}
    assert template(processor_config={}) == both and "chat_template.json and its tok" in caplog.text
    assert template(processor_config={"chat_template": "b"}) == both | {"default": "b"}
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "processor_config.json").unlink()
    assert template() == "a"
    (tmp_path / "chat_template.json").write_text("a")
    assert "no chat_template.json that can be read" in refused(load_tokenizer, str(tmp_path))


def test_only_a_hub_id_is_cut_at_its_revision(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a@b").mkdir(parents=True)
    assert repo_and_revision("owner/name@refs/pr/3") == ("owner/name", "refs/pr/3")
    for whole in ("owner/name", "name@v1", "runs/a@b"):  # the last is a folder that is here
        assert repo_and_revision(whole) == (whole, None)


MAY_BE_THERE = [
    "mtp.fc.weight",
    "model.mtp_layers.0.input_proj.weight",
    "model.layers.4.eh_proj.weight",
    "model.layers.4.mlp.up_proj.weight",  # of the module that the one above makes of it
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "transformer.h.0.attn.masked_bias",
    "bert.embeddings.position_ids",
    "model.visual.blocks.0.attn.qkv.weight",
    "vision_tower.encoder.layers.30.mlp.fc1.weight",
    "multi_modal_projector.linear_1.weight",
]
MAKES_ANOTHER = [
    "model.layers.0.mlp.up_proj.weight_scale",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.self_attn.q_proj.lora_A.weight",
    "model.layers.3.self_attn.q_norm.weight",
    "model.layers.5.mlp.up_proj.weight",
    "v_head.summary.weight",
]


def test_weights_without_which_the_model_is_another() -> None:
    assert unused_weights([*MAY_BE_THERE, *MAKES_ANOTHER], 4) == MAKES_ANOTHER


def test_code_in_a_model_folder_does_not_run_unasked(tiny_target_dir: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = shutil.copytree(tiny_target_dir, tmp_path / "model")
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": [None, "evil.T"]}
    change_config(folder, model_type="homemade", auto_map=code)
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    text = refused(load_target, str(folder))
    assert "target.trust_remote_code=true" in text and "--trust-remote-code" in text
    (folder / "tokenizer.json").unlink()
    refused(load_tokenizer, str(folder))
    assert not ran.exists()


def test_code_that_the_user_lets_run_makes_every_tokenizer_of_the_target(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(tiny_target_dir, tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "Homemade"}
    path.write_text(json.dumps(config | {"auto_map": {"AutoTokenizer": [None, "homemade.Homemade"]}}))
    code = "from transformers import PreTrainedTokenizerFast\nclass Homemade(PreTrainedTokenizerFast):\n    pass\n"
    (folder / "homemade.py").write_text(code)
    assert "target.trust_remote_code=true" in refused(load_tokenizer, str(folder))
    target = load_target(str(folder), trust_remote_code=True)
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    assert build_head("dflash", {}, target, counts).config.mask_token_id < target.vocab_size
    draft = build_head("draft", {"path": str(folder)}, target, counts)
    save_head(draft, tmp_path / "head", target=target_record(target))
    assert (tmp_path / "head/tokenizer.json").is_file()
    assert "trust_remote_code" not in (tmp_path / "head/config.json").read_text()
