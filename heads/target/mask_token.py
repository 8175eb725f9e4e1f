"""The mask token, which replaces tokens that are not drafted yet: an id of the target's embedding that no text has."""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from heads.errors import UserError, expect
from heads.target.frozen import FrozenTarget, load_tokenizer

RESERVED = re.compile(r"<\|?(reserved|unused|extra_id|mask)[\w ]*\|?>|\[(MASK|unused\d+)\]", re.IGNORECASE)
"""Reserved tokens of tokenizers."""
NO_TEXT = {True: ("À", "Á", "õ", "ÿ"), False: ("<0xC0>", "<0xC1>", "<0xF5>", "<0xFF>")}
"""Bytes that no UTF-8 text has, as written by byte-level tokenizers (True) and by byte-fallback tokenizers (False)."""


def unused_id(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> int | None:
    """Return an id that no text has, for a target with this number of embeddings: the first id after the tokenizer's
    own, as in published heads, else a reserved token, else a byte that is not in UTF-8, else the unknown token. Return
    None if there is none."""
    vocabulary = tokenizer.get_vocab()
    if len(tokenizer) < embeddings and max(vocabulary.values()) < embeddings - 1:
        return max(vocabulary.values()) + 1
    found = [i for token, i in vocabulary.items() if RESERVED.fullmatch(token) and i < embeddings]
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    if free := sorted(set(found) - used):
        return free[0]
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    of_bytes = backend is not None and "ByteLevel" in str(backend.pre_tokenizer)
    last: int | None = None if tokenizer.unk_token_id in used else tokenizer.unk_token_id
    return next((vocabulary[token] for token in NO_TEXT[of_bytes] if token in vocabulary), last)


def mask_token(target: FrozenTarget, given: int | None) -> int:
    """Return the id of the mask token, chosen if none is given. Raises UserError if it has no embedding, or if none can
    be chosen."""
    if given is None:
        tokenizer = load_tokenizer(target.name, trust_remote_code=target.trust_remote_code)
        given = unused_id(tokenizer, target.vocab_size)
        if given is None:
            raise UserError(
                f"head.mask_token_id: {target.name} has a use for each of its {target.vocab_size} tokens; name one "
                "that your data does not have"
            )
    what = f"an id below {target.vocab_size}, the rows of the target's embedding"
    expect(0 <= given < target.vocab_size, "head.mask_token_id", what, given)
    return given
