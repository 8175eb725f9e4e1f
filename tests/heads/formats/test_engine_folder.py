"""Saved heads are what engines load, and what an engine would read otherwise is named."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.core.engines import ENGINES, LLAMACPP, LOCAL_ENGINES, MLX, OPENVINO, SGLANG, VLLM
from heads.core.serve_commands import Setting
from heads.core.tree import parse_shape
from heads.formats.eagle3 import EAGLE
from heads.formats.engine_folder import Verdict, behind_lookup, why_unfit
from heads.formats.medusa import MEDUSA, OLD_VLLM
from heads.formats.mtp import mtp_engine_config
from heads.published import read_published
from heads.saved import check_loaders, read_config
from heads.targets.frozen_target import FrozenTarget
from heads.targets.load import load_target
from tests.heads.conftest import save_new
from tests.support.native_mtp import V, change_config, change_weights, make_multimodal, write_native
from tests.support.refusals import refused
from tests.support.small_heads import BLOCK_HEADS
from tests.support.small_targets import make_target

QUARTER = {"rope_type": "default", "partial_rotary_factor": 0.25}
Settings = dict[str, Any]
Saved = Callable[..., Path]
BLOCKS: Settings = {"block_size": 5, "num_layers": 2}


def said_in(folder: Path) -> Settings:
    config: Settings = json.loads((folder / "config.json").read_text())
    return config


def verdicts(folder: Path, **changes: Any) -> dict[str, Verdict]:
    """What each reader, but for engines for one machine without its method, makes of a folder, or of the same head for
    a target with other values in its record."""
    if changes:
        record = read_config(folder)
        change_config(folder, draftsmith=record | {"target": record["target"] | changes})
    found = check_loaders(folder, Setting(head="ann/a-head", target="org/target", steps=4))
    assert [verdict.reader for verdict in found[:2]] == list(ENGINES)
    assert all(verdict.serves or "\n" not in verdict.reason for verdict in found)
    return {verdict.reader: verdict for verdict in found if verdict.command or verdict.reader not in LOCAL_ENGINES}


def serving(found: dict[str, Verdict]) -> set[str]:
    """The readers that serve a head, without the engines for one machine, which have a test of their own."""
    return {reader for reader, verdict in found.items() if verdict.serves and reader not in LOCAL_ENGINES}


@pytest.mark.parametrize(
    ("kind", "settings", "takes"),
    [
        ("eagle3", {}, True),
        ("draft", {"layers": [0, 7]}, True),
        ("dflash", BLOCKS, True),
        ("xpress", BLOCKS | {"xpress_mlp_hidden": 64, "xpress_rank": 16}, False),
        ("medusa", {}, False),  # vLLM asserts that it drafts with all of its heads
    ],
)
def test_fewer_draft_tokens_by_load_are_for_methods_that_take_them(
    kind: str, settings: Settings, takes: bool, saved: Saved
) -> None:
    schedule = [(1, 4, 4), (5, 16, 2), (17, 100, 0)]
    found = check_loaders(saved(kind, **settings), Setting(steps=4, schedule=schedule))
    told = {verdict.reader: verdict for verdict in found if "per_batch_size" in verdict.shown}
    assert told.keys() == ({VLLM} if takes else set())
    for verdict in told.values():
        served = json.loads(shlex.split(verdict.command)[-1])
        assert served["num_speculative_tokens_per_batch_size"] == [[*step] for step in schedule]
        assert served["num_speculative_tokens"] == 4 and "# num_speculative_tokens_per_batch_size" in verdict.shown


def test_llama_cpp_alone_drafts_by_a_lookup_or_by_a_head(saved: Saved) -> None:
    vllm = check_loaders(saved("eagle3"), Setting(steps=4))[0]
    assert "drafts by a lookup or by a head, not by both" in behind_lookup(vllm, 2, 4).reason
    server = "llama-server -m target.gguf -md head.gguf --spec-type draft-eagle3 --spec-draft-n-max 4"
    found = behind_lookup(Verdict("llama.cpp", f"convert\n{server}", None, ()), 2, 4)
    first, second = found.command.splitlines()
    assert first == "convert" and found.serves and "the latest match of 2 tokens" in found.notes[0]
    options = shlex.split(second)
    assert options[options.index("--spec-type") + 1] == "ngram-simple,draft-eagle3"
    assert options[-4:] == ["--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "4"]


def test_a_head_of_fewer_positions_than_its_target_has_says_so(saved: Saved, target: FrozenTarget) -> None:
    folder = saved("eagle3")
    assert "made for" not in verdicts(folder)[VLLM].shown
    for verdict in list(verdicts(folder, context_length=131_072).values())[:2]:
        assert f"# made for {target.context_length} of the target's 131,072 positions" in verdict.shown


@pytest.mark.parametrize("kind", BLOCK_HEADS)
def test_a_head_that_drafts_blocks_is_what_engines_load(kind: str, saved: Saved) -> None:
    engines = {"xpress": {VLLM}, "domino": {SGLANG}}.get(kind, {VLLM, SGLANG})
    settings = BLOCK_HEADS[kind] | BLOCKS
    folder = saved(kind, **settings)
    config = said_in(folder)
    own = config if kind == "dspark" else config["dflash_config"]
    assert own["target_layer_ids"] == [1, 5] and own["mask_token_id"] == 2  # of the layers left, not entered
    assert (config["block_size"], config["num_target_layers"], config["layer_types"]) == (5, 8, ["full_attention"] * 2)
    names = load_file(folder / "model.safetensors").keys()
    assert not {name for name in names if "embed_tokens" in name or "lm_head" in name or name in ("d2t", "t2d")}
    found = verdicts(folder)
    assert serving(found) == engines and why_unfit([*found.values()]) is None
    method = kind if kind == "dspark" else "dflash"
    if VLLM in engines:
        assert f'"method": "{method}"' in found[VLLM].command
    if SGLANG in engines:
        assert f"--speculative-algorithm {method.upper()} " in found[SGLANG].command
        drafts = "dspark-block-size 4" if kind == "dspark" else "num-draft-tokens 5"
        assert found[SGLANG].command.endswith(f" --speculative-{drafts}")
    assert serving(verdicts(folder, architecture="Qwen2ForCausalLM")) == {VLLM} & engines
    assert serving(verdicts(folder, architecture="MixtralForCausalLM")) == set()
    found = verdicts(saved(kind, aux_layer_ids=[2, 8], **settings))
    assert all("[1, 7]: only the outputs" in found[engine].errors[0] for engine in engines)


def test_what_sglang_reads_of_domino(saved: Saved) -> None:
    """DFlash's class with the projector's fields, and a correction from the second token on."""
    settings = BLOCK_HEADS["domino"] | BLOCKS
    config = said_in(saved("domino", **settings))
    own = {**settings, "projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": True}
    assert config["architectures"] == ["DFlashDraftModel"]
    assert own.items() - settings.items() <= config["dflash_config"].items() >= BLOCK_HEADS["domino"].items()
    found = verdicts(saved("domino", pure_draft_prefix_len=0, **settings))
    assert not serving(found) and "takes a pure_draft_prefix_len of 1, not 0" in found[SGLANG].reason


def test_what_vllms_kernels_take_of_xpress(saved: Saved) -> None:
    """Any other number of draft tokens than the trained one reads the mixer with a wrong stride, so none is offered."""
    settings = BLOCKS | {"xpress_mlp_hidden": 64}
    found = verdicts(saved("xpress", xpress_rank=24, **settings))
    assert not serving(found) and "power of two" in found[VLLM].reason and not found[VLLM].errors
    folder = saved("xpress", xpress_rank=16, **settings)
    assert '"num_speculative_tokens": 4' in check_loaders(folder, Setting(steps=2))[0].command
    measured = check_loaders(folder, Setting(steps=2, tree=parse_shape("chain:2")))[0]
    assert not measured.is_as_measured and "drafts 4 tokens a round with this head, not 2" in str(measured.otherwise)
    config = said_in(folder)
    assert (config["xpress_num_passes"], config["xpress_block_size"], config["xpress_topc"]) == (4, 5, 128)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, {"is_causal": False, "causal": False}),
        ({"causal": True}, {"is_causal": True, "causal": True}),
        ({"sliding_window": 9}, {}),  # sliding layers are causal where nothing is said of all layers
    ],
)
def test_causality_is_said_where_each_engine_reads_it(settings: Settings, said: dict[str, bool], saved: Saved) -> None:
    folder = saved("dflash", **BLOCKS, **settings)
    config = said_in(folder)
    both = {name: config.get(name, config["dflash_config"].get(name)) for name in ("is_causal", "causal")}
    assert {name: value for name, value in both.items() if value is not None} == said
    assert config["layer_types"][0].startswith("sliding" if "sliding_window" in settings else "full")
    assert serving(verdicts(folder)) == {VLLM, SGLANG}


@pytest.mark.parametrize("size", [128, 100, None])
def test_an_eagle3_head_is_what_every_reader_loads(size: int | None, saved: Saved) -> None:
    folder = saved("eagle3", draft_vocab_size=size)
    assert ({"d2t", "t2d"} <= load_file(folder / "model.safetensors").keys()) == (size == 100)
    found = verdicts(folder)
    assert serving(found) == {VLLM, SGLANG, EAGLE} and why_unfit([*found.values()]) is None
    assert found[VLLM].command == (
        "vllm serve org/target --speculative-config "
        '\'{"method": "eagle3", "model": "ann/a-head", "num_speculative_tokens": 4}\''
    )
    assert found[SGLANG].command == (
        "python -m sglang.launch_server --model-path org/target --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path ann/a-head --speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 5"
    )


def test_a_command_has_all_that_was_measured(saved: Saved) -> None:
    """Or there is none: vLLM drafts no tree, and no engine a static one or a target without its adapter."""
    folder = saved("eagle3")

    def found(tree: str, **changes: Any) -> list[Verdict]:
        shape = parse_shape(tree)
        return check_loaders(folder, Setting(steps=shape.depth, tree=shape, **changes))[:2]

    given: dict[str, Any] = {"template": {"enable_thinking": False}, "overrides": {"min_p": 0}}
    vllm, sglang = found("chain:3", rule="block", **given)
    words = shlex.split(vllm.command)
    options = {name: json.loads(value) for name, value in zip(words[3::2], words[4::2], strict=True)}
    assert options == {
        "--default-chat-template-kwargs": given["template"],
        "--override-generation-config": given["overrides"],
        "--speculative-config": {
            **{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3},
            **{"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
        },
    }
    assert "min_p 0" in vllm.shown and "chat_template_kwargs" not in vllm.shown
    assert 'requests need chat_template_kwargs {"enable_thinking": false}' in sglang.shown
    assert "draft_sample_method" not in found("chain:3", rule="likeliest")[0].command
    vllm, sglang = found("tree:3x4x12")
    assert "tree:3x4x12; measure a chain (--tree chain:3)" in str(vllm.otherwise) and sglang.is_as_measured
    assert "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 12" in sglang.command
    assert not [verdict for verdict in found("static:2.1") if verdict.is_as_measured]
    verdicts(folder, adapter="org/adapter")
    assert not [verdict for verdict in found("chain:3") if verdict.is_as_measured]


@pytest.mark.parametrize(
    ("kind", "settings", "trained"),
    [
        ("eagle3", {"depth": 4}, 4),
        ("dflash", BLOCKS, 4),
        ("dspark", {"block_size": 4, "num_layers": 2, "markov_rank": 6}, 4),
        ("draft", {"layers": [0, 7]}, 64),
    ],
)
def test_a_command_that_drafts_more_than_was_trained_says_so(
    kind: str, settings: Settings, trained: int, saved: Saved
) -> None:
    folder = saved(kind, **settings)
    for steps, warned in ((trained, False), (trained + 1, kind != "draft")):
        for verdict in check_loaders(folder, Setting(steps=steps))[:2]:
            assert ("more than the head was trained for, 4" in verdict.shown) == warned
            assert verdict.shown.startswith(verdict.command)


LLAMA = "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("settings", "model", "readers", "fits", "fault"),
    [
        ({"fc_norm": True}, LLAMA, {VLLM, SGLANG}, True, "fc_norm"),
        ({"norm_output": True}, LLAMA, {VLLM, SGLANG}, True, "norm_output"),
        ({"aux_layer_ids": [1, 4, 6]}, LLAMA, {VLLM, SGLANG}, True, "[2, 4, 5] would be captured in the place of [1,"),
        ({"aux_layer_ids": [0, 7]}, LLAMA, {VLLM, SGLANG}, True, "no layer ids are read"),
        ({"aux_layer_ids": [2, 4, 8]}, LLAMA, {VLLM}, False, "layer 8 of 8, the last one's output, is never captured"),
        ({"aux_layer_ids": [4]}, LLAMA, {VLLM}, False, "fc is left out"),
        ({"hidden_size": 24}, LLAMA, {VLLM, SGLANG, EAGLE}, True, "embed_tokens.weight"),
        ({"hidden_size": 96}, LLAMA, {VLLM}, False, "fc is left out"),
        # Engines have the hook for some targets only.
        ({}, "Qwen3ForCausalLM", {VLLM, SGLANG, EAGLE}, True, ""),
        ({}, "GraniteForCausalLM", {VLLM}, True, ""),
        ({}, "MixtralForCausalLM", set(), True, ""),  # llama.cpp's Llama
        ({}, "Mistral3ForConditionalGeneration", {VLLM}, True, ""),
        ({}, "", set(), False, ""),
    ],
)
def test_which_options_and_targets_each_reader_takes(
    settings: Settings, model: str, readers: set[str], fits: bool, fault: str, saved: Saved
) -> None:
    found = verdicts(saved("eagle3", **settings), architecture=model or None)
    assert serving(found) == readers and (why_unfit([*found.values()]) is None) == fits
    errors = [error for verdict in found.values() for error in verdict.errors]
    assert any(fault in error for error in errors) if fault else not errors


@pytest.mark.parametrize(
    ("kind", "settings", "readers", "fault"),
    [
        ("eagle3", {"draft_vocab_size": 100}, {LLAMACPP, OPENVINO}, ""),
        ("eagle3", {"fc_norm": True}, set(), f"{LLAMACPP} refuses heads with fc_norm"),
        ("eagle3", {"norm_output": True}, set(), f"{LLAMACPP} would misread it: config.json: norm_output"),
        ("eagle3", {"sliding_window": 24}, set(), f"{LLAMACPP} would misread it: config.json: sliding_window"),
        ("eagle3", {"aux_layer_ids": [2, 4]}, set(), f"{LLAMACPP} takes heads that read three layers of the target"),
        ("eagle3", {"hidden_size": 24}, {LLAMACPP}, f"{OPENVINO} would misread it: embed_tokens.weight"),
        ("eagle3", {"rope_scaling": {"rope_type": "linear", "factor": 4}}, {LLAMACPP}, "no kind linear is read"),
        ("dflash", BLOCKS, {LLAMACPP, OPENVINO}, ""),
        ("dflash", BLOCKS | {"sliding_window": 9}, set(), "sliding layers would see all rows of their block"),
        ("dspark", BLOCKS | {"markov_rank": 6}, {LLAMACPP}, f"{OPENVINO} has no method for heads of kind dspark"),
        ("dflash2", BLOCKS | {"selector_top_k": 5}, {LLAMACPP}, ""),
        ("dflash2", BLOCKS | {"selector_top_k": 6}, set(), "a selector_top_k of 6 only from a width of 42, not 32"),
        ("xpress", BLOCKS | {"xpress_mlp_hidden": 64}, set(), f"{LLAMACPP} has no method for heads of kind xpress"),
        ("medusa", {}, set(), f"{LLAMACPP} has no method"),
        ("draft", {"layers": [0, 7]}, {LLAMACPP, MLX}, f"{OPENVINO} has no method"),
    ],
)
def test_which_heads_the_engines_for_one_machine_serve(
    kind: str, settings: Settings, readers: set[str], fault: str, saved: Saved
) -> None:
    folder = saved(kind, **settings)
    setting = Setting(head="ann/a-head", target="org/target", steps=4)
    found = {verdict.reader: verdict for verdict in check_loaders(folder, setting)}
    assert {reader for reader in LOCAL_ENGINES if found[reader].serves} == readers
    names = ["llama.cpp", "openvino", "mlx"]
    assert fault in (why_unfit([*found.values()], names) or "")
    assert (why_unfit([*found.values()], names[:1]) is None) == (LLAMACPP in readers)
    if LLAMACPP in readers:
        method = {"draft": "simple", "dflash2": "dflash"}.get(kind, kind)
        file = f"{method.replace('simple', 'draft')}-a-head.gguf"
        assert found[LLAMACPP].command.splitlines() == [
            "python convert_hf_to_gguf.py org/target --outtype f32 --outfile target.gguf",
            f"python convert_hf_to_gguf.py ann/a-head --target-model-dir org/target --outtype q8_0 --outfile {file}",
            f"llama-server -m target.gguf -md {file} --spec-type draft-{method} --spec-draft-n-max 4 --metrics",
        ]
    if OPENVINO in readers:  # which numbers a layer by its output
        layers = {"eagle3": "1,3,4", "dflash": "1,5"}[kind]
        last = found[OPENVINO].command.splitlines()[-1]
        assert last == f"python eval/servers/inside/openvino_layers.py head-openvino {layers}"


def test_a_dflash2_head_says_the_factor_of_its_targets_embeddings(tmp_path: Path) -> None:
    """The factor in config.json is the one by which the target's own class multiplies."""
    target = make_target("gemma3_text", torch.float32, hidden_size=256)
    folder = save_new(tmp_path / "head", target, "dflash2", block_size=4, num_layers=2, mask_token_id=3)
    own = said_in(folder)["dflash_config"]
    embed: Any = target.shared.embed_tokens
    assert torch.allclose(embed(torch.tensor([7])), own["input_embedding_scale"] * embed.weight[[7]])
    assert serving(verdicts(folder, architecture="Gemma4ForConditionalGeneration")) == {VLLM, SGLANG}
    config = said_in(folder)
    del config["draftsmith"]
    (folder / "config.json").write_text(json.dumps(config))
    read = read_published(str(folder), target)
    assert read.config.selector_top_k == own["selector_top_k"] and not read.origin.differs


def test_sglang_takes_a_window_as_an_option(saved: Saved) -> None:
    """It counts the positions before the token's own; vLLM and config.json count that, too."""
    found = verdicts(saved("eagle3", sliding_window=64))
    assert serving(found) == {VLLM, SGLANG} and "sliding_window" in found[EAGLE].reason
    assert found[SGLANG].command.endswith(" --speculative-draft-window-size 63")
    assert "window" not in verdicts(saved("eagle3"))[SGLANG].command
    assert "window" not in verdicts(saved("dflash", sliding_window=64))[SGLANG].command


def test_tensors_that_config_json_was_not_written_for_are_refused(saved: Saved) -> None:
    folder = saved("eagle3")
    change_weights(folder, norm__weight=None)
    assert "changed since it was saved" in refused(check_loaders, folder)


LENGTH = {"original_max_position_embeddings": 64}
LISTS = {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize(
    ("scaling", "readers"),
    [
        ({"rope_type": "default"}, {VLLM, SGLANG, EAGLE}),
        (QUARTER, {VLLM}),
        ({"rope_type": "linear", "factor": 4}, {VLLM, SGLANG}),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": False, **LENGTH}, {VLLM, SGLANG}),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, **LENGTH}, {VLLM}),
        ({"rope_type": "longrope", **LISTS, **LENGTH}, {VLLM, SGLANG}),
        ({"rope_type": "longrope", "attention_factor": 1.5, **LISTS, **LENGTH}, set()),
    ],
)
def test_positions_that_a_reader_would_compute_otherwise(
    kind: str, scaling: Settings, readers: set[str], saved: Saved
) -> None:
    found = verdicts(saved(kind, rope_scaling=scaling))
    assert serving(found) == readers - (set() if kind == "eagle3" else {EAGLE})
    assert all("rope_scaling" in verdict.reason for verdict in found.values() if not verdict.serves)


@pytest.mark.parametrize(
    ("family", "settings", "changes", "said"),
    [
        ("mimo", {"layout": "mimo"}, {}, "k_proj.bias: expected (16,), found none"),
        ("mimo", {"layout": "mimo"}, {"rope_theta": 123.0}, "config.json: rope_parameters: not those"),
        ("deepseek", {"native": True, "draft_vocab_size": V - 8}, {}, "d2t: expected none"),
    ],
)
def test_modules_engines_misread(family: str, settings: Settings, changes: Settings, said: str, tmp_path: Path) -> None:
    write_native(tmp_path / "target", family)
    folder = save_new(tmp_path / "head", load_target(str(tmp_path / "target")), "mtp", **settings)
    record = read_config(folder)
    change_config(folder, draftsmith=record | {"config": record["config"] | changes})
    assert all(any(said in error for error in verdict.errors) for verdict in verdicts(folder).values())


@pytest.mark.parametrize(
    ("name", "place"),
    [("a/b", "a/b"), ("a/b@main", "a/b"), ("/hub/models--a--b/snapshots/1f", "a/b"), ("/x/a--b", None)],
)
def test_the_code_of_a_targets_config_is_named_as_transformers_splits_it(name: str, place: str | None) -> None:
    target = {"name": name, "config": {"auto_map": {"AutoConfig": "made.Config"}}}
    named = mtp_engine_config(None, target, "float32").get("auto_map")
    assert named == (None if place is None else {"AutoConfig": f"{place}--made.Config"})


def test_modules_of_a_multimodal_target_lie_beside_its_whole_config(tmp_path: Path) -> None:
    native = write_native(tmp_path / "target", "qwen_dense")
    make_multimodal(tmp_path / "target")
    folder = save_new(tmp_path / "head", load_target(str(tmp_path / "target")), "mtp", native=True)
    whole, config = said_in(tmp_path / "target"), said_in(folder)
    assert config["architectures"] == whole["architectures"] and config["vision_config"]["depth"] == 1
    assert config["text_config"]["num_hidden_layers"] == 4
    assert load_file(folder / "model.safetensors").keys() == native.keys()
    assert serving(verdicts(folder)) == {VLLM, SGLANG}


@pytest.mark.parametrize(("settings", "readers"), [({}, {OLD_VLLM, MEDUSA}), ({"draft_vocab_size": 99}, set())])
def test_a_medusa_is_what_its_own_repository_reads(settings: Settings, readers: set[str], saved: Saved) -> None:
    folder = saved("medusa", depth=2, num_layers=2, **settings)
    weights = load_file(folder / "medusa_lm_head.safetensors")
    names = {f"{k}.{j}.linear.{part}" for k in range(2) for j in range(2) for part in ("weight", "bias")}
    assert weights.keys() - {"token_map"} == names | {"0.2.weight", "1.2.weight"}
    config, size = said_in(folder), settings.get("draft_vocab_size", 128)
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["medusa_fc_bias"]) == (2, 2, True)
    assert config["architectures"] == ["MedusaModel"] and weights["1.2.weight"].shape == (size, 32)
    assert config["truncated_vocab_size"] == size
    found = verdicts(folder)
    assert serving(found) == readers and not set(ENGINES) & readers
    assert why_unfit([*found.values()])  # no engine of today has the method
    assert not serving(verdicts(folder, architecture="Qwen2ForCausalLM")) - {OLD_VLLM}
