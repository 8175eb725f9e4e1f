"""A target whose tensors have shapes and no values, for plans and for checks before a target is loaded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.core.errors import UserError, first_line
from heads.targets.frozen_target import Features, FrozenTarget, Opening
from heads.targets.load import auto_class
from heads.targets.target_files import load_config


class ShapeTarget(FrozenTarget):
    """A target whose tensors have shapes but no values. It accepts any head of its shape."""

    def __init__(self, model: PreTrainedModel, name: str, opening: Opening) -> None:
        super().__init__(model, name, opening=opening)
        self.fingerprint = ""
        untyped: Any = model
        untyped.to_empty(device="cpu").tie_weights()
        self.shared = replace(self.shared, lm_head_weight=self.lm_head_weight)

    def packed_features(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]
    ) -> Features:
        empty = torch.empty(*tokens.shape, self.hidden_size, dtype=self.dtype, device=self.device)
        return Features(empty.repeat(1, 1, len(aux_layer_ids)), empty)


def load_shape(
    path: str, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False, gguf_file: str | None = None
) -> ShapeTarget:
    """Return the shapes of a model from its config in a folder or on the Hub, in its stored dtype unless `dtype` is
    given. All work with it runs inside a mode in which tensors have no values."""
    config = load_config(path, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(
                config, dtype=dtype or stored, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # each family's config and class raise their own errors
        raise UserError(
            f"{path}: its config.json describes no causal language model ({first_line(error)}); name another"
        ) from error
    return ShapeTarget(model, path, Opening(trust_remote_code=trust_remote_code))
