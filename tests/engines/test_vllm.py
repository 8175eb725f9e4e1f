"""A whole vLLM beside this runtime: the same text, and in every round the same number of accepted draft tokens.

DRAFTSMITH_ENGINE_RECORD names a file to which the figures are written, eval/results/vllm.json in the repository.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from eval.data.prompts import HELD_OUT_SUITE, load_prompts, prompts_hash
from eval.measure.figures import top_two_margins
from eval.measure.machine import machine
from eval.measure.model_facts import target_facts
from eval.records.results import write_record
from eval.runtime.engine import Request
from eval.runtime.near_ties import FAR, find_mismatches, first_difference
from heads.saved import load_head, save_head, target_record
from heads.targets.load import load_target
from heads.targets.target_files import load_tokenizer
from tests.engines.vllm_process import NEEDS_VLLM, TARGET, ask_vllm
from tests.support.annotations import Once
from tests.support.runs import forget_accelerator, train
from tests.support.small_targets import open_engine

pytestmark = NEEDS_VLLM
PROMPTS, NEW_TOKENS, ROWS = 32, 64, 8


@dataclass(frozen=True)
class Family:
    """A head, trained a little, and the number of tokens that it drafts."""

    head: dict[str, Any]
    depth: int = 5
    method: str = "eagle3"
    steps: int = 60
    lr: float = 1e-3


EAGLE3 = {"kind": "eagle3", "depth": 4, "intermediate_size": 384}
DFLASH = {"kind": "dflash", "block_size": 6, "num_layers": 2, "intermediate_size": 192, "num_anchors": 64}
FAMILIES = {
    "EAGLE-3": Family(EAGLE3),
    "EAGLE-3, draft vocabulary": Family(EAGLE3 | {"draft_vocab_size": 2048}),
    "EAGLE-3.1": Family(EAGLE3 | {"draft_vocab_size": 2048, "fc_norm": True, "norm_output": True}),
    "EAGLE-3, sliding window": Family(EAGLE3 | {"sliding_window": 24}),
    "EAGLE-3, two layers": Family(EAGLE3 | {"num_layers": 2, "later_slots": 0.5}),
    "EAGLE-3, other layers": Family(EAGLE3 | {"aux_layer_ids": [1, 5, 12, 20]}),
    "DFlash": Family(DFLASH, method="dflash"),
    "DFlash, causal": Family(DFLASH | {"causal": True}, method="dflash"),
    "draft model": Family({"kind": "draft", "layers": [0, 9, 19]}, 5, "draft_model", 80, 5e-3),
    "Medusa": Family({"kind": "medusa", "depth": 3, "tree_nodes": 0}, 3, "medusa", 120, 2e-2),
    "MTP": Family({"kind": "mtp", "native": True, "depth": 3}, 3, "mtp", 200, 6e-3),
}


def make_mimo(folder: Path) -> None:
    """Write the quickstart's target as a MiMo, with a module that begins as a copy of the last layer."""
    config = json.loads((TARGET / "config.json").read_text())
    weights = {name: value.float() for name, value in load_file(TARGET / "model.safetensors").items()}
    D, last, module = config["hidden_size"], config["num_hidden_layers"] - 1, "model.mtp_layers.0."
    for n in range(last + 1):
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = len(weights[f"model.layers.{n}.self_attn.{name}.weight"])
            weights[f"model.layers.{n}.self_attn.{name}.bias"] = torch.zeros(rows)
    copied = f"model.layers.{last}."
    weights |= {name.replace(copied, module): value for name, value in weights.items() if name.startswith(copied)}
    weights |= {f"{module}{name}_layernorm.weight": torch.ones(D) for name in ("token", "hidden")}
    weights[f"{module}input_proj.weight"] = torch.cat([torch.eye(D), 0.5 * torch.eye(D)], 1)
    weights[f"{module}final_layernorm.weight"] = weights["model.norm.weight"]
    save_file({name: value.clone() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config |= {"dtype": "float32", "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_mimo.py").write_text(
        "from transformers import Qwen2Config\n\n\nclass MiMoConfig(Qwen2Config):\n    model_type = 'mimo'\n"
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((TARGET / name).read_bytes())


def train_head(folder: Path, target: Path, family: Family) -> None:
    recipe = {
        "output_dir": str(folder / "run"),
        "target": {"path": str(target)},
        "head": family.head,
        "data": {"context_length": 256, "sources": [{"kind": "python", "limit": 20}]},
        "train": dict(
            max_steps=family.steps, batch_size=2, optimizer="muon", lr=family.lr, min_lr_ratio=0.02, warmup_steps=5,
            checkpoint_every=family.steps, eval_points=1,
        ),
        "eval": {"prompts": HELD_OUT_SUITE, "num_prompts": 2, "max_new_tokens": 16, "tree": f"chain:{family.depth}"},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(folder / "recipe.yaml")
    forget_accelerator()


def one_norm_of_keys(head: Any) -> None:
    """Give all layers of a DFlash head the first one's norm of keys: vLLM 0.32's kernel for CPUs applies that to the
    keys of the context in every layer."""
    for layer in head.layers:
        layer.self_attn.k_norm.load_state_dict(head.layers[0].self_attn.k_norm.state_dict())


def add_to_record(row: dict[str, Any], **shared: Any) -> None:
    """Write a family's figures to the record, in the place of those of another time."""
    if file := os.environ.get("DRAFTSMITH_ENGINE_RECORD"):
        path, facts = Path(file), {**machine(torch.device("cpu")), **shared}
        rows = json.loads(path.read_text())["rows"] if path.is_file() else []
        kept = {other["family"]: other for other in rows} | {row["family"]: row}
        write_record({**facts, "rows": [kept[name] for name in FAMILIES if name in kept]}, path)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_vllm_writes_the_same_text_and_accepts_the_same_drafts(name: str, once: Once, tmp_path: Path) -> None:
    family = FAMILIES[name]
    K = family.depth
    folder = once("mimo", make_mimo) if family.method == "mtp" else TARGET
    target, tokenizer = load_target(str(folder), dtype=torch.float32), load_tokenizer(str(folder))
    train_head(tmp_path, folder, family)
    prompts = load_prompts(HELD_OUT_SUITE, tokenizer, num_prompts=PROMPTS, max_prompt_tokens=96)
    head = load_head(tmp_path / "run")
    if family.method == "dflash":
        one_norm_of_keys(head)
    save_head(head, tmp_path / "head", target=target_record(target))
    engine = open_engine(target, head, f"chain:{K}", batch_size=ROWS, max_length=256)
    # The last round of a text is whole in vLLM's counters; here, if the text may go on to the end of it.
    outputs = engine.generate([Request(p.ids, NEW_TOKENS + K, ignore_eos=True) for p in prompts])
    texts, accepted = [output.tokens[:NEW_TOKENS] for output in outputs], []
    for output in outputs:
        starts = [1 + sum(output.accepted[:r]) + r for r in range(output.rounds)]  # tokens before round r
        accepted.append([count for count, start in zip(output.accepted, starts, strict=True) if start < NEW_TOKENS])
    job: dict[str, Any] = {"target": str(folder), "new_tokens": NEW_TOKENS, "rows": ROWS, "context": 512}
    job["speculative"] = {"method": family.method, "model": str(tmp_path / "head"), "num_speculative_tokens": K}
    options = {"trust_remote_code": True} if family.method == "mtp" else {}
    theirs = ask_vllm(tmp_path, prompts=[prompt.ids for prompt in prompts], options=options, **job)
    differing, same = [], []
    for i, (prompt, ours, tokens) in enumerate(zip(prompts, texts, theirs["tokens"], strict=True)):
        if (place := first_difference(ours, tokens)) is None:
            same.append(i)
            continue
        request = Request(prompt.ids, NEW_TOKENS, ignore_eos=True)
        (mismatches,) = find_mismatches(target, [(request, tokens)])
        (margin,) = top_two_margins(target, [(request, ours[:place])])
        near = all(mismatch.is_within(FAR) for mismatch in mismatches)
        differing.append({"prompt": prompt.id, "position": place, "top_two_margin": margin, "near_tie": near})
    rounds = {"vllm": theirs["accepted"], "draftsmith": accepted}
    counts = {who: [sum(n > k for i in same for n in found[i]) for k in range(K)] for who, found in rounds.items()}
    named = {"name": "quickstart as a MiMo" if family.method == "mtp" else "quickstart"}
    row = {
        **{"family": name, "head": family.head, "target": target_facts(target).model_dump() | named, "depth": K},
        **{"prompts": len(prompts), "identical": len(same), "differing": differing},
        "rounds": {who: sum(len(found[i]) for i in same) for who, found in rounds.items()},
        "accepted_by_position": counts,
    }
    shared: dict[str, Any] = {"prompts": HELD_OUT_SUITE, "prompts_hash": prompts_hash(prompts)}
    shared |= {"max_new_tokens": NEW_TOKENS, "batch_size": ROWS}
    add_to_record(row, engine=theirs["versions"], **shared)
    assert theirs["counters"] == [sum(count > k for rounds in theirs["accepted"] for count in rounds) for k in range(K)]
    assert all(difference["near_tie"] for difference in differing), differing
    assert [theirs["accepted"][i] for i in same] == [accepted[i] for i in same]
    assert counts["vllm"][0] > 0
