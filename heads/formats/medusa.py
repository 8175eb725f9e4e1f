"""Medusa's tensors and config.json under the names of the paper's own repository, which vLLM reads up to 0.32.

    {k}.{j}.linear.{weight, bias}    residual block j of head k
    {k}.{number of blocks}.weight    output head of head k
    token_map                        the draft vocabulary, where there is one: no reader takes it with such output heads

The repository keeps them in medusa_lm_head, as we do; it unpickles medusa_lm_head.pt, we write safetensors alone.
"""

import re
from typing import Any


def field_name(own: str, blocks: int) -> str:
    """`blocks.K.layers.J.PART`, `lm_heads.K.weight` or `token_map` as the repository calls it."""
    if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(\w+)", own):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := re.fullmatch(r"lm_heads\.(\d+)\.weight", own):
        return f"{match[1]}.{blocks}.weight"
    assert own == "token_map", own
    return own


def medusa_engine_config(config: Any, target: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A `MedusaConfig` and the record of its target under the repository's names, and what vLLM asks for beside."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": config.depth,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target["name"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": True,  # without it vLLM drops the biases and says nothing
        "original_lm_head": False,
        "torch_dtype": dtype,
    }
