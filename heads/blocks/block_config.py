"""Config of heads that draft a block, and the form that engines and other projects give it in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import model_validator
from torch import Tensor

from heads.blocks.block_attention import AttentionWindow
from heads.core.errors import expect
from heads.core.strict_settings import Count, Number
from heads.methods.method_settings import DraftBlockSettings
from heads.parts.layers import FULL, SLIDING, BlockConfig
from heads.parts.part_settings import LayerIds


@dataclass(frozen=True, kw_only=True)
class BlockForm:
    """Form of a method's folders."""

    title: str
    """Name of the method. In lower case it is the kind, in recipes and in speculators' files."""
    classes: tuple[str, ...]
    """Model classes that config.json may name: the one that engines load, which is written, and other projects'."""
    settings: tuple[str, ...] = ()
    """Settings that config.json holds under the same names."""
    optional: tuple[str, ...] = ()
    """Settings that it may hold under the same names."""
    neutral: Mapping[str, object] = field(default_factory=dict)
    """Fields that are read only with these values, with which they have no effect."""
    nested: bool = True
    """True if the method's own fields are written into `dflash_config`."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Patterns of names that other projects give to the method's tensors, and what replaces them."""
    scales_embeddings: bool = False
    """True if vLLM multiplies the embeddings of such a head as its target does."""
    algorithm: str = "dflash"
    """Name of the method in vLLM's options and, in capitals, in SGLang's."""
    in_vllm: bool = True
    in_sglang: bool = True
    in_llamacpp: bool = False
    in_openvino: bool = False
    fixed_depth: bool = False
    """True if vLLM drafts another head's tokens unless it drafts as many as were trained."""


class DraftBlockConfig(BlockConfig, DraftBlockSettings):
    """Everything that the function of such a head depends on."""

    form: ClassVar[BlockForm]
    spare_rows: ClassVar[int] = 1
    """Rows of a block that draft nothing."""

    aux_layer_ids: LayerIds
    mask_token_id: Number
    draft_vocab_size: Count | None = None
    """Published heads: number of tokens that can be drafted; their logits use their rows of the target's output head.
    Null: all."""
    sliding_causal: bool = True
    """Published heads: False if a row of a sliding layer sees all rows of its block."""

    @model_validator(mode="after")
    def check_block(self) -> Self:
        rows = self.block_size
        window = self.sliding_window
        types = self.layer_types
        if rows > self.max_position_embeddings:
            longest = self.max_position_embeddings
            raise ValueError(f"block_size: expected at most the target's context of {longest}, got {rows}")
        if types is not None and len(types) != self.num_layers:
            raise ValueError(f"layer_types: expected one for each of {self.num_layers} layers, got {list(types)}")
        if window is not None and window < rows:
            raise ValueError(f"sliding_window: expected at least block_size ({rows}), got {window}")
        if (window is not None) is not (SLIDING in self.kinds):
            has = "a window, and no layer slides" if window else "layers that slide, and no window"
            raise ValueError(f"sliding_window, layer_types: expected both or none, got {has}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id: expected an id below {self.vocab_size}, got {self.mask_token_id}")
        return self

    @property
    def is_causal(self) -> bool:
        """True if no row of a block sees later rows."""
        return False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        return (FULL if self.sliding_window is None else SLIDING,) * (self.num_layers - 1) + (FULL,)

    @property
    def windows(self) -> list[AttentionWindow]:
        """What the rows of each layer see."""
        sliding = AttentionWindow(self.is_causal or self.sliding_causal, self.sliding_window)
        return [sliding if kind == SLIDING else AttentionWindow(self.is_causal) for kind in self.kinds]

    @property
    def depth(self) -> int:
        """Number of draft tokens of a block."""
        return self.block_size - self.spare_rows

    @property
    def first_row(self) -> int:
        """Row that predicts the first draft token; the root's is 0."""
        return self.spare_rows

    def drafting(self, rows: int) -> slice:
        """Return which of the rows of a block draft."""
        return slice(self.first_row, self.first_row + rows - self.spare_rows)

    @property
    def num_logits(self) -> int:
        """Number of logits of a row."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def candidates(self) -> int:
        """Number of tokens of a row that can be drafted."""
        return self.num_logits

    @property
    def vllm_limit(self) -> str | None:
        """Reason why vLLM does not support a head of these sizes, or None."""
        return None

    @property
    def sglang_limit(self) -> str | None:
        """The same of SGLang."""
        return None

    @property
    def llamacpp_limit(self) -> str | None:
        """The same of llama.cpp."""
        return None

    def engine_fields(self) -> dict[str, object]:
        """Return the method's own fields of config.json."""
        return {name: getattr(self, name) for name in self.form.settings}

    @classmethod
    def read_fields(cls, fields: Mapping[str, object], weights: dict[str, Tensor]) -> dict[str, Any]:
        """Return the method's own settings, from the fields of another project's config.json. `weights`, the tensors
        beside it, may be changed to the form that the head loads."""
        for name in cls.form.settings:
            expect(fields.get(name) is not None, name, "a number", None)
        names = (*cls.form.settings, *cls.form.optional)
        return {name: fields[name] for name in names if fields.get(name) is not None}
