"""Domino (arXiv 2605.29707): DFlash, with a GRU over the tokens before a row, which corrects the row's logits.

    g_k = GRU(e(t_k), g_{k-1})                                   t_0 the root, t_k the k-th draft token, g_{-1} = 0
    q_k = softmax(lm_head h_j + W2 SiLU(W1 [h_j ; g_k]))         the token after t_k

So q_k depends on all tokens drafted before. A tree is drafted level by level, and each node continues the state of its
parent. The first `pure_draft_prefix_len` draft tokens are lm_head's alone. With `shift_label`, as in the published
heads, j = k: each row drafts the token after its own position, and a block's last row drafts nothing. Without,
j = k + 1, as in DFlash. A new head adds nothing: W2 is 0.

Loss: (1 - w) times DFlash's at q, with the true tokens before each row, plus w times DFlash's own, without the
correction. w falls linearly from 1 to 0 in the first `base_decay` of the training.

SGLang drafts the likeliest tokens one after the other: the first one of all, the others of the 2,048 that lm_head finds
likeliest in any of their rows. Tensor names are its.

Letters: C or M blocks, K depth, D hidden, G width of the GRU, V vocabulary, W paths.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self, cast

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heads.blocks.backbone import NextLogits
from heads.blocks.block_config import BlockForm
from heads.blocks.block_loss import BlockStates, Labels, RowLosses, product
from heads.blocks.dflash import DFlash, DFlashConfig
from heads.methods.method_settings import DominoSettings
from heads.parts.step_cost import flops


class DominoConfig(DFlashConfig, DominoSettings):
    form: ClassVar[BlockForm] = BlockForm(
        title="Domino",
        classes=("DFlashDraftModel", "DominoDraftModel"),
        settings=("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
        in_vllm=False,
    )
    draft_vocab_size: None = None

    @model_validator(mode="after")
    def check_prefix(self) -> Self:
        if self.pure_draft_prefix_len >= self.depth:
            raise ValueError(
                f"pure_draft_prefix_len: expected less than the {self.depth} draft tokens of a block, got "
                f"{self.pure_draft_prefix_len}"
            )
        return self

    @property
    def first_row(self) -> int:
        return 0 if self.shift_label else 1

    @property
    def sglang_limit(self) -> str | None:
        first = self.pure_draft_prefix_len
        return None if first == 1 else f"takes a pure_draft_prefix_len of 1, not {first}"

    def engine_fields(self) -> dict[str, object]:
        return super().engine_fields() | {"projector_type": "domino"}

    @classmethod
    def read_fields(cls, fields: Mapping[str, object], weights: dict[str, Tensor]) -> dict[str, object]:
        return super().read_fields({"pure_draft_prefix_len": 0, "shift_label": False, **fields}, weights)


class Domino(DFlash):
    """Domino head. SGLang uses the same tensor names."""

    Config: ClassVar[type[DominoConfig]] = DominoConfig
    config: DominoConfig
    training_settings = DFlash.training_settings | {"base_decay"}
    tables = ("embed_proj.2.weight",)

    def __init__(self, config: DominoConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        D = config.hidden_size
        G = config.gru_hidden_dim
        self.prefix_gru = nn.GRU(D, G, bias=False, batch_first=True)
        inner = nn.Linear(D + G, config.emb_dim, bias=False)
        outer = nn.Linear(config.emb_dim, config.vocab_size, False)
        self.embed_proj = nn.Sequential(inner, nn.SiLU(), outer)
        nn.init.zeros_(outer.weight)

    def row_losses(self, logits: Tensor, block: BlockStates, labels: Labels) -> RowLosses:
        first = self.config.pure_draft_prefix_len
        states = block.rows
        inner = self.embed_proj[:2]
        outer = cast(nn.Linear, self.embed_proj[2])
        read = self.prefix_gru(block.embed_tokens(labels.previous).to(states.dtype))[0]  # (C, K, G)
        latent = inner(torch.cat([states, read], -1)[:, first:])
        added = product(latent.to(logits.dtype), outer.weight)
        rows = super().row_losses(torch.cat([logits[:, :first], logits[:, first:] + added], 1), block, labels)
        weight = 1 - labels.progress / self.config.base_decay
        if weight <= 0:
            return rows
        base = super().row_losses(logits, block, labels).values
        return replace(rows, values=(1 - weight) * rows.values + weight * base)

    def condition(self, logits: Tensor, block: BlockStates) -> NextLogits:
        first = self.config.pure_draft_prefix_len
        states = block.rows
        read = states.new_zeros(len(states), 1, self.config.gru_hidden_dim)  # (M, W, G), of the paths of the last call

        def next_logits(path: Tensor, parents: Tensor) -> Tensor:
            nonlocal read
            W = path.shape[1]
            k = path.shape[2] - 1
            before = read.gather(1, parents[..., None].expand(-1, -1, read.shape[2]))
            token = block.embed_tokens(path[..., k]).to(states.dtype)
            read = self.prefix_gru(token.flatten(0, 1)[:, None], before.flatten(0, 1)[None])[1][0].unflatten(0, (-1, W))
            base = logits[:, k, None].expand(-1, W, -1)
            if k < first:
                return base
            return base + self.embed_proj(torch.cat([states[:, k, None].expand(-1, W, -1), read], -1))  # type: ignore[no-any-return]

        return next_logits

    def correction_flops(self) -> int:
        of_tokens, of_states = self.prefix_gru.parameters()  # tokens' embeddings have no gradient
        unread = self.config.spare_rows + self.config.pure_draft_prefix_len  # rows
        return self.depth * (4 * of_tokens.numel() + 6 * of_states.numel()) - unread * flops(self.embed_proj)
