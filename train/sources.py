"""The recipe's sources as documents, and as prompts for the target to answer."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.corpus import read_split
from eval.files import read_given
from eval.messages import read_messages, read_text
from eval.records import read_records
from heads.errors import UserError
from train.chats import check_template, encode_chat, encode_prompt, encode_text
from train.packing import Document, shares
from train.recipe import Answers, AnySource, ChatSource, PythonSource, Recipe

Say = Callable[[str], None]
MIN_PROMPT_CHARACTERS = 40


def read_documents(source: AnySource, tokenizer: PreTrainedTokenizerBase, say: Say) -> list[Document]:
    """Every document of a source. UserError if none of its tokens is a label."""
    name = source_name(source)
    if isinstance(source, ChatSource):
        template = read_template(source, tokenizer)
        documents, skipped, total = [], 0, 0
        for record in read_records(source.path, split=source.split, limit=source.limit):
            found = encode_chat(tokenizer, read_messages(record), place=record[0], template=template)
            documents += [document for document in found if document.labels.any()]
            skipped += not any(document.labels.any() for document in found)
            total += 1
        if 0 < skipped < total:
            say(f"{name}: {skipped} of {total} conversations hold no answer and are left out")
    else:
        documents = list(encode_text(tokenizer, list(read_texts(source))))
        total = len(documents)
    if not any(document.labels.any() for document in documents):
        raise UserError(
            f"{name}: no token to train on: every label of its {total} records is masked; expected assistant answers"
        )
    return documents


def read_texts(source: AnySource) -> Iterator[str]:
    """The texts of a python or text source."""
    if isinstance(source, PythonSource):
        return (text for _, text in islice(read_split(held_out=False), source.limit))
    return (read_text(record) for record in read_records(source.path, split=source.split, limit=source.limit))


def read_template(source: ChatSource, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The source's own chat template, or None for the tokenizer's."""
    if source.chat_template is None:
        check_template(tokenizer, source.path)
        return None
    return read_given(Path(source.chat_template), "a Jinja chat template")


def read_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, settings: Answers, name: str) -> list[list[int]]:
    """The prompts of `settings`, called `name` in the recipe, in a fixed order, shared among the sources by weight."""
    sources = recipe.data.sources
    if settings.prompts < len(sources):
        raise UserError(
            f"{name}.prompts: expected at least one for each of {len(sources)} sources, got {settings.prompts}"
        )
    prompts: list[list[int]] = []
    for source, wanted in zip(
        sources, shares([source.weight or 1.0 for source in sources], settings.prompts), strict=True
    ):
        if isinstance(source, ChatSource):
            found = list(islice(_chat_prompts(source, tokenizer, settings.prompt_tokens), wanted))
        else:
            found = _text_prompts(source, tokenizer, settings.prompt_tokens, wanted, recipe.train.seed)
        if len(found) < wanted:
            raise UserError(
                f"{name}.prompts: {source_name(source)} gives {len(found)} prompts of at most "
                f"{settings.prompt_tokens} tokens, expected {wanted}; lower prompts or raise prompt_tokens"
            )
        prompts += found
    too_long = max(map(len, prompts)) + settings.new_tokens
    if too_long > recipe.data.context_length:
        raise UserError(
            f"data.context_length: expected at least {too_long}, the longest prompt and answer of {name}, "
            f"got {recipe.data.context_length}"
        )
    return prompts


def _chat_prompts(source: ChatSource, tokenizer: PreTrainedTokenizerBase, most: int) -> Iterator[list[int]]:
    template = read_template(source, tokenizer)
    for record in read_records(source.path, split=source.split, limit=source.limit):
        prompt = encode_prompt(tokenizer, read_messages(record), place=record[0], template=template)
        if prompt and len(prompt) <= most:
            yield prompt


def _text_prompts(
    source: AnySource, tokenizer: PreTrainedTokenizerBase, most: int, wanted: int, seed: int
) -> list[list[int]]:
    """Openings at line starts in the first three quarters of texts, `most` / 4 to `most` tokens long."""
    texts = [text for text in islice(read_texts(source), wanted) if len(text) >= MIN_PROMPT_CHARACTERS]
    if not texts:
        return []
    random = np.random.default_rng((seed, 3))
    prompts: list[list[int]] = []
    for n in range(wanted):
        text = texts[n % len(texts)]
        length = int(random.integers(max(1, most // 4), most + 1))
        # A quarter of the prompts open a document; the others begin at a line somewhere inside it.
        start = 0 if random.random() < 0.25 else text.find("\n", int(random.integers(0, len(text) * 3 // 4 + 1))) + 1
        # No tokenizer packs more than 16 characters of real text in a token, on average.
        window = text[start : start + 16 * length]
        ids = tokenizer(window, return_attention_mask=False, verbose=False)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id]:
            ids = ids[:-1]
        prompts.append(ids[:length] or tokenizer(text, verbose=False)["input_ids"][:length])
    return prompts


def source_name(source: AnySource) -> str:
    return "installed Python source" if isinstance(source, PythonSource) else source.path
