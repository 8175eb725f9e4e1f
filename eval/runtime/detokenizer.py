"""Text from tokens as they come, cut so that no character is ever shown in parts."""

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text that a tokenizer gives for bytes of an incomplete character."""


class Detokenizer:
    """The texts of a generation's tokens, one after another; together they are the text of all tokens.

    A token's text depends on the token before it (some tokenizers drop a leading space), and a character may need up to
    four byte tokens. So only the tokens since the last whole character are decoded anew, behind the ones that brought
    that character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.known: list[int] = []
        """Tokens already shown on which the text of the next one may depend."""
        self.waiting: list[int] = []
        """Tokens not yet shown."""

    def push(self, token: int) -> str:
        """Add a token. Return the text that it completes, empty if it ends inside a character."""
        self.waiting.append(token)
        text = self._rest()
        if text.endswith(INCOMPLETE):
            return ""
        self._shown(text)
        return text

    def flush(self) -> str:
        """Return the remaining text if the output ends inside a character."""
        text = self._rest() if self.waiting else ""
        self._shown(text)
        return text

    def _shown(self, text: str) -> None:
        if text:  # tokens without a text of their own, such as special ones, are no context for the next
            self.known, self.waiting = self.waiting, []

    def _rest(self) -> str:
        before, both = (self._decode(tokens) for tokens in (self.known, self.known + self.waiting))
        return both[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )
