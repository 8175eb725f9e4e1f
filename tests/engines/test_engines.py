"""Whole engines beside this runtime: the same texts, rounds and accepted draft tokens, and what makes them differ."""

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval import parity
from eval.servers.gguf_conversion import check_gguf, convert
from heads.saved import load_head, save_head, target_record
from heads.targets.load import load_target
from scripts import publish
from tests.engines.engine_record import DRAFT, EAGLE3, SMALL, VARIABLE, add_row, need, new_head
from tests.engines.vllm_process import TARGET
from tests.support.annotations import Capture, Once
from tests.support.chats import talk, write_chats
from tests.support.refusals import refused

pytestmark = pytest.mark.engine
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": EAGLE3,
    "eagle3, norm_output": {"norm_output": True, "intermediate_size": 384},
    "dflash": SMALL | {"block_size": 6},
    "dspark": SMALL | {"block_size": 5, "markov_rank": 64},
    "dflash2": SMALL | {"block_size": 6, "selector_top_k": 13, "selector_rank": 64},
    "draft": DRAFT,
}


@pytest.fixture(scope="module")
def heads(once: Once) -> Path:
    def make(folder: Path) -> None:
        target = load_target(str(TARGET), dtype=torch.float32)
        for name, settings in HEADS.items():
            head = new_head(name.partition(",")[0], target, settings)
            save_head(head, folder / name, target=target_record(target), dtype=torch.float32)

    return once("engine-heads", make)


def answer(heads: Path, name: str, engine: str, out: Path, *options: str) -> str:
    """Return the last line of a comparison, whose exit status says whether all is equal."""
    need(engine)
    words = [str(heads / name), "--target", str(TARGET), "--engine", engine, "--out", str(out), *options]
    status = parity.main([*words, "--num-prompts", "4", "--max-new-tokens", "32"])
    record = json.loads((out / "parity.json").read_text())
    assert (status == 0) is record["equal"] and (out / "parity.md").is_file()
    return str(record["answer"])


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("llama.cpp", name) for name in HEADS if "," not in name),
        *(("openvino", "eagle3"), ("openvino", "dflash"), ("mlx", "draft"), ("vllm", "eagle3"), ("vllm", "draft")),
    ],
)
def test_an_engine_writes_our_texts_and_accepts_our_drafts(engine: str, name: str, heads: Path, tmp_path: Path) -> None:
    assert re.match(r"the head: (the same texts, )?tau 1\.[01]", answer(heads, name, engine, tmp_path))
    record = json.loads((tmp_path / "parity.json").read_text())
    counted = [line for line in record["lines"] if line.startswith("here: ")]
    words = " ".join(record["command"]).replace(f"{heads}/", "").replace(str(TARGET), "quickstart")
    equal = [request["texts_equal"] for request in record["requests"]]
    row = {
        **{"draft": record["kind"], "engine": record["engine"], "command": words.partition(" --out")[0]},
        **{"texts_equal": sum(equal), "texts": len(equal)},
        **dict(zip(("here", "there"), re.findall(r"(?:here|engine): ([^;]+)", counted[0]), strict=True)),
    }
    how = f"{VARIABLE}=FOLDER pytest -m engine tests/engines/test_engines.py"
    add_row("parity", row, {"target": {"name": "quickstart"}, "command": how})


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("eagle3, norm_output", ["--prompts", "lines.jsonl"], "the conversion: norm_output was dropped"),
        ("eagle3", ["--engine-cache", "q4_0"], "its KV cache is in 4 bits"),
        ("eagle3", ["--engine-cache", "q8_0"], "its KV cache is in 8 bits"),
        ("eagle3", ["--engine-target", "q8_0"], "its target's weights are Q8_0"),
    ],
)
def test_what_makes_llama_cpp_differ_is_named(name: str, options: Any, why: str, heads: Path, tmp_path: Path) -> None:
    need("llama.cpp")
    if options[:1] == ["--engine-target"]:
        file = tmp_path / "target.gguf"
        convert(str(TARGET), file, dtype=options[1], log=tmp_path / "log")
        options = ["--engine-target", str(file)]
    if options[:1] == ["--prompts"]:  # the second draft token is right where lines repeat, and depends on the norm
        prompts = tmp_path / options[1]
        lines = ["self.x = x\nself.y = y\n" * 5, "for i in range(10):\n    print(i)\n" * 4]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in lines))
        options = ["--prompts", str(prompts)]
    assert why in answer(heads, name, "llama.cpp", tmp_path / "out", *options)


def make_known(folder: Path, start: str = "") -> None:
    """Write a small random Llama, of whose tokenizer llama.cpp's converter knows the form, with an EAGLE-3 head. Some
    of its tokens are parts of characters. `start`: what its template writes before the BOS token."""
    letters = ["\u2581", *string.ascii_letters, *string.digits, *"[]().,:"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    model = models.BPE({token: n for n, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", letters[0])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(letters[0], " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    template = start + "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}"
    names: Any = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, add_bos_token=True, add_prefix_space=False, **names
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    target = load_target(str(folder), dtype=torch.float32)
    save_head(new_head("eagle3", target, {}), folder / "head", target=target_record(target), dtype=torch.float32)


def test_a_head_is_published_as_a_gguf_file_too(tmp_path: Path, capsys: Capture) -> None:
    need("llama.cpp")
    make_known(tmp_path)
    words = [str(tmp_path / "head"), "ann/a-head", "--gguf", "--unmeasured", "--dry-run"]
    assert publish.main(words) == 0
    assert "bytes  eagle3-a-head.gguf" in capsys.readouterr().out


def test_a_bos_token_that_llama_cpp_puts_before_a_chat_is_named(tmp_path: Path) -> None:
    need("llama.cpp")
    make_known(tmp_path, start="{{ ' ' }}")
    write_chats(tmp_path / "chats.jsonl", ({"messages": talk(text)} for text in ("abc", "x1 [y]")))
    words = ["--target", str(tmp_path), "--engine", "llama.cpp", "--prompts", str(tmp_path / "chats.jsonl")]
    parity.main([str(tmp_path / "head"), *words, "--max-new-tokens", "24", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "parity.json").read_text())
    assert "the template: the server makes other ids of 2 of 2 prompts: 1 BOS at their start" in record["answer"]
    assert any("without a draft: 2 of 2 texts are this runtime's" in line for line in record["lines"])


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_a_gguf_file_is_read_back_whole(dtype: str, heads: Path, tmp_path: Path) -> None:
    need("llama.cpp")
    head: Any = load_head(heads / "eagle3")
    file = tmp_path / "eagle3-head.gguf"
    made: dict[str, Any] = {"target": str(TARGET), "dtype": dtype, "log": tmp_path / "log"}
    assert not convert(str(heads / "eagle3"), file, **made)  # an unknown tokenizer
    check_gguf(file, head, "eagle3")
    with torch.no_grad():
        head.norm.weight[3] += 1
        head.midlayer.mlp.up_proj.weight[5, 7] += 1
    changed = "dropped or changed midlayer.mlp.up_proj.weight, norm.weight; serve"
    assert changed in refused(check_gguf, file, head, "eagle3")
    head.aux_layer_ids = (1, 2, 3)
    assert "target_layers: the converter wrote [2, 10, 17]" in refused(check_gguf, file, head, "eagle3")
    fault = refused(convert, str(heads / "eagle3"), file, log=tmp_path / "log")
    assert "llama.cpp's converter refuses it" in fault and "--target-model-dir" in fault
