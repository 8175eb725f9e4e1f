"""Fixtures shared by all tests, such as a tiny random target with a tokenizer, saved in a user's format."""

import fcntl
import logging
import os
import re
import signal
import sys

# Jobs in a shell's background ignore it, and tests and the programs that they start are interrupted by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Set before torch is imported: with more threads than free cores, OpenMP's barriers make small models much slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_TOKEN_PATH"] = os.devnull  # hides the user's token from all tests
# A processor without AVX-512 has it neither for torch nor for oneDNN; if only torch is limited on one with AMX, torch's
# attention in bfloat16 packs for AMX and fails.
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# Set before transformers imports torchao, which would print four lines of warnings.
if "torchao" not in sys.modules:
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
# Set before triton is imported: without a GPU, kernels run in its interpreter.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Distribute the test files of the command line's folders over two processes, if pytest-xdist is installed and has
    no options. A file stays in one process, since its tests share costly fixtures."""
    options = config.option
    is_one_of_them = "PYTEST_XDIST_WORKER" in os.environ  # a worker also calls this hook, and must not distribute
    if is_one_of_them or not config.pluginmanager.hasplugin("xdist"):
        return
    if options.numprocesses is not None or options.dist != "no":
        return
    if options.usepdb or options.collectonly or all(Path(name.partition("::")[0]).is_file() for name in config.args):
        return
    options.numprocesses, options.dist, options.loadscopereorder = 2, "loadfile", False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest file to the front, so that no process waits long for the other at the end."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")
    if not hasattr(Cache, "get_conv_state"):
        for item in items:
            if NEWER_TRANSFORMERS.search(item.nodeid):
                item.add_marker(pytest.mark.skip(reason="transformers before 5.21 cannot compute it"))


NEWER_TRANSFORMERS = re.compile(
    "qwen3_next|qwen3_5_text|bamba|nemotron_h_omni|no state between pieces"
    r"|(each_document.*|document_alone|under_a_mask)\[gemma2\]|attn_logit_softcapping"
)
"""Matches tests of recurrent layers, whose cache has another interface in transformers before 5.21, of a family that it
does not know, and of Gemma 2's soft cap on attention, which 5.17 does not compute."""


SPECIAL_TOKENS = ("<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of 128 tokens: 6 special tokens, ASCII text, and the most common pairs of letters."""
    characters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "ĉ"]  # byte-level names of space, newline, tab
    pairs = "Ġt Ġa Ġs Ġi Ġf Ġd Ġn er in on re th se or en at lf ĠĠ ĊĠ el de st Ġ= Ġc Ġr"
    merges = [(pair[0], pair[1]) for pair in pairs.split()]
    vocabulary = [*SPECIAL_TOKENS, *characters, *pairs.split()]
    vocabulary += [f"<|reserved{i}|>" for i in range(128 - len(vocabulary))]
    model = models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=False))
    more: dict[str, Any] = {"additional_special_tokens": [*SPECIAL_TOKENS[3:]], "clean_up_tokenization_spaces": False}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **more)
    wrapped.chat_template = CHAT_TEMPLATE
    assert len(wrapped) == 128, len(wrapped)
    return wrapped


@pytest.fixture(scope="session", autouse=True)
def fresh_data_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty data cache, so that no test reads data that an earlier version of the code has tokenised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_DATA_CACHE", str(tmp_path_factory.mktemp("data-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def little_to_copy() -> Iterator[None]:
    """To know the bandwidth, a measurement copies more than any cache holds, which takes a second: here a little."""
    from eval.measure import roofline

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(roofline.COPY_BYTES, "cpu", 1 << 20)
        yield


@pytest.fixture(scope="session", autouse=True)
def free_cores() -> Iterator[None]:
    """Each comparison looks for a while whether others use the cores, which the tests' other process does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.measure.compare.busy_cores", lambda device: None)
        yield


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without charts, which take as long as a small measurement."""
    monkeypatch.setattr("eval.pages.charts.head_charts", lambda *_: [])
    monkeypatch.setattr("eval.pages.training_charts.training_charts", lambda *_: [])


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """A function (name, make) that returns a folder made by whichever of the tests' processes needs it first."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def get(name: str, make: Callable[[Path], None]) -> Path:
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (base / name).is_dir():
                (base / f"{name}.part").mkdir()
                make(base / f"{name}.part")
                (base / f"{name}.part").rename(base / name)
        return base / name

    return get


@pytest.fixture(scope="session")
def tiny_target_dir(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder of a random 8-layer Llama: hidden 32, 4 heads over 2 key-value heads, 128 tokens, context 512."""

    def make(folder: Path) -> None:
        config = LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0,
            eos_token_id=1, initializer_range=0.2,  # wide, so that logits differ and greedy text varies
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(folder)
        make_tiny_tokenizer().save_pretrained(folder)

    return once("tiny-target", make)


TEXT = "the sea is near the trees and the stone is on the sand; there are ten birds in the den. "


def small_recipe(folder: Path, target: Path) -> dict[str, Any]:
    """Write a text file and prompts to a folder, and return the settings of a run on them, which takes a second."""
    (folder / "data.jsonl").write_text("".join(f'{{"text": "{TEXT[n:]}{TEXT[:n]}"}}\n' for n in range(0, 80, 5)))
    (folder / "prompts.jsonl").write_text('{"text": "the sea is near"}\n{"text": "there are ten"}\n')
    return {
        "output_dir": str(folder / "run"),
        "target": {"path": str(target)},
        "head": {"kind": "medusa", "depth": 2, "tree_nodes": 0},
        "data": {"sources": [{"kind": "text", "path": str(folder / "data.jsonl")}], "context_length": 48},
        "train": dict(max_steps=6, batch_size=2, lr=0.01, precision="fp32", log_every=2, checkpoint_every=2),
        "eval": {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 8, "tree": "chain:2"},
    }


@pytest.fixture(scope="session")
def tiny_run(once: Callable[[str, Callable[[Path], None]], Path], tiny_target_dir: Path) -> Path:
    """A folder with `recipe.yaml`, its data, and its finished run in `run`, an EAGLE-3 head. Not to be changed."""

    def make(folder: Path) -> None:
        from tests.support.runs import forget_accelerator  # imports all that trains, which takes seconds
        from train.entry import attempt

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            recipe = small_recipe(Path(), tiny_target_dir)
            recipe["head"] = {"kind": "eagle3", "depth": 2, "intermediate_size": 32}
            recipe["train"] |= {"max_steps": 2, "log_every": 1, "checkpoint_every": 1}
            recipe["eval"]["report"] = {"repeats": 1}
            Path("recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
            forget_accelerator()
            assert attempt("eagle", ["recipe.yaml"]) == 0
            forget_accelerator()

    return once("tiny-run", make)
