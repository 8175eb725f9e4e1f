"""Feed-forward parts of a native decoder: a gated MLP, or a mixture of experts with a router.

Letters: R rows, D hidden, I intermediate width, X experts, A experts active per token.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.activations import ACT2FN

from heads.backends.torch.linear import Product

Activation = Callable[[Tensor], Tensor]
Multiply = Callable[[Tensor, Tensor], Tensor]
"""Product of rows (R, D) and a weight (O, D) -> (R, O)."""
STATIC_ROWS = 64
"""Maximum number of rows for which a GPU copies the experts' weights per token. With more rows, the host waits for the
routing."""


class Router(Protocol):
    """Choice of each token's experts."""

    weight: Tensor
    """(X, D)."""

    def __call__(self, x: Tensor, multiply: Multiply = linear) -> tuple[Tensor, Tensor]:
        """Return weights (R, A) and expert ids (R, A) for x (R, D). `multiply` computes the product with `weight`."""


def activation(module: Any) -> Activation:
    """Return the module's activation, SiLU if it has none. Every form of SiLU is returned as `silu`, which kernels
    recognize."""
    own = getattr(module, "act_fn", silu)
    return silu if isinstance(own, (nn.SiLU, type(ACT2FN["silu"]))) else own


class GatedMLP:
    """down(act(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, module: Any, *, draft: bool = False) -> None:
        self.gate_up = Product.of(module.gate_proj, module.up_proj, draft=draft)
        self.down = Product.of(module.down_proj, draft=draft)
        self.activation = activation(module)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the residual stream (R, D) after the MLP, from normed states x (R, D) and the residual stream."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up), residual)


class Experts:
    """Router and experts, with shared experts if the family has them."""

    def __init__(self, module: Any, router: Router) -> None:
        self.router = router
        self.gate_up: Tensor = module.experts.gate_up_proj.detach()  # (X, 2 I, D)
        self.down: Tensor = module.experts.down_proj.detach()  # (X, D, I)
        self.activation = activation(module.experts)
        self.shared = GatedMLP(module.shared_experts) if hasattr(module, "shared_experts") else None

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the residual stream (R, D) after the experts, from normed states x (R, D) and the residual stream."""
        weights, ids = self.router(x)
        if self.shared is not None:
            residual = self.shared(x, residual)
        return self.visit(x, ids, weights).add_(residual)

    def visit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, in the order of its list and independent of the
        other tokens of the step."""
        static = x.device.type != "cpu" and len(x) <= STATIC_ROWS
        out = self.gathered(x, ids) if static else self.by_expert(x, ids)
        return torch.bmm(weights.to(x.dtype)[:, None], out)[:, 0]

    def gathered(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return (R, A, D) from one product per row and expert, each with a copy of the expert's weights. Shapes are
        static, and nothing waits for the host."""
        R, A = ids.shape
        visits = x.repeat_interleave(A, dim=0)[..., None]  # (R * A, D, 1)
        gate, up = torch.bmm(self.gate_up[ids.flatten()], visits)[..., 0].chunk(2, dim=-1)
        return torch.bmm(self.down[ids.flatten()], self.activation(gate).mul_(up)[..., None]).view(R, A, -1)

    def by_expert(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return (R, A, D) from one product per expert, over the rows that chose it."""
        out = x.new_empty(*ids.shape, x.shape[1])
        for expert in ids.unique().tolist():
            row, place = torch.where(ids == expert)
            gate, up = linear(x[row], self.gate_up[expert]).chunk(2, dim=-1)
            out[row, place] = linear(self.activation(gate).mul_(up), self.down[expert])
        return out


class SoftmaxRouter:
    """Router of Mixtral and Qwen: the A likeliest experts, by a softmax in float32."""

    def __init__(self, gate: Any, config: Any, *, renormalise: bool) -> None:
        self.weight: Tensor = gate.weight.detach()
        self.A, self.renormalise = int(config.num_experts_per_tok), renormalise

    def __call__(self, x: Tensor, multiply: Multiply = linear) -> tuple[Tensor, Tensor]:
        """Same as `Router.__call__`."""
        weights, ids = multiply(x, self.weight).float().softmax(-1).topk(self.A, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if self.renormalise else weights), ids


class GroupedRouter:
    """Router of DeepSeek (arXiv 2405.04434, section 2.1.2; 2412.19437, section 2.1.2): experts of the best groups."""

    def __init__(self, gate: Any, config: Any) -> None:
        self.weight: Tensor = gate.weight.detach().float()
        self.A, self.scale = int(config.num_experts_per_tok), float(config.routed_scaling_factor)
        self.bias: Tensor | None = getattr(gate, "e_score_correction_bias", None)
        self.num_groups, self.best = config.n_group, config.topk_group
        self.grouped = self.bias is not None or config.topk_method == "group_limited_greedy"
        self.renormalise = self.bias is not None and config.norm_topk_prob

    def __call__(self, x: Tensor, multiply: Multiply = linear) -> tuple[Tensor, Tensor]:
        """Same as `Router.__call__`."""
        logits = multiply(x.float(), self.weight)
        scores = logits.softmax(-1) if self.bias is None else logits.sigmoid()
        ranks = scores if self.bias is None else scores + self.bias
        if self.grouped:
            groups = ranks.unflatten(-1, (self.num_groups, -1))  # (R, groups, experts of one)
            merit = groups.amax(-1) if self.bias is None else groups.topk(2, dim=-1).values.sum(-1)
            left_out = torch.ones_like(merit, dtype=torch.bool).scatter_(1, merit.topk(self.best).indices, False)
            ranks = groups.masked_fill(left_out[..., None], -torch.inf).flatten(1)
        ids = ranks.topk(self.A, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, ids
