"""What is asked of the runtime, and what it gives."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from eval.runtime.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """One prompt and how to go on from it."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """The output ends with the first token that completes one of these strings in its text."""
    ignore_eos: bool = False


@dataclass
class Output:
    """What a request gave. The first token comes from the prompt's own pass; rounds made the others."""

    tokens: list[int]
    finish_reason: Literal["eos", "stop", "length"]
    rounds: int
    """Target passes after the prompt's."""
    accepted: list[int]
    """By round: draft tokens in the output. The round's last token is the target's own, but for a last round cut on a
    draft token."""
    reached: list[int]
    """By round: the deepest level put to the test; min(accepted + 1, levels drafted), less where the output's end cut
    the round."""
    prefill_seconds: float
    first_round: int = 0
    """How many rounds the batch had made before this request's first: its round r is the batch's first_round + r."""

    def emitted(self) -> list[int]:
        """By round: tokens in the output; one less than usual where the output's end cut off the target's own."""
        counts = [count + 1 for count in self.accepted]
        if counts:
            counts[-1] -= sum(counts) - (len(self.tokens) - 1)
        return counts

    def drafted(self) -> list[bool]:
        """For every token, whether it was drafted (and accepted) rather than made by the target's own pass."""
        flags = [False]
        for count in self.accepted:
            flags += [True] * count + [False]
        return flags[: len(self.tokens)]
