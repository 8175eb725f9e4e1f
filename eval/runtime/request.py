"""Requests to the runtime, and their outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from eval.runtime.sampling import Sampling
from heads.errors import UserError
from heads.target.frozen import FrozenTarget


@dataclass(frozen=True)
class Request:
    """One prompt and the settings of its output."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Stop strings: the output ends with the first token that completes one of them in its text."""
    ignore_eos: bool = False


@dataclass
class Output:
    """Output of a request. The first token comes from the prompt's own pass; rounds made the others."""

    tokens: list[int]
    finish_reason: Literal["eos", "stop", "length"]
    rounds: int
    """Number of target passes after the prompt's."""
    accepted: list[int]
    """Draft tokens in the output by round. The round's last token is the target's own, unless the last round is cut at
    a draft token."""
    reached: list[int]
    """Deepest level tested by round; min(accepted + 1, levels drafted), less where the output's end cut the round."""
    first_round: int = 0
    """Number of rounds of the batch before this request's first: its round r is the batch's first_round + r."""

    def emitted(self) -> list[int]:
        """Tokens in the output by round; one less than usual where the output's end cut off the target's own."""
        counts = [count + 1 for count in self.accepted]
        if counts:
            counts[-1] -= sum(counts) - (len(self.tokens) - 1)
        return counts

    def drafted(self) -> list[bool]:
        """Return, for every token, True if it was drafted and accepted, and False if the target's own pass made it."""
        flags = [False]
        for count in self.accepted:
            flags += [True] * count + [False]
        return flags[: len(self.tokens)]


def check_request(request: Request, name: str, *, target: FrozenTarget, slots: int, nodes: int, can_stop: bool) -> None:
    """Raise UserError, starting with `name`, for a request that a target cannot decode in `slots` slots with trees of
    `nodes`; `can_stop`: stop strings can be searched for."""
    prompt = len(request.prompt)
    if prompt == 0:
        raise UserError(f"{name}: the prompt is empty; expected at least one token")
    if not 0 <= min(request.prompt) <= max(request.prompt) < target.vocab_size:
        raise UserError(
            f"{name}: the prompt has token ids outside 0 .. {target.vocab_size - 1}; use the target's tokenizer"
        )
    start = target.start_token
    if start is not None and start not in request.prompt[1:]:
        raise UserError(
            f"{name}: the prompt of an encoder-decoder is its encoder's input, then its start token {start}, which "
            "begins the answer; a chat template puts it there"
        )
    if request.max_new_tokens < 1:
        raise UserError(f"{name}: max_new_tokens must be at least 1, got {request.max_new_tokens}")
    needed = prompt + request.max_new_tokens + nodes
    if needed > slots:
        raise UserError(
            f"{name}: a prompt of {prompt} tokens, {request.max_new_tokens} new ones and a tree of {nodes} need "
            f"{needed} slots, but there are {slots}; shorten the prompt, ask for fewer tokens or raise max_length"
        )
    if request.stop and not can_stop:
        raise UserError(f"{name}: stop strings need a tokenizer; give the engine one")
    if not all(request.stop):
        raise UserError(f"{name}: an empty stop string would end every output; leave it out")
