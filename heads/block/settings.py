"""Config shared by heads that draft a block."""

import math
from dataclasses import dataclass, field

from heads.block.attention import Reach
from heads.errors import UserError, expect, expect_one_of
from heads.layers import FULL, LAYER_TYPES, MOST, SLIDING, BlockConfig
from heads.settings import D_PACE, EXPONENTIAL, DraftBlockSettings
from heads.tree import MOST_NODES

MOST_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class DraftBlockConfig(BlockConfig, DraftBlockSettings):
    """Everything that the function of such a head depends on."""

    aux_layer_ids: tuple[int, ...] = field()
    mask_token_id: int = field()
    draft_vocab_size: int | None = None
    """Published heads: number of tokens that can be drafted; their logits use their rows of the target's output head.
    Null: all."""
    sliding_causal: bool = True
    """Published heads: False if a row of a sliding layer sees all rows of its block."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        return (FULL if self.sliding_window is None else SLIDING,) * (self.num_layers - 1) + (FULL,)

    def reaches(self, causal: bool) -> list[Reach]:
        """Return the bounds of what the rows of each layer see. `causal`: no row sees later rows."""
        slides = Reach(causal or bool(self.sliding_causal), self.sliding_window)
        return [slides if kind == SLIDING else Reach(causal) for kind in self.kinds]

    @property
    def columns(self) -> int:
        """Return the number of tokens that can be drafted."""
        return self.draft_vocab_size or self.vocab_size

    def check(self, fewest_rows: int) -> None:
        """Raise UserError for an invalid config."""
        self.check_block()
        self.check_start()
        rows, most, types, window = self.block_size, self.max_position_embeddings, self.layer_types, self.sliding_window
        expect(fewest_rows <= rows <= MOST_NODES, "head.block_size", f"{fewest_rows} to {MOST_NODES}", rows)
        expect(rows <= most, "head.block_size", f"no more than the target's context of {most}", rows)
        expect(1 <= self.num_layers <= MOST_LAYERS, "head.num_layers", f"1 to {MOST_LAYERS}", self.num_layers)
        fits = types is None or (len(types) == self.num_layers and set(types) <= {*LAYER_TYPES})
        what = f"{' or '.join(LAYER_TYPES)} for each of {self.num_layers} layers"
        expect(fits, "head.layer_types", what, types)
        fits = window is None or (isinstance(window, int) and rows <= window < MOST)
        what = f"a whole number from head.block_size ({rows}) to below 2^53"
        expect(fits, "head.sliding_window", what, window)
        if (window is not None) is not (SLIDING in self.kinds):
            has = "a window, and no layer slides" if window else "layers that slide, and no window"
            raise UserError(f"head.sliding_window, head.layer_types: expected both or none, got {has}")
        expect(self.num_anchors >= 1, "head.num_anchors", "1 or more", self.num_anchors)
        expect(0 < self.gamma < math.inf, "head.gamma", "a number above 0", self.gamma)
        expect_one_of((EXPONENTIAL, D_PACE), "head.weights", self.weights)
        is_id = type(self.mask_token_id) is int and 0 <= self.mask_token_id < self.vocab_size
        what = f"an id below the target's {self.vocab_size} tokens"
        expect(is_id, "head.mask_token_id", what, self.mask_token_id)
        are_ids = all(isinstance(aux, int) for aux in self.aux_layer_ids)
        expect(are_ids, "head.aux_layer_ids", "numbers of layers", self.aux_layer_ids)
