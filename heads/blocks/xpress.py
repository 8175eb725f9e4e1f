"""XPress (arXiv 2608.02438): DFlash, with a causal refiner that adds to the logits of each row by the tokens before it.

    x_j = in [down_h h_j ; down_g mean(h) ; w1 t_j]       t_j the token before row j; the mean is over the block's rows
    y_j = x_j + sum over i <= j of L[:, j, i] * x_i       a mix of rows, by channel
    q_j = softmax(lm_head h_j + w2 (y_j + mlp(y_j)))      over the `xpress_topc` likeliest tokens by lm_head

So q_j depends on all tokens drafted before, and any tree is drafted level by level. The root's row reads the root
itself in the place of the token before it, as in vLLM, which does not know that token; speculators' trainer reads it.

vLLM drafts the likeliest tokens by Jacobi iteration: each pass refines the whole block by the tokens of the pass
before. After `block_size` - 1 passes, the number that is saved with a head, these are the tokens that are likeliest one
after the other. The authors stop after 6. vLLM never samples a draft, and hands no q on if `draft_sample_method` asks
for it. Tensor names are vLLM's.

Loss: DFlash's at q, with the true tokens before each row, plus consistency_weight times its mean over
`consistency_passes` rounds, in which a row reads what the round before found likeliest (the first one: what lm_head
finds), plus base_weight times DFlash's own, without the refiner.

Letters: M blocks, R rows of a block, K depth, D hidden, r rank, V vocabulary, W paths.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.blocks.backbone import NextLogits
from heads.blocks.block_config import BlockForm
from heads.blocks.block_loss import BlockStates, Labels, RowLosses, among, product
from heads.blocks.dflash import DFlash, DFlashConfig
from heads.methods.method_settings import XPressSettings
from heads.parts.layers import MLP
from heads.parts.step_cost import flops


class XPressConfig(DFlashConfig, XPressSettings):
    form: ClassVar[BlockForm] = BlockForm(
        title="XPress",
        classes=("Qwen3XPressModel", "XPressSpeculator", "XPressDraftModel"),
        settings=("xpress_rank", "xpress_mlp_hidden"),
        optional=("xpress_topc",),
        nested=False,
        renamed={
            r"^refiner_head\.": "xpress_head.",
            r"^xpress_head\.token_embed\.": "xpress_head.w1.",
            r"^xpress_head\.readout\.": "xpress_head.w2.",
            r"^xpress_head\.mix_l$": "xpress_head.mix.L",
            r"^xpress_head\.mlp_(gate|up|down)\.": r"xpress_head.mlp.\1_proj.",
        },
        in_sglang=False,
        fixed_depth=True,
    )

    draft_vocab_size: None = None

    @property
    def candidates(self) -> int:
        return min(self.xpress_topc or self.vocab_size, self.vocab_size)

    @property
    def vllm_limit(self) -> str | None:
        rank = self.xpress_rank
        inner = self.xpress_mlp_hidden
        if rank >= 16 and rank & (rank - 1) == 0 and inner % 64 == 0:
            return None
        return (
            "takes an xpress_rank that is a power of two from 16 on, and an xpress_mlp_hidden in steps of 64, not "
            f"{rank} and {inner}"
        )

    def engine_fields(self) -> dict[str, object]:
        return super().engine_fields() | {
            "sample_from_anchor": False,
            "xpress_block_size": self.block_size,
            "xpress_num_passes": self.depth,  # as many as draft token by token
            "xpress_topc": self.candidates if self.xpress_topc else 0,
        }

    @classmethod
    def read_fields(cls, fields: Mapping[str, Any], weights: dict[str, Tensor]) -> dict[str, object]:
        if "xpress_mlp_ratio" in fields:  # in speculators' form
            fields = {**fields, "xpress_mlp_hidden": fields["xpress_mlp_ratio"] * fields["xpress_rank"]}
        return super().read_fields(fields, weights)


class Mixer(nn.Module):
    """Causal mix of the rows of a block, with weights of its own for each channel."""

    def __init__(self, rank: int, rows: int) -> None:
        super().__init__()
        self.L = nn.Parameter(torch.zeros(rank, rows, rows))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., R, r)"""
        rows = x.shape[-2]
        mix = self.L[:, :rows, :rows].tril().to(x.dtype)
        return x + torch.einsum("cji,...ic->...jc", mix, x)


class Refiner(nn.Module):
    """Low-rank addition to the logits of a block's rows, from its states and the tokens before its rows."""

    tables = ("w2.weight",)

    def __init__(self, config: XPressConfig) -> None:
        super().__init__()
        D = config.hidden_size
        V = config.vocab_size
        r = config.xpress_rank
        self.w1 = nn.Embedding(V, r)
        self.down_h, self.down_g = (nn.Linear(D, r, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * r, r, bias=False)
        self.mix = Mixer(r, config.block_size)
        self.mlp = MLP(r, config.xpress_mlp_hidden)
        self.w2 = nn.Linear(r, V, bias=False)
        nn.init.normal_(self.w1.weight, std=0.02)

    def of_states(self, states: Tensor) -> Tensor:
        """Return (M, R, 2 r), what the refiner reads of the states (M, R, D) of whole blocks."""
        mean = self.down_g(states.mean(1, keepdim=True)).expand(-1, states.shape[1], -1)
        return torch.cat([self.down_h(states), mean], -1)

    def forward(self, before: Tensor, of_states: Tensor) -> Tensor:
        """Return (..., R, r), which w2 makes into what is added to the logits. before (..., R): the tokens before the
        first R rows; of_states (..., R, 2 r)."""
        x = self.mix(self.in_proj(torch.cat([of_states, self.w1(before).to(of_states.dtype)], -1)))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class XPress(DFlash):
    """XPress head. vLLM uses the same tensor names."""

    Config: ClassVar[type[XPressConfig]] = XPressConfig
    config: XPressConfig
    training_settings = DFlash.training_settings | {"consistency_weight", "consistency_passes", "base_weight"}

    def __init__(self, config: XPressConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        self.xpress_head = Refiner(config)

    def row_losses(self, logits: Tensor, block: BlockStates, labels: Labels) -> RowLosses:
        config = self.config
        refine = self.xpress_head
        roots = block.roots[:, None]
        of_states = refine.of_states(block.states)

        def refined(before: Tensor) -> Tensor:
            latent = refine(torch.cat([roots, before], 1), of_states)[:, 1:]
            return logits + product(latent.to(logits.dtype), refine.w2.weight)

        rows = super().row_losses(refined(labels.previous), block, labels)
        values = rows.values
        best = logits.argmax(-1)
        if config.base_weight:
            values = values + config.base_weight * super().row_losses(logits, block, labels).values
        for _ in range(config.consistency_passes if config.consistency_weight else 0):
            drafted = refined(torch.cat([roots, best[:, :-1]], 1))
            value = super().row_losses(drafted, block, labels).values
            values = values + config.consistency_weight / config.consistency_passes * value
            best = drafted.argmax(-1)
        return replace(rows, values=values)

    def condition(self, logits: Tensor, block: BlockStates) -> NextLogits:
        refine = self.xpress_head
        count = self.config.candidates
        of_states = refine.of_states(block.states)
        tokens = None
        if count < logits.shape[-1]:
            values, tokens = logits.topk(count, -1)  # (M, K, C)
            table = refine.w2.weight[tokens].to(logits.dtype)  # (M, K, C, r)

        def next_logits(path: Tensor, parents: Tensor) -> Tensor:
            W = path.shape[1]
            k = path.shape[2] - 1
            before = torch.cat([path[..., :1], path], -1)  # (M, W, k + 2)
            latent = refine(before, of_states[:, None, : k + 2].expand(-1, W, -1, -1))[..., -1, :].to(logits.dtype)
            if tokens is None:
                return logits[:, k, None] + refine.w2(latent)  # type: ignore[no-any-return]
            scores = values[:, k, None] + latent @ table[:, k].mT  # (M, W, C)
            return among(tokens[:, k, None], scores, logits.shape[-1])

        return next_logits

    def correction_flops(self) -> int:
        rounds = self.config.consistency_passes if self.config.consistency_weight else 0
        rows, table = self.config.block_size, flops(self.xpress_head.w2)  # for rows that draft alone
        return rounds * rows * (flops(self.xpress_head) - table) + (self.depth * (1 + rounds) - rows) * table
