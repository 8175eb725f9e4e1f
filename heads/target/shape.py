"""A target from its config alone: shapes without weights, for planning a run.

Create and use it inside a mode in which tensors have no values.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.errors import UserError, first_line
from heads.target.encoder_decoder import auto_class
from heads.target.frozen import Features, FrozenTarget, load_config


class ShapeTarget(FrozenTarget):
    """A target whose tensors have shapes but no values. It accepts any head of its shape as its own."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__(model, name)
        self.fingerprint = ""

    def packed_features(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]
    ) -> Features:
        """Return features of the right shape, without a pass through the layers."""
        made = [
            torch.empty(*tokens.shape, n * self.hidden_size, dtype=self.dtype, device=self.device)
            for n in (len(aux_layer_ids), 1)
        ]
        return Features(*made)


def load_shape(path: str, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> ShapeTarget:
    """Return a target with the shapes given by the config in a folder or on the Hub, in its stored dtype unless `dtype`
    is given."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model: Any = auto_class(config).from_config(
                config, dtype=dtype or stored, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # each family's config and class raise their own errors
        raise UserError(
            f"{path}: its config.json describes no causal language model ({first_line(error)}); name another"
        ) from error
    target = ShapeTarget(model, path)
    target.trust_remote_code = trust_remote_code
    model.to_empty(device="cpu").tie_weights()
    target.shared = replace(target.shared, lm_head_weight=target.lm_head_weight)
    return target
