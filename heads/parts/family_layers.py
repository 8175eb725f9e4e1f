"""Decoder layers of the target's own class as blocks of a head, with their latent attention, experts, gates and biases.

The class is from transformers. The head's own `attend` replaces its attention function and is passed through the layer
as a keyword, so that training and drafting see the same keys, whatever the layer does before and after.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PreTrainedConfig

from heads.core.errors import UserError
from heads.kernels.product import Product
from heads.kernels.tree_attention import Attend
from heads.parts.layers import restore_buffers
from heads.targets.families import FIXED_ROTATIONS

ATTENTION = "draftsmith"
"""Name of the head's attention function in transformers' interface."""
BLOCK_FAMILY = {"mimo": "qwen2"}
"""Model types that transformers does not know -> the type with the same decoder layer."""
NOT_OF_A_LAYER = (
    *("quantization_config", "dtype", "torch_dtype", "auto_map", "architectures", "_name_or_path", "id2label"),
    *("label2id", "problem_type", "transformers_version"),
)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    *,
    scaling: float,
    attend: Attend,
    **_: object,
) -> tuple[Tensor, None]:
    # `attend` divides scores by the square root of the width. Some families use another factor.
    factor = scaling * query.shape[-1] ** 0.5
    if abs(factor - 1) > 1e-6:
        query = query * factor
    # Under autocast, some layers project in bfloat16 and rotate in float32.
    return attend(query.to(value.dtype), key.to(value.dtype), value).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


def block_record(config: PreTrainedConfig, count: int) -> dict[str, object]:
    """Return the settings of `count` full-attention layers of the same kind as the last layer of a Hugging Face
    `config`, in JSON types, without the target's number of layers and vocabulary."""
    record: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    for name in NOT_OF_A_LAYER:
        record.pop(name, None)
    record["model_type"] = BLOCK_FAMILY.get(record["model_type"], record["model_type"])
    record |= {"num_hidden_layers": count, "vocab_size": 1, "pad_token_id": None, "bos_token_id": None}
    record |= {"eos_token_id": None, "tie_word_embeddings": False}
    if record.get("layer_types") is not None:
        record["layer_types"] = ["full_attention"] * count
    if record.get("mlp_layer_types") is not None:
        record["mlp_layer_types"] = record["mlp_layer_types"][-1:] * count
    if "first_k_dense_replace" in record:  # the modules are mixtures of experts, as the last layers are
        record["first_k_dense_replace"] = 0
    if "mlp_only_layers" in record:
        record["mlp_only_layers"] = []
    if "sliding_window" in record:
        record |= {"sliding_window": None, "use_sliding_window": False}
    return record


class BlockMaker:
    """Layers, norms and rotary positions of one family, built from the result of `block_record`."""

    def __init__(self, record: dict[str, Any]) -> None:
        config = AutoConfig.for_model(**record)
        kind = (config.rope_parameters or {}).get("rope_type", "default")
        if kind not in (*FIXED_ROTATIONS, "proportional"):
            raise UserError(f"rotary positions of kind {kind} depend on the text's length; such modules cannot be used")
        decoder: Any = AutoModel.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
        if "experts" in str(decoder):  # the loop over experts supports every dtype, and autocast
            decoder.set_experts_implementation("eager")
            for module in decoder.modules():
                if hasattr(module, "experts"):
                    module.experts.register_forward_pre_hook(count_experts)
        self.layers: list[nn.Module] = [TargetBlock(layer) for layer in decoder.layers]
        self.norm: Callable[[], nn.Module] = lambda: type(decoder.norm)(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary: nn.Module = decoder.rotary_emb


def count_experts(experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Count the bytes that the experts of some tokens read at most, like those of a product. inputs: states, (R, A)
    each token's experts, and their weights."""
    weights = [*experts.parameters()]  # (X, ...) each
    X = len(weights[0])
    Product.bytes_read += min(X, inputs[1].numel()) * sum(weight.nbytes for weight in weights) // X


class TargetBlock(nn.Module):
    """One decoder layer, with the interface of the blocks of `heads.methods.mtp`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        cos, sin = cos_sin
        out = self.layer(x, position_embeddings=(cos[:, 0], sin[:, 0]), attention_mask=None, attend=attend)
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden

    def _apply(self, fn: object, recurse: bool = True) -> "TargetBlock":
        """Keep the dtype of a router's score correction: in bfloat16, the router would choose other experts."""
        corrections = {
            name: buffer for name, buffer in self.named_buffers() if name.endswith("e_score_correction_bias")
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        restore_buffers(self, corrections)
        return self
