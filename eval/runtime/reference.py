"""Speculative decoding as its papers state it: one loop on transformers' own models, without caches, batches or trees.

Read it first. `eval.runtime.engine` gives the same tokens, round for round, and its tests compare it with this loop. A
round continues a text x with K draft tokens y_1 .. y_K (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al.,
arXiv 2302.01318, algorithm 2):

    draft     y_i ~ q_i = softmax(draft(x, y_1 .. y_{i-1}) / T)                     i = 1 .. K
    verify    p_i = softmax(target(x, y_1 .. y_{i-1}) / T)                          i = 1 .. K + 1, in one pass
    accept    y_1, y_2, .. as long as u_i < p_i(y_i) / q_i(y_i), with u_i uniform in (0, 1)
    choose    z ~ norm(max(p_i - q_i, 0)) in place of the first y_i rejected, or z ~ p_{K+1} if none was

An emitted token has the target's distribution: it is an accepted y with probability q(y) min(1, p(y) / q(y)), which is
min(q(y), p(y)), and z gives the rest of p(y). At T = 0 a distribution is all on its likeliest token. Then a draft token
is accepted if it is the target's own, and z is the target's own.

Letters: T temperature in the formulas, K depth, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

Noise = Callable[[str, int, int, int], Tensor]
"""Function of a purpose, a position, a draft token's index and a size n -> (n,) float64, uniform in (0, 1)."""


def seeded(seed: int) -> Noise:
    generator = torch.Generator().manual_seed(seed)
    return lambda purpose, position, index, size: torch.rand(size, dtype=torch.float64, generator=generator)


@torch.no_grad()
def distributions(model: PreTrainedModel, text: Sequence[int], temperature: float) -> Tensor:
    """Return (tokens of the text, V) float64: the distribution of the next token after each of them."""
    ids = torch.tensor([text], device=model.device)
    logits: Tensor = model(ids, use_cache=False).logits[0].double().cpu()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits / temperature).softmax(-1)


def draw(weights: Tensor, uniform: Tensor) -> int:
    """Return a token, drawn in proportion to the weights (V,): the first of V exponential clocks with these rates."""
    return int((weights / -uniform.log()).argmax())


def generate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompt: Sequence[int],
    *,
    depth: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    eos_token_ids: Collection[int] = (),
    noise: Noise | None = None,
) -> tuple[list[int], list[int]]:
    """Return the new tokens, and how many of them were drafted, by round. The prompt's pass chooses the first token."""
    noise = noise or seeded(0)
    text = list(prompt)
    first = distributions(target, text, temperature)[-1]
    text.append(draw(first, noise("first", len(text), 0, len(first))))
    accepted_by_round: list[int] = []

    def ended() -> bool:
        return len(text) >= len(prompt) + max_new_tokens or text[-1] in eos_token_ids

    while not ended():
        root = len(text) - 1  # the position of the newest token

        q: list[Tensor] = []
        drafted: list[int] = []
        for i in range(depth):
            q.append(distributions(draft, text + drafted, temperature)[-1])
            drafted.append(draw(q[i], noise("draft", root, i, len(q[i]))))

        p = distributions(target, text + drafted, temperature)[root:]  # (K + 1, V)

        accepted = 0
        while accepted < depth:
            token = drafted[accepted]
            if noise("test", root, accepted, 1) >= p[accepted, token] / q[accepted][token]:
                break
            accepted += 1

        rest = p[accepted]
        if accepted < depth:
            rest = (rest - q[accepted]).clamp(min=0)
        last = draw(rest, noise("last", root, accepted, len(rest)))

        for token in [*drafted[:accepted], last]:
            if not ended():
                text.append(token)
        accepted_by_round.append(min(accepted, len(text) - 1 - root))
    return text[len(prompt) :], accepted_by_round
