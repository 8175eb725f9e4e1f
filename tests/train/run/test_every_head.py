"""Every kind of head: trained, gone on with bit for bit, or refused beforehand."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eval.bench import parse_arguments
from eval.measure.open_models import open_target_of
from heads.core.errors import UserError
from heads.formats.engine_folder import why_unfit
from heads.methods.method_settings import METHODS
from heads.registry import build_head
from heads.saved import check_loaders, load_head
from heads.targets.quantization import weight_bytes
from heads.targets.target_files import load_tokenizer
from tests.conftest import make_tiny_tokenizer
from tests.support.annotations import Capture
from tests.support.native_mtp import write_native
from tests.support.runs import BLOCK, Settings, lines, measured_run, same, the_error, train_in, weights, write_recipe
from tests.support.small_targets import make_hybrid, small_heads
from train.entry import attempt

NARROW: dict[str, Any] = {"depth": 2, "intermediate_size": 32}
KINDS_OF = small_heads(
    BLOCK,
    eagle3=NARROW,
    mtp=NARROW | {"draft_vocab_size": 100},
    medusa={"tree_nodes": 8, "draft_vocab_size": 64},
    draft={"layers": [0, 7]},
)
HEADS = {METHODS[kind].entry: {"kind": kind, **settings} for kind, settings in KINDS_OF.items()}
HEADS["dflash"]["weights"] = "d_pace"


def of_kind(settings: Settings, entry: str) -> Settings:
    settings["head"] = dict(HEADS[entry])
    settings["train"] |= {"max_steps": 4, "tokens_per_step": 4 * 48, "log_every": 1}
    settings["eval"] |= {"tree": "head" if entry == "medusa" else "chain:3", "report": {"repeats": 1}}
    return settings


@pytest.mark.parametrize("entry", HEADS)
def test_a_run_goes_on_bit_for_bit_and_leaves_a_head(entry: str, settings: Settings, capsys: Capture) -> None:
    folder = train_in(of_kind(settings, entry))
    (file,) = (folder / "head").glob("*.safetensors")
    assert load_file(file).keys() == load_head(folder).to_checkpoint().keys()
    doubt = why_unfit(check_loaders(folder / "head")) or ""
    assert ("no engine serves it" in doubt) == (entry in ("mtp", "medusa"))
    first = weights(folder, 4)
    shutil.rmtree(folder / "checkpoints/step-4")  # so that the second run goes on from step 2
    train_in(settings)
    assert "resumed from" in capsys.readouterr().err
    assert same(weights(folder, 4), first)


LOST = "data.sources.0.path=no.jsonl"
REFUSED: list[tuple[str, str, str]] = [
    ("eagle", f"head.serve=[llama.cpp] & head.fc_norm=true & {LOST}", "llama.cpp b11549 refuses heads with fc_norm"),
    ("eagle", f"head.serve=[vllm,openvino] & head.norm_output=true & {LOST}", "norm_output: is not read, so another"),
    ("dflash", "head.mask_token_id=71", "head.mask_token_id: the data has the token 71, 'b'"),
    ("dflash", "head.block_size=60", "data.context_length: 48 tokens cannot hold a root and a draft of 59"),
    ("dflash", "eval.tree=chain:4", "tree chain:4: 4 levels, the head drafts 3 in a block of 4; ask for"),
    ("dflash", "eval.report.tree=[chain:4]", "tree chain:4: 4 levels, the head drafts 3 in a block"),
    ("medusa", "head.tree_nodes=0", "grow no static tree"),
    ("medusa", "train.save_dtype=float32 & target.dtype=bfloat16", "the dtype of its target, bfloat16; "),
    ("medusa", "eval.temperature=1 & eval.rule=block & eval.tree=static:2.1", "rule block judges chains, not the tree"),
    ("medusa", "eval.temperature=1 & eval.rule=ratio", "rule ratio: the tree 'head' is grown from ranks"),
    ("distill", "head.lora={modules: [q_proj, q_prj]}", "head.lora.modules: 'q_prj' fits no linear layer of the draft"),
    ("distill", "head.fresh={hidden_size: 16}", "head: a draft needs one of path"),
    ("distill", "features={kind: cache, folder: x}", "features.kind: head.layers copies layers of the target, got"),
    ("distill", "data.on_policy={every: 6, samples: 2}", "data.on_policy.every: expected less than train.max_steps"),
    ("distill", "data.on_policy={every: 2, samples: 2, temperature: 0, seed: 3}", "seed: has no effect at data.on_p"),
    ("eagle", "data.on_policy={every: 2, samples: 2}", "data.on_policy: is for draft models (head.kind draft), got"),
]


@pytest.mark.parametrize(("entry", "override", "fault"), REFUSED)
def test_what_cannot_be_trained_or_served_is_refused_before(
    entry: str, override: str, fault: str, settings: Settings, capsys: Capture
) -> None:
    assert attempt(entry, [str(write_recipe(of_kind(settings, entry))), *override.split(" & ")]) == 2
    assert fault in the_error(capsys)
    assert not list(Path(settings["output_dir"]).rglob("metrics.jsonl"))


HYBRID = pytest.param("hybrid", "fp32", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("family", "precision"), [("mimo", "bf16"), ("deepseek", "fp32"), ("qwen_fused", "fp32"), HYBRID]
)
def test_a_checkpoints_own_modules_are_fine_tuned(
    family: str, precision: str, settings: Settings, tmp_path: Path
) -> None:
    native = write_native(tmp_path / "native", family)
    make_tiny_tokenizer().save_pretrained(tmp_path / "native")
    settings["target"]["path"], settings["head"] = str(tmp_path / "native"), {"kind": "mtp", "native": True}
    settings["train"] |= {"max_steps": 2, "precision": precision, "lr": 1e-3}
    settings["eval"]["report"] = {"repeats": 1}
    saved = load_file(measured_run("mtp", settings)[0] / "head/model.safetensors")
    assert saved.keys() == native.keys()
    fixed = {name for name, value in native.items() if torch.equal(value, saved[name])}
    # No gradient reaches the choice of experts, nor those that no token chose.
    assert all("e_score_correction_bias" in name or ".experts." in name for name in fixed)
    assert all(saved[name].dtype == value.dtype for name, value in native.items())
    assert all((saved[name] - native[name]).abs().max() < 0.01 for name in native)


def test_a_head_trains_on_a_quantised_target(settings: Settings) -> None:
    """Its output is the quantised target's own, and whoever opens the head gets that target unless asked otherwise."""
    pytest.importorskip("torchao")
    of_kind(settings, "eagle")["target"]["quantize"] = "int8"
    folder, _ = measured_run("eagle", settings)
    opened = []
    for asked in ([], ["--quantize", "none"]):
        options = parse_arguments([str(folder), *asked])
        opened.append(open_target_of(options.heads[0], options)[0])
    assert [target.quantize for target in opened] == ["int8", None]
    assert weight_bytes(opened[0].layers) < 0.5 * weight_bytes(opened[1].layers)


@pytest.fixture
def hybrid_settings(settings: Settings, tmp_path: Path, tiny_target_dir: Path) -> Settings:
    model = make_hybrid("qwen3_next", vocab_size=129, eos_token_id=1, tie_word_embeddings=False).model
    with torch.no_grad():
        model.get_output_embeddings().weight[128] = 0  # the mask of blocks, which no text has
    model.save_pretrained(tmp_path / "hybrid")
    load_tokenizer(str(tiny_target_dir)).save_pretrained(tmp_path / "hybrid")
    settings["target"]["path"] = str(tmp_path / "hybrid")
    return settings


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["eagle", "dflash"])
def test_a_head_learns_on_a_hybrid_target_one_document_a_row(
    entry: str, hybrid_settings: Settings, capsys: Capture
) -> None:
    of_kind(hybrid_settings, entry)["data"]["regenerate"] = {"prompts": 16, "prompt_tokens": 6, "new_tokens": 40}
    hybrid_settings["head"] |= {"aux_layer_ids": [1, 2, 3]} | ({"mask_token_id": 128} if entry == "dflash" else {})
    hybrid_settings["train"] |= {"max_steps": 150, "tokens_per_step": None, "batch_size": 8, "checkpoint_every": 50}
    hybrid_settings["eval"]["max_new_tokens"] = 40  # drafts are held in bfloat16: a near-tie may fall the other way
    folder, _ = measured_run(entry, hybrid_settings)
    assert capsys.readouterr().err.count("one document a row") == 1
    estimates = [(line["tau"], line["tau_by_training_step"]) for line in lines(folder, "eval")]
    assert estimates and all(ours == pytest.approx(runtime, rel=0.05) for runtime, ours in estimates)


@pytest.mark.parametrize("change", [{"tree": "tree:3x2x6"}, {"report": {"tree": ["chain:2", "tree:3x2x6"]}}])
def test_trees_over_recurrent_layers_are_refused_before_training(
    change: Settings, hybrid_settings: Settings, capsys: Capture
) -> None:
    of_kind(hybrid_settings, "eagle")["head"]["aux_layer_ids"] = [1, 2, 3]
    hybrid_settings["eval"] |= change
    assert attempt("eagle", [str(write_recipe(hybrid_settings))]) == 2
    assert "every branch of the tree tree:3x2x6 would need its own; use a chain" in the_error(capsys)
    assert not (Path(hybrid_settings["output_dir"]) / "metrics.jsonl").is_file()


def test_a_draft_with_recurrent_layers_is_refused() -> None:
    target = make_hybrid("qwen3_5_text")
    with pytest.raises(UserError, match="head: a qwen3_5_text has recurrent layers"):
        build_head("draft", {"layers": [0, 2]}, target, torch.ones(target.vocab_size, dtype=torch.int64))
