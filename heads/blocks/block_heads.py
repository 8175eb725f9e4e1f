"""The heads that draft a block."""

from heads.blocks.backbone import DraftBlockHead
from heads.blocks.dflash import DFlash
from heads.blocks.dflash2 import DFlash2
from heads.blocks.domino import Domino
from heads.blocks.dspark import DSpark
from heads.blocks.lilicorr import LiLiCorr
from heads.blocks.xpress import XPress

BLOCK_HEADS: dict[str, type[DraftBlockHead]] = {
    head.Config.form.title.lower(): head for head in (DFlash, DFlash2, DSpark, LiLiCorr, XPress, Domino)
}
"""Classes by kind."""
