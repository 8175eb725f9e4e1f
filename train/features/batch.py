"""The batch that a head's loss reads: packed rows with the features of the frozen target."""

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.base import Batch, SharedLayers
from heads.target.model import FrozenTarget
from train.data.packing import Rows


def make_batch(target: FrozenTarget, rows: Rows, aux_layer_ids: Sequence[int], dtype: torch.dtype) -> Batch:
    """Return the batch of `rows`, with features in the head's dtype, on the target's device.

    Under autocast, the target's matrix products are in its dtype, like the head's; otherwise in the target's own dtype.
    The target's logits, which the head learns, are always computed without autocast.
    """
    tokens, positions, documents = (
        part.to(target.device, non_blocking=True) for part in (rows.tokens, rows.positions, rows.documents)
    )
    features = target.packed_features(tokens, positions, documents, aux_layer_ids)
    with torch.no_grad():
        embeddings = target.shared.embed_tokens(tokens)

    def logits(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return target.shared.lm_head(hidden.to(target.dtype))

    return Batch(
        tokens=tokens,
        loss_mask=rows.loss_mask.to(target.device, non_blocking=True),
        positions=positions,
        documents=documents,
        embeddings=embeddings.to(dtype),
        aux_hidden_states=features.aux_hidden_states.to(dtype),
        hidden=features.hidden.to(dtype),
        shared=SharedLayers(
            embed_tokens=target.shared.embed_tokens, lm_head=logits, lm_head_weight=target.lm_head_weight
        ),
    )
