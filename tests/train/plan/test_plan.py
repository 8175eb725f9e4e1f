"""`--plan`: counts without weights against sums by hand, against a step that is made, and against a run's files."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import LlamaConfig, LlamaForCausalLM

from eval.records.results import as_record, write_record
from heads.core.contract import Rows
from heads.targets.load import load_target
from tests.support.annotations import Capture, Patch
from tests.support.measurements import measurement, results_of
from tests.support.runs import BLOCK, Settings, forget_accelerator, the_error, write_recipe
from tests.support.small_targets import small_heads
from train.entry import attempt
from train.features.feature_source import make_batch
from train.plan.memory_and_flops import COPIES, STATE, Launch, Plan
from train.plan.plan_lines import advice, decoding_hours, device_tflops, hours
from train.recipe.head_section import make_head
from train.recipe.recipe import KINDS, load_recipe
from train.steps.draft_lora import add_adapters
from train.steps.parallel import LossModule

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
    ),
    "DeepSeek-V3": dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, tie_word_embeddings=False,
    ),
}  # fmt: skip


def write_config(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
    return str(folder)


def plan_of(settings: Settings, *overrides: str, **launch: Any) -> Plan:
    return Plan(load_recipe(write_recipe(settings), overrides), Launch(**launch))


@pytest.fixture
def eagle(settings: Settings) -> Settings:
    """An EAGLE-3 head trained in bfloat16, two micro-batches a step."""
    settings["head"] = {"kind": "eagle3", "depth": 2, "draft_vocab_size": 32000}
    settings["train"] |= {"precision": "bf16", "tokens_per_step": 4 * 48}
    return settings


@pytest.mark.parametrize(("name", "total", "active"), [("Llama-3.1-8B", 8.03, 8.03), ("DeepSeek-V3", 671.03, 37.55)])
def test_a_target_has_its_published_size(
    name: str, total: float, active: float, settings: Settings, tmp_path: Path
) -> None:
    config = SHAPES[name] | {"num_nextn_predict_layers": 1}  # in DeepSeek-V3's config; no part of the model
    settings["target"]["path"] = write_config(tmp_path / "target", config)
    settings["data"]["context_length"] = 2048
    plan = plan_of(settings, memory=80.0)
    assert (round(plan.parameters / 1e9, 2), round(plan.active / 1e9, 2)) == (total, active)
    assert plan.target_bytes == 2 * plan.parameters
    ends = 2 * config["vocab_size"] * config["hidden_size"]
    assert plan.target_cost()[1] == pytest.approx(2 * (plan.active - ends), rel=0.15)  # and attention


def test_a_heads_state_is_the_sum_by_hand(eagle: Settings, tmp_path: Path) -> None:
    eagle["target"]["path"] = write_config(tmp_path / "target", SHAPES["Llama-3.1-8B"])
    plan = plan_of(eagle, memory=80.0)
    D, I, kv = 4096, 14336, 1024  # noqa: E741
    parameters = 3 * D * D + 2 * D * (D + 2 * kv) + D * D + 3 * D * I + 4 * D + 32000 * D
    tensors = 13
    rows = plan.device()
    assert sum(p.numel() for p in plan.trained) == parameters
    assert rows["head, float32"] == rows["gradients, float32"] == 4 * parameters
    assert rows["optimizer"] == 8 * parameters + 4 * tensors
    tables = 8 * 32000 + 128256  # of the draft vocabulary
    assert rows["the head as it is measured"] == 2 * parameters + tables
    assert plan.step_tokens == 2 * 2 * 48


REFUSED = [
    ["data.context_length=1000"],
    ["eval.max_new_tokens=600"],
    ["eval.tree=static:3.2", "eval.rule=ratio", "eval.temperature=1"],
    ["train.save_dtype=float32", "target.dtype=bfloat16"],
    ["train.tokens_per_step=7"],
    ["head={kind: draft, fresh: {max_position_embeddings: 16}}"],
    ["target.adapter=.", "target.path=."],
    ["target.path=nowhere"],
    ["eval.prompts=no.jsonl"],
    ["data.sources=[{kind: chat, path: no.jsonl}]"],
    ["data.sources=[{kind: text, path: no.jsonl}]"],
    ["output_dir=/proc/x"],
    ["tracking.trackio=true"],
    ["features.kind=sharded"],
]


@pytest.mark.parametrize("overrides", REFUSED, ids=lambda words: words[0])
def test_a_plan_refuses_what_the_run_refuses(overrides: list[str], settings: Settings, capsys: Capture) -> None:
    name = "distill" if "draft" in overrides[0] else "eagle"
    said = []
    for option in ([], ["--plan"]):
        forget_accelerator()
        assert attempt(name, [str(write_recipe(settings)), *overrides, *option]) == 2
        said.append(the_error(capsys))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("sharing", "share", "extra"), [("ddp", 1, 4), ("fsdp", 8, 2), ("zero2", 8, 2), ("zero3", 8, 2)]
)
def test_processes_hold_their_shares(sharing: str, share: int, extra: int, eagle: Settings) -> None:
    eagle["head"]["draft_vocab_size"] = 64
    alone = plan_of(eagle, memory=80.0)
    plan = plan_of(
        eagle, f"train.tokens_per_step={8 * 192}", memory=80.0, processes=8, sharing=sharing, features="sharded"
    )
    rows = plan.device()
    for name in STATE:
        assert rows[name] == -(-alone.device()[name] // share)
    assert rows[COPIES[sharing]] == extra * sum(p.numel() for p in plan.trained)
    assert rows["target"] == -(-plan.target_bytes // 8) + max(plan.layer_bytes(None))
    assert plan.step_tokens == 8 * alone.step_tokens and 8 * hours(plan, 1, 1e9) == pytest.approx(hours(alone, 1, 1e9))


HEADS_OF = small_heads(BLOCK, medusa={"tree_nodes": 0})
INT8 = "target.quantize=int8"


class Measured(TorchDispatchMode):
    """A count of the bytes that exist at most, and of the operations of products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.flops = 0
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        match func._overloadpacket.__name__:  # three that torch's own registry lacks
            case "_linear_pointwise":  # (m, k), (n, k)
                self.flops += 2 * args[0].numel() * len(args[1])
            case "_scaled_dot_product_flash_attention_for_cpu":
                self.flops += sdpa_flop_count(*(x.shape for x in args[:3]))
            case "_scaled_dot_product_flash_attention_for_cpu_backward":
                self.flops += sdpa_backward_flop_count(*(x.shape for x in args[:4]))
            case _ if func._overloadpacket in flop_registry:
                self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.watch(leaf.untyped_storage())
        return out

    def watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            self.storages[key] = weakref.ref(storage, lambda _: self.freed(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def freed(self, key: int, size: int) -> None:
        del self.storages[key]
        self.live -= size


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that is wide enough for products to outweigh all else, as in any real one."""
    folder = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


ADAPTED = [("draft", ["head.lora={rank: 4}"])]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "overrides"), [*((kind, []) for kind in KINDS.values()), *ADAPTED])
def test_what_is_planned_is_within_a_tenth_of_a_measured_step(
    kind: str, overrides: list[str], settings: Settings, wide_target: str, monkeypatch: Patch
) -> None:
    settings["head"] = {"kind": kind, **HEADS_OF[kind]}
    settings["target"]["path"], settings["data"]["context_length"] = wide_target, 384
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("train.plan.memory_and_flops.device_memory", lambda _: 2**40)
    plan = plan_of(settings, *overrides)
    target = load_target(wide_target)
    head = make_head(plan.recipe.head, target, torch.zeros(target.vocab_size, dtype=torch.int64))
    add_adapters(head)
    trained = LossModule(head)
    assert len(plan.trained) == sum(p.requires_grad for p in trained.parameters())
    tokens = torch.zeros(2, 384, dtype=torch.int64)
    positions = torch.arange(384).expand(2, -1)
    everywhere = torch.ones(2, 384, dtype=torch.bool)
    rows = Rows(tokens, everywhere, positions, torch.zeros_like(tokens))
    batch = make_batch(target, rows, head.aux_layer_ids, torch.float32)
    with Measured() as made:
        there = [*target.model.parameters(), *target.model.buffers(), *trained.parameters(), *trained.buffers()]
        for tensor in [*there, *vars(batch).values(), *vars(rows).values()]:
            if isinstance(tensor, Tensor):
                made.watch(tensor.untyped_storage())
        before = made.live
        trained(batch, torch.ones(len(head.depth_weights)), False)[0].backward()
    activations, flops = plan.head_cost()
    assert flops * 2 * 384 == pytest.approx(made.flops, rel=0.1)
    whole = before + plan.features_bytes  # weights, target and features exist before the step
    planned = whole + plan.gradients + activations - plan.features_bytes
    assert planned == pytest.approx(whole + max(made.peak - before, plan.gradients), rel=0.1)


def test_a_plan_needs_the_config_alone_and_writes_nothing(eagle: Settings, tmp_path: Path, capsys: Capture) -> None:
    eagle["target"]["path"] = write_config(tmp_path / "target", SHAPES["Llama-3.1-8B"])
    path = str(write_recipe(eagle))
    before = sorted(tmp_path.rglob("*"))
    words = ["--plan", "--memory", "24", "--processes", "2", "--tflops", "100", "--tflops", "200"]
    assert attempt("eagle", [path, *words]) == 0
    assert "fits" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert attempt("eagle", [path, "--plan", "--memory", "a lot"]) == 2
    assert "--memory" in the_error(capsys)
    assert attempt("eagle", [path, "--memory", "24"]) == 2
    assert "--memory: is an option of --plan" in the_error(capsys)
    assert attempt("medusa", [path, "--plan"]) == 2
    assert "train/eagle.py" in the_error(capsys)


def test_hours_are_those_of_the_device_that_is_planned_for(
    eagle: Settings, monkeypatch: Patch, capsys: Capture
) -> None:
    """A CPU's speed is measured, and its processes share its cores; only a GPU is taken for an H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("train.plan.plan_lines.busy_cores", lambda _: None)
    eagle["head"]["draft_vocab_size"] = 64
    assert device_tflops(plan_of(eagle, memory=80)) == pytest.approx(396, rel=0.01)
    alone, shared = (device_tflops(plan_of(eagle, processes=number)) for number in (1, 1000))
    assert 1e-4 < alone < 100 and shared < alone / 2
    assert attempt("eagle", [str(write_recipe(eagle)), "--plan"]) == 0
    said = capsys.readouterr().out
    assert "hours at" in said and "396" not in said and " 0.0\n" not in said and "idle machine" not in said
    monkeypatch.setattr("train.plan.plan_lines.busy_cores", lambda _: 1.5)
    assert attempt("eagle", [str(write_recipe(eagle)), "--plan"]) == 0
    assert "hours of an idle machine: others use 1.5 of its cores" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "steps"), [(10, "5"), (None, None)])
def test_epochs_are_planned_as_far_as_they_are_known(
    limit: int | None, steps: str | None, eagle: Settings, capsys: Capture
) -> None:
    eagle["head"]["draft_vocab_size"] = 64
    eagle["data"]["sources"][0]["limit"] = limit
    eagle["data"]["regenerate"] = {"prompt_tokens": 16, "new_tokens": 32}
    words = ["--train.max_steps=2 epochs", "--memory=24", "--plan"]
    assert attempt("eagle", [str(write_recipe(eagle)), *words]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 2 epochs of 10 x 48 tokens in steps of 4 x 48
    assert [line[-1] for line in said if line[:3] == ["steps,", "at", "most"]] == ([steps] if steps else [])
    assert any(line[:2] == ["10^9", "tokens:"] for line in said) == (steps is None)


def test_answers_and_measurements_take_the_time_that_weights_take_to_be_read(
    eagle: Settings, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """On a GPU 8 x 10^9 weights of 2 bytes at 2 x 10^12 bytes/s; on a CPU at the speed of a product that is timed."""
    eagle["target"]["path"] = write_config(tmp_path / "target", SHAPES["Llama-3.1-8B"])
    eagle["data"]["regenerate"] = {"prompts": 6400, "prompt_tokens": 16, "new_tokens": 32, "batch_size": 32}
    monkeypatch.setattr("train.plan.plan_lines.CURVES", tmp_path)
    points = [
        {"step": n, "tokens": 10**n, "seconds": 1.0, "lr": 1.0, "tau": n / 2, "ci95": [1, 4], "alpha": []}
        for n in range(2, 8)
    ]
    for kind in ("eagle3", "mtp"):
        record = results_of(measurement(suites={"gsm8k": measurement()}), head={"kind": kind, "curve": points})
        write_record(as_record(record), tmp_path / f"{kind}.json")
    plan = plan_of(eagle, memory=80.0)
    assert decoding_hours(plan, 6400, 32, 32) == pytest.approx(6400 * 8e-3 / 3600, rel=0.02)
    assert decoding_hours(plan, 6400, 32, 1) == pytest.approx(32 * decoding_hours(plan, 6400, 32, 32))
    assert decoding_hours(plan_of(eagle), 1, 1, 1) > 0
    assert attempt("eagle", [str(write_recipe(eagle)), "--plan", "--memory=80", "train.max_steps=100"]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = {line.strip().rpartition("  ")[0].strip(): line.split()[-1] for line in said}
    assert rows["hours of the answers before, an estimate"] == "0.014"
    assert "hours of 6 measurements, an estimate" in rows
    assert [line for line in said if line.startswith("measured elsewhere")] == [
        "measured elsewhere, no promise: eagle3 on org/target, tau 1.50 [1.00, 4.00] after 1.0k tokens, "
        "2.00 [1.00, 4.00] after 10.0k tokens, 3.00 [1.00, 4.00] after 1.0M tokens, 3.50 [1.00, 4.00] after "
        "10.0M tokens"
    ]


def test_advice_leaves_what_it_says(eagle: Settings) -> None:
    eagle["head"]["draft_vocab_size"] = 64
    plenty = plan_of(eagle, memory=1e-4)  # so little that activations are not kept
    memory = (sum(plenty.device().values()) - 1) / 2**30
    plan = plan_of(eagle, memory=memory)
    whole = sum(plan.device().values())
    assert whole > plan.launch.memory_bytes
    advised = dict(advice(plan))
    assert sum(plan_of(eagle, INT8, memory=memory).device().values()) == advised[INT8]
    text, divided = next((text, size) for text, size in advised.items() if "--features sharded" in text)
    processes = int(text.rpartition(" ")[2].rstrip(")"))
    shared = plan_of(eagle, processes=processes, features="sharded", memory=memory)
    assert shared.device()["target"] == divided - whole + plan.device()["target"]
