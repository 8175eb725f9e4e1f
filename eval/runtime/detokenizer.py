"""Text from tokens as they come, cut so that no character is ever shown in parts."""

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are no whole character yet."""


class Detokenizer:
    """The texts of a generation's tokens, one after another; together they are the text of all tokens.

    A token's text depends on the token before it (some tokenizers drop a leading space), and a character may need up to
    four byte tokens. So only the tokens since the last whole character are decoded anew, behind the ones that brought
    that character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = False) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.known: list[int] = []
        """Tokens already shown, as many as the next one's text may depend on."""
        self.waiting: list[int] = []
        """Tokens since then."""

    def push(self, token: int) -> str:
        """Take in a token; -> the text that it completes, empty where it ends inside a character."""
        self.waiting.append(token)
        text = self._rest()
        if text.endswith(INCOMPLETE):
            return ""
        self._shown(text)
        return text

    def flush(self) -> str:
        """The text of an end inside a character."""
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
