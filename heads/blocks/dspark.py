"""DSpark (arXiv 2607.05147): a block filled in one pass, with a Markov head that conditions each token on the one
before.

    z_j = lm_head h_j + W2 e_j                      predicts x_{a+1+j}, j = 0 .. block_size - 1
    e_j = W1[x_{a+j}]                               the Markov head, from the token before
    confidence_j = sigmoid(w . [h_j ; e_j] + b)     estimates how much of the target's distribution softmax z_j covers

The root's row is used, too, so row j is one token ahead of DFlash's row j.

x_{a+j} is the true token in training and the draft token in drafting. So q, the softmax of z, is conditioned on the
draft token before. Loss of a row = ce_weight * cross-entropy of the label + kl_weight * KL(p || q) + l1_weight * sum
|p - q| + confidence_weight * cross-entropy of the confidence with sum min(p, q).

Letters: D hidden, M blocks, K depth, r rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from heads.blocks.backbone import BlockState, DraftBlockHead
from heads.blocks.block_config import BlockForm, DraftBlockConfig
from heads.blocks.block_initial_weights import bigrams
from heads.blocks.block_loss import BlockStates, Labels, RowLosses, draft_distribution, product, row_losses
from heads.core.errors import expect
from heads.methods.method_settings import DSparkSettings
from heads.parts.initial_weights import TargetProbe
from heads.parts.part_settings import LABELS


class DSparkConfig(DraftBlockConfig, DSparkSettings):
    form: ClassVar[BlockForm] = BlockForm(
        title="DSpark",
        classes=("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"),
        settings=("markov_rank",),
        nested=False,
        renamed={r"^(?=markov_w[12]\.)": "markov_head.", r"^confidence_proj\.": "confidence_head.proj."},
        algorithm="dspark",
        in_llamacpp=True,
    )
    spare_rows: ClassVar[int] = 0

    def engine_fields(self) -> dict[str, object]:
        has_confidence = self.confidence_weight > 0
        return {
            "num_anchors": self.num_anchors,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": has_confidence,
            "confidence_head_with_markov": has_confidence,
            "sample_from_anchor": True,
        }

    @classmethod
    def read_fields(cls, fields: Mapping[str, Any], weights: dict[str, Tensor]) -> dict[str, object]:
        kind = fields.get("markov_head_type") or "vanilla"
        expect(kind == "vanilla", "markov_head_type", "vanilla, the Markov head that engines load", kind)
        settings = super().read_fields(fields, weights)
        name = "confidence_head.proj.weight"
        has_confidence = fields.get("enable_confidence_head", name in weights)
        if name in weights and weights[name].shape == (1, fields["hidden_size"]):  # it does not read the token before
            weights[name] = pad(weights[name], (0, settings["markov_rank"]))
        return settings | {"confidence_weight": float(has_confidence)}


class MarkovHead(nn.Module):
    """Low-rank logits of the next token from the token before it."""

    tables = ("markov_w2.weight",)

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.num_logits, bias=False)


class ConfidenceHead(nn.Module):
    """Logit of the share of the target's distribution that a row's distribution covers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return (...) logits from states (..., D) and W1 of the tokens before them (..., r)."""
        return self.proj(torch.cat([states, previous.to(states.dtype)], -1))[..., 0]  # type: ignore[no-any-return]


class DSpark(DraftBlockHead):
    """DSpark head. vLLM and SGLang use the same tensor names."""

    Config: ClassVar[type[DSparkConfig]] = DSparkConfig
    config: DSparkConfig
    training_settings = DraftBlockHead.training_settings | {"ce_weight", "kl_weight", "l1_weight"}

    def __init__(self, config: DSparkConfig, draft_to_target: Tensor | None = None) -> None:
        super().__init__(config, draft_to_target)
        self.markov_head = MarkovHead(config)
        width = config.hidden_size + config.markov_rank
        self.confidence_head = ConfidenceHead(width) if config.confidence_weight else None
        terms = {LABELS: config.ce_weight, "kl": config.kl_weight, "total_variation": 2 * config.l1_weight}
        self.terms = [(factor, name) for name, factor in terms.items() if factor]  # sum |p - q| is twice the variation

    @torch.no_grad()
    def initialise(self, probe: TargetProbe) -> None:
        super().initialise(probe)
        w1, w2 = bigrams(probe, self.config.markov_rank)
        self.markov_head.markov_w1.weight.copy_(w1)
        self.markov_head.markov_w2.weight.copy_(w2)
        if self.confidence_head is not None:
            nn.init.zeros_(self.confidence_head.proj.bias)

    @property
    def reads_target(self) -> bool:
        return self.confidence_head is not None or super().reads_target

    def row_losses(self, logits: Tensor, block: BlockStates, labels: Labels) -> RowLosses:
        latent = self.markov_head.markov_w1(labels.previous)  # (C, K, r)
        added = product(latent.to(logits.dtype), self.markov_head.markov_w2.weight)
        q = draft_distribution(logits + added)
        rows = row_losses(q, self.terms, labels)
        if self.confidence_head is None or labels.target is None:
            return rows
        covered = torch.minimum(labels.target.probs, q.probs.detach()).sum(-1).view_as(rows.values)
        confidence = self.confidence_head(block.states, latent).to(covered.dtype)
        unsure = binary_cross_entropy_with_logits(confidence, covered, reduction="none")
        return replace(rows, values=rows.values + self.config.confidence_weight * unsure)

    def conditioned(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        latent = self.markov_head.markov_w1(previous)
        return logits + self.markov_head.markov_w2(latent.to(logits.dtype))  # type: ignore[no-any-return]

    @torch.no_grad()
    def confidence(self, state: BlockState, tokens: Tensor) -> Tensor:
        """Return the confidence's logits (B, K) of the chain just drafted: tokens (B, K + 1), the root first. Runs the
        block again. The head has a confidence head."""
        assert self.confidence_head is not None
        before = self.markov_head.markov_w1(tokens[:, :-1])
        return self.confidence_head(self.draft_states(state).states, before)  # type: ignore[no-any-return]
