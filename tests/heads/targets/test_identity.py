"""A target is known by what changes its texts, however its config.json spells it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.targets.identity import changes
from heads.targets.load import load_target
from tests.support.native_mtp import change_config
from tests.support.small_targets import CPU, VOCAB, make_target

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
OLD_YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32}
COSMETIC: dict[str, Any] = {
    "architectures": None, "attn_implementation": "flash_attention_2", "attention_dropout": 0.3, "bos_token_id": None,
    "dtype": "float32", "initializer_range": 0.1, "max_position_embeddings": 1024, "output_attentions": True,
    "output_hidden_states": True, "return_dict": False, "transformers_version": "4.40.0", "use_cache": False,
}  # fmt: skip
EDITS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", COSMETIC, ""),
    ("llama", {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None}, ""),
    ("llama", {"rope_parameters": YARN}, "rope_parameters"),
    ("llama", {"rope_parameters": None, "rope_theta": 5e5}, "rope_parameters"),
    ("llama", {"rms_norm_eps": 0.01}, "rms_norm_eps"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("mistral", {"sliding_window": 4}, "sliding_window"),
    ("qwen2", {"max_window_layers": 1}, ""),
    ("gemma2", {"attn_logit_softcapping": 1.0}, "attn_logit_softcapping"),
    ("gemma2", {"final_logit_softcapping": 5.0}, "final_logit_softcapping"),
    ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
    ("gemma3_text", {"layer_types": ["full_attention"] * 6}, "layer_types"),
    ("granite", {"residual_multiplier": 0.5}, "residual_multiplier"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("qwen3_moe", {"router_aux_loss_coef": 0.5, "output_router_logits": True}, ""),
]


@torch.no_grad()
def logits(target: Any) -> Tensor:
    tokens = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    features = target.packed_features(tokens, torch.arange(40)[None], torch.zeros_like(tokens), ())
    found: Tensor = target.shared.lm_head(features.hidden)
    return found


@pytest.mark.parametrize(("family", "edit", "named"), EDITS, ids=str)
def test_an_edit_that_changes_texts_is_named(family: str, edit: dict[str, Any], named: str, tmp_path: Path) -> None:
    make_target(family, torch.float32, CPU).model.save_pretrained(tmp_path)
    before = load_target(str(tmp_path))
    change_config(tmp_path, **edit)
    after = load_target(str(tmp_path))
    assert torch.equal(logits(before), logits(after)) == (not named)
    found = changes(before.identity, after.identity)
    assert bool(found) == bool(named) and (not named or found[0].startswith(f"config.json: {named}")), found


def test_both_spellings_of_a_rotation_are_one(tmp_path: Path) -> None:
    make_target("llama", torch.float32, CPU).model.save_pretrained(tmp_path)
    change_config(tmp_path, rope_parameters=YARN)
    new = load_target(str(tmp_path)).identity
    change_config(tmp_path, rope_parameters=None, rope_theta=10000, rope_scaling=OLD_YARN)
    old = load_target(str(tmp_path)).identity
    assert (
        new == old
        and not changes(new, {"fingerprint": new["fingerprint"]})
        and not changes(new, new | {"settings": "damaged"})
    )
    other = {"fingerprint": "f00d", "tokenizer": "a"}
    assert changes(new, old | other | {"fingerprint": "f00d-int8"}) == changes(new, other)
