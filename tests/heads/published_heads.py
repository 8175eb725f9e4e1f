"""Random heads for the tiny target, and folders of them in the forms of other projects."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.eagle3 import Eagle3, Eagle3Config
from heads.medusa import Medusa, MedusaConfig
from heads.vocab import build_vocab

D, V, LAYERS = 32, 128, 8
"""Of the tiny target."""
BLOCK: dict[str, Any] = dict(
    hidden_size=D, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
    vocab_size=V, max_position_embeddings=64,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)


def filled(head: Any) -> Any:
    """The head with random weights that nothing of its start is left in."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=draw)
    return head.eval()


def eagle3(**changes: Any) -> Eagle3:
    """A random EAGLE-3 head of the tiny target."""
    settings = {"aux_layer_ids": (2, 4, 5), "draft_vocab_size": 48, "rope_theta": 10_000.0, **changes}
    config = Eagle3Config(**BLOCK, num_target_layers=LAYERS, **settings)
    counts = torch.randint(0, 9, (V,), generator=torch.Generator().manual_seed(0))
    made: Eagle3 = filled(Eagle3(config, build_vocab(counts, config.draft_vocab_size)))
    return made


def medusa(**changes: Any) -> Medusa:
    """Random Medusa heads of the tiny target."""
    config = MedusaConfig(**{"hidden_size": D, "vocab_size": V, "draft_vocab_size": V, "depth": 3, **changes})
    made: Medusa = filled(Medusa(config, torch.arange(config.draft_vocab_size)))
    return made


def write(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], file: str = "model.safetensors"
) -> str:
    """A folder of two files; a pickle where the file's name says so. Settings of None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    tensors = {name: value.detach().clone().contiguous() for name, value in weights.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / file)
    return str(folder)


RAW: dict[str, Any] = BLOCK | dict(
    architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, hidden_act="silu",
    attention_bias=False, tie_word_embeddings=False, draft_vocab_size=48, torch_dtype="float32",
)  # fmt: skip
"""config.json of a raw head, whose rotary base and layers are Llama's and the engines' defaults."""
SPECULATORS: dict[str, Any] = dict(
    architectures=["Eagle3DraftModel"], speculators_model_type="eagle3", speculators_version="0.5.0",
    draft_vocab_size=48, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 3, 6],
    transformer_layer_config=BLOCK | dict(model_type="llama", num_hidden_layers=1, rope_parameters=LLAMA3),
    speculators_config=dict(algorithm="eagle3", verifier=dict(name_or_path="org/target")), dtype="float32",
)  # fmt: skip


def layers_0(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of a list of layers."""
    return {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
