"""DFlash (arXiv 2602.06036): a block of masks behind the root is filled in one pass, each token blind to the others.

Row k of a block predicts x_{a+k}, its own place, for k = 1 .. block_size - 1; the root's row is not read. So the draft
tokens are independent given the context, and q is the marginal of each. A tree's level holds the likeliest tokens of
its row, the same below every node. With `causal: true` it is JetSpec's.

Loss: `heads.block.draft`, of the tokens of the text or of the target's distribution.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from heads.block.draft import DraftBlockHead
from heads.block.settings import DraftBlockConfig, DraftBlockSettings
from heads.errors import expect_one_of
from heads.labels import LABELS
from heads.losses import LOSSES


@dataclass(frozen=True, kw_only=True)
class DFlashSettings(DraftBlockSettings):
    """Settings of the head in a recipe."""

    loss: str = "kl"
    """`labels`: cross-entropy on the text. Or a divergence between the distributions of target and draft: `kl`,
    `cross_entropy`, `reverse_kl`, `total_variation`, `negative_log_acceptance`, `jsd` or `kl_tv`."""
    causal: bool = False
    """Rows see no later rows of their block (JetSpec)."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DraftBlockConfig, DFlashSettings):
    """Everything that the head's function and its training loss depend on."""

    def __post_init__(self) -> None:
        expect_one_of([LABELS, *LOSSES], "head.loss", self.loss)


class DFlash(DraftBlockHead):
    """The head. Its tensors bear the names that vLLM and SGLang read."""

    Config: ClassVar[type[DFlashConfig]] = DFlashConfig
    config: DFlashConfig
    first_row: ClassVar[int] = 1

    def __init__(self, config: DFlashConfig, kept: Tensor | None = None) -> None:
        super().__init__(config, kept)
        self.terms = ((1.0, config.loss),)
