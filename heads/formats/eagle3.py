"""EAGLE-3's config.json as vLLM and SGLang read it.

Both conventions of naming layers are written: vLLM counts the layer a stream enters, SGLang the layer it leaves. The
EAGLE repository reads the file too, but no layer ids (it knows the default ones alone) and neither `fc_norm` nor
`norm_output`, which it ignores. speculators' converter (c05b95b) takes the options and drops the layer ids, unless they
are given by hand. `heads.formats.loaders` has what each reader takes, as data.
"""

import json
import shlex
from collections.abc import Sequence
from typing import Any


def eagle3_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """An `Eagle3Config` and the record of its target, under the names that engines use."""
    outputs = [
        k - 1 for k in config.aux_layer_ids
    ]  # SGLang numbers a stream by the layer it leaves; -1 = the embeddings
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
        "pad_token_id": target.get("pad_token_id"),
        "norm_before_residual": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": len(config.aux_layer_ids),
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs},
    }


def convert_command(head: str, target: str, aux_layer_ids: Sequence[int]) -> str:
    """What brings a saved head into speculators' form."""
    ids = json.dumps({"eagle_aux_hidden_state_layer_ids": list(aux_layer_ids)})
    return (
        f"speculators convert {shlex.quote(head)} --algorithm eagle3 --verifier {shlex.quote(target)} "
        f"--algorithm-kwargs {shlex.quote(ids)}"
    )
