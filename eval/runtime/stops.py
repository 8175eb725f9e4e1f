"""Stop strings: a generation ends when its text contains one."""

from collections.abc import Sequence
from itertools import islice

from transformers import PreTrainedTokenizerBase

SLACK = 16
"""Number of tokens searched beyond the longest that a stop string can be, for tokens that show as nothing."""


class StopWatch:
    """Finds the first token at which the text of a generation contains a stop string.

    The rule: the output ends with the earliest token i such that the decoded text of tokens 0 .. i contains one of
    the strings (the prompt does not count, and the token is kept). It is asked token by token, so it depends on the
    tokens alone and not on how many of them a round brought. Only the tail of the tokens is decoded each time: a
    character takes at most 4 byte tokens.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.stops, self.tokenizer = tuple(stops), tokenizer
        self.reach = 4 * max(map(len, stops)) + SLACK
        self.looked_at = 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens that the output keeps, or None if no stop string is complete. Call it as tokens
        come in."""
        for end in range(self.looked_at + 1, len(tokens) + 1):
            tail = list(islice(tokens, max(0, end - self.reach), end))
            text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if any(stop in text for stop in self.stops):
                return end
        self.looked_at = len(tokens)
        return None
