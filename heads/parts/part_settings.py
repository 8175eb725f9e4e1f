"""Settings that several kinds of head have. This file does not import torch."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from heads.core.strict_settings import Count, Number, Positive, Settings
from heads.core.tree import MAX_NODES

LABELS: Final = "labels"
"""The loss that is the cross-entropy of the data's own tokens."""
Divergence = Literal["kl", "cross_entropy", "reverse_kl", "total_variation", "negative_log_acceptance", "jsd", "kl_tv"]
"""Names of `heads.parts.losses.LOSSES`."""
Loss = Literal["labels", Divergence]
COPYING: Final = "copying"
RANDOM: Final = "random"
D_PACE = "d_pace"
Decay = Annotated[float, Field(gt=0, le=1)]
Depth = Annotated[int, Field(ge=1, le=MAX_NODES)]
Layers = Annotated[int, Field(ge=1, le=64)]
LayerIds = Annotated[tuple[Number, ...], Field(min_length=1)]


class BlockSettings(Settings):
    """Settings of a head's decoder block."""

    intermediate_size: Count | None = None
    """Width of the MLP. Null: the target's."""
    num_attention_heads: Count | None = None
    """Number of attention heads. Null: the target's."""
    num_key_value_heads: Count | None = None
    """Number of key and value heads, each shared by a group of attention heads. Null: the target's."""
    head_dim: Count | None = None
    """Width of one attention head. Null: the target's."""
    rms_norm_eps: Positive | None = None
    """Epsilon of the norms. Null: the target's."""
    rope_theta: Positive | None = None
    """Base of the rotary frequencies. Null: the target's."""


class LaterStepsSettings(Settings):
    """Setting of heads that recycle their state."""

    later_slots: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the slots that go through the steps of the training after a module's own first, drawn anew each time.
    Their losses count as much as those of all would. Below 1 a training step takes less time and memory."""


class StartSettings(Settings):
    """Setting of heads whose initial weights can be computed from the target's features."""

    initial_weights: Literal["copying", "target", "random"] = "copying"
    """Weights before training. `target`: the head passes on the target's highest auxiliary hidden state and decodes it
    as the target would. `copying`: in addition, its first attention finds the token that followed earlier occurrences
    of the newest one. `random`: PyTorch's, as in other trainers."""


class RotarySettings(Settings):
    """Setting of heads whose rotary positions may be scaled."""

    rope_scaling: dict[str, Any] | None = None
    """Scaling of rotary positions, as in transformers' `rope_parameters` but without the base: `{rope_type: yarn,
    factor: 4.0, original_max_position_embeddings: 8192}`. Kinds: `yarn`, `llama3`, `linear`, `longrope`, and `default`
    for plain positions. Null: the target's."""
