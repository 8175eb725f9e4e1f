"""DFlash (arXiv 2602.06036): a block of masks after the root is filled in one pass, each token independently.

Row k of a block predicts x_{a+k}, the token at its own position, for k = 1 .. block_size - 1; the root's row is not
used. So the draft tokens are independent given the context, and q is the marginal of each. Each level of a tree holds
the likeliest tokens of its row, the same below every node. `causal: true` gives JetSpec's attention.

Loss: `heads.blocks.backbone`, on the tokens of the text or on the target's distribution.
"""

from typing import ClassVar

from torch import Tensor

from heads.blocks.backbone import DraftBlockHead
from heads.blocks.block_config import BlockForm, DraftBlockConfig
from heads.methods.method_settings import DFlashSettings


class DFlashConfig(DraftBlockConfig, DFlashSettings):
    form: ClassVar[BlockForm] = BlockForm(
        title="DFlash", classes=("DFlashDraftModel", "DFlashSpeculator"), in_llamacpp=True, in_openvino=True
    )

    @property
    def is_causal(self) -> bool:
        return self.causal


class DFlash(DraftBlockHead):
    """DFlash head. vLLM and SGLang use the same tensor names."""

    Config: ClassVar[type[DFlashConfig]] = DFlashConfig
    config: DFlashConfig
    training_settings = DraftBlockHead.training_settings | {"loss"}

    def __init__(self, config: DFlashConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        self.terms = ((1.0, config.loss),)
