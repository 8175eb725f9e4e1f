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

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from heads.core.contract import StepCost
from heads.core.tree import TreeShape, check_width
from heads.methods.block import BlockStates, Follow
from heads.methods.block_loss import BlockLoss, BlockTask, block_loss, chunks_of
from heads.methods.dflash import DFlash, DFlashConfig
from heads.methods.layers import MLP
from heads.methods.losses import matmul
from heads.methods.settings import XPressSettings
from heads.methods.step_cost import flops


class XPressConfig(DFlashConfig, XPressSettings):
    """Everything that the head's function and its training loss depend on."""

    draft_vocab_size: None = None

    @property
    def candidates(self) -> int:
        """Number of tokens of a row that can be drafted."""
        return min(self.xpress_topc or self.vocab_size, self.vocab_size)


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

    def __init__(self, config: XPressConfig) -> None:
        super().__init__()
        D, V, r = config.hidden_size, config.vocab_size, config.xpress_rank
        self.w1 = nn.Embedding(V, r)
        self.down_h, self.down_g = (nn.Linear(D, r, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * r, r, bias=False)
        self.mix, self.mlp = Mixer(r, config.block_size), MLP(r, config.xpress_mlp_hidden)
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

    def __init__(self, config: XPressConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        self.xpress_head = Refiner(config)

    def losses(self, block: BlockStates, previous: Tensor, task: BlockTask, lm_head_weight: Tensor) -> BlockLoss:
        config, refine, roots = self.config, self.xpress_head, block.roots[:, None]
        read = refine.of_states(block.states)
        chosen = self.rounds(block, read, lm_head_weight)
        latents = [refine(torch.cat([roots, before], 1), read)[:, 1:] for before in (previous, *chosen)]
        weights = [config.consistency_weight / len(chosen)] * len(chosen) if chosen else []
        if config.base_weight:
            latents.append(torch.zeros_like(latents[0]))
            weights.append(config.base_weight)
        return block_loss(
            block.states[:, 1:],
            lm_head_weight,
            replace(task, rounds=tuple(weights)),
            bias_states=latents[0],
            bias_weight=refine.w2.weight,
            rounds=torch.stack(latents[1:]) if weights else None,
        )

    @torch.no_grad()
    def rounds(self, block: BlockStates, read: Tensor, lm_head_weight: Tensor) -> list[Tensor]:
        """Return the tokens (M, K) before the drafting rows in each round. read: `Refiner.of_states` of the block."""
        config, refine, (M, R, _) = self.config, self.xpress_head, block.states.shape
        if not config.consistency_weight or not config.consistency_passes:
            return []
        found = []
        for part in chunks_of(M, R - 1, len(lm_head_weight), read.device):
            rows = block.states[part, 1:].flatten(0, 1)
            logits = matmul(rows, lm_head_weight.to(rows.dtype).T).unflatten(0, (-1, R - 1))
            roots, best, before = block.roots[part, None], logits.argmax(-1), []
            for i in range(config.consistency_passes):
                before.append(torch.cat([roots, best[:, :-1]], 1))
                if i + 1 < config.consistency_passes:
                    latent = refine(torch.cat([roots, before[-1]], 1), read[part])[:, 1:]
                    best = (logits + refine.w2(latent)).argmax(-1)
            found.append(before)
        return [torch.cat(of_round) for of_round in zip(*found, strict=True)]

    def follow(self, logits: Tensor, block: BlockStates) -> Follow:
        refine, count = self.xpress_head, self.config.candidates
        read, tokens = refine.of_states(block.states), None
        if count < logits.shape[-1]:
            values, tokens = logits.topk(count, -1)  # (M, K, C)
            table = refine.w2.weight[tokens].to(logits.dtype)  # (M, K, C, r)

        def after(path: Tensor) -> Tensor:
            (M, W, j), k = path.shape, path.shape[2] - 1
            before = torch.cat([path[..., :1], path], -1)  # (M, W, j + 1)
            latent = refine(before, read[:, None, : j + 1].expand(-1, W, -1, -1))[..., j, :].to(logits.dtype)
            if tokens is None:
                return logits[:, k, None] + refine.w2(latent)  # type: ignore[no-any-return]
            added = latent @ table[:, k].mT  # (M, W, C)
            made = logits.new_full((M, W, logits.shape[-1]), -torch.inf)
            return made.scatter_(-1, tokens[:, k, None].expand_as(added), values[:, k, None] + added)

        return after

    def check_draft(self, shape: TreeShape, capacity: int) -> None:
        super().check_draft(shape, capacity)
        check_width(shape, self.config.candidates)

    def step_cost(self, batch_size: int, length: int, *, width: int, most: int) -> StepCost:
        """Return the cost of the base class, and that of the rounds. Finding their tokens costs a product with the
        output head."""
        cost, config = super().step_cost(batch_size, length, width=width, most=most), self.config
        refine = self.xpress_head
        rows, drafted = cost.rows * config.block_size, cost.chunked
        rounds = config.consistency_passes if config.consistency_weight else 0
        table, rest = flops(refine.w2), flops(refine) - flops(refine.w2)
        work = rounds * rows * rest + (drafted * (rounds + bool(config.base_weight)) - (rows - drafted)) * table
        if rounds:
            work += drafted * (2 * config.vocab_size * config.hidden_size + (rounds - 1) * (table + rest) // 3)
        kept = (1 + rounds) * rows * width * (16 * config.xpress_rank + 4 * config.xpress_mlp_hidden)
        return replace(cost, flops=cost.flops + work, kept=cost.kept + kept)
