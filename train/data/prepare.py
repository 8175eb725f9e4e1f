"""Training rows for a recipe's `data`: from its sources, the target's answers, and a draft model's own samples."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from heads.core.contract import DraftHead
from heads.core.errors import UserError
from heads.targets.frozen_target import FrozenTarget
from heads.targets.hf_decoder import positions_of
from train.data.answers import describe_cut, open_answers, read_prompts
from train.data.corpus import Corpus, Reader
from train.data.data_settings import Data
from train.data.on_policy import Samples
from train.data.packing import Mixture, Pool
from train.data.tokenise import describe_source, read_source


def check_data(data: Data, target: FrozenTarget, head: DraftHead | None = None) -> None:
    """Raise UserError for data whose rows the target, or the head of a training, cannot read."""
    if data.context_length > target.context_length:
        raise UserError(
            f"data.context_length: expected at most {target.context_length}, the context of {target.name}, "
            f"got {data.context_length}"
        )
    if head is not None and head.depth >= data.context_length:
        raise UserError(
            f"data.context_length: {data.context_length} tokens cannot hold a root and a draft of "
            f"{head.depth}; raise it, or let the head draft less"
        )
    if head is not None and head.language_model is not None:
        positions = positions_of(head.language_model.config.get_text_config())
        if data.context_length > positions:
            raise UserError(
                f"data.context_length: the draft model reads {positions} positions, a row has {data.context_length}"
            )
    if target.start_token is None:
        return
    if data.regenerate is not None and data.regenerate.server is not None:
        raise UserError("data.regenerate.server: servers take no prompts of an encoder-decoder target; leave it out")
    # The decoder of an encoder-decoder target generates only answers.
    for number, source in enumerate(data.sources):
        if source.kind != "chat":
            raise UserError(
                f"data.sources.{number}: an encoder-decoder target learns from questions and their answers, got kind "
                f"{source.kind}; use kind chat"
            )
    for name, answers in (("regenerate", data.regenerate), ("on_policy", data.on_policy)):
        if answers is not None and answers.train_on_prompts:
            raise UserError(
                f"data.{name}.train_on_prompts: an encoder-decoder target never writes prompts; leave it out"
            )


def load_data(
    data: Data,
    seed: int,
    head: DraftHead,
    target: FrozenTarget,
    reader: Reader,
    folder: Path,
) -> tuple[Mixture, Samples | None]:
    """Return the packed rows of the sources, of the target's answers, or of both, and the on-policy samples if the
    recipe has them, else None. `head`: a head of the shape that will be trained."""
    check_data(data, target, head)
    if target.is_recurrent:
        reader.say(f"{target.name}: one document a row, because its recurrent layers cannot be masked by document")
    regenerate = data.regenerate
    pools: list[Pool] = []
    weights: list[float] = []
    num_texts = 0
    source_share = 1.0 if regenerate is None else 1 - regenerate.share
    num_positions = target.context_length
    if head.language_model is not None:
        num_positions = min(num_positions, positions_of(head.language_model.config.get_text_config()))

    def add(corpus: Corpus, weight: float | None, name: str) -> None:
        pool = Pool(corpus, data.context_length, num_positions, packs=not target.is_recurrent)
        if pool.num_left_out:
            reader.say(f"{name}: {pool.num_left_out:,} labels are beyond the models' positions")
        pools.append(pool)
        weights.append(len(pool) if weight is None else weight)

    if source_share > 0:
        for number, source in enumerate(data.sources):
            name = f"data.sources.{number}"
            corpus = read_source(source, name, reader)
            num_texts += corpus.tally.records - corpus.tally.num_skipped
            add(corpus, source.weight, name)
        weights = [source_share * weight / sum(weights) for weight in weights]
    if regenerate is not None:
        corpus = open_answers(data, seed, target, reader, quiet=bool(pools)).corpus()
        sizes = f"{corpus.tally.records:,} conversations, {corpus.num_tokens:,} tokens, {corpus.num_labels:,} labels"
        cut = [describe_cut(corpus.tally)] if corpus.tally.skipped else []
        reader.say(
            describe_source("data.regenerate: the target's answers", sizes, corpus, reader.rendering.tokenizer, *cut)
        )
        num_texts = max(num_texts, corpus.tally.records)
        add(corpus, regenerate.share, "data.regenerate")
    mixture = Mixture(pools, weights, seed)
    mixture.num_texts = num_texts
    check_reserved(head, mixture, reader.rendering.tokenizer)
    check_supervision(head, mixture)
    if data.on_policy is None:
        return mixture, None
    sources = read_prompts(data, seed, data.on_policy, "data.on_policy", reader, recorded=True, quiet=True)
    prompts = [document.ids.tolist() for source in sources for document in source.corpus]
    return mixture, Samples(mixture, prompts, data.on_policy, target, folder / "on_policy")


def check_reserved(head: DraftHead, mixture: Mixture, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for data with a token that the head reserves for itself."""
    for token in head.reserved_ids:
        seen_by_pool = [pool.corpus.counts[0] for pool in mixture.pools]
        if any(token < len(seen) and seen[token] for seen in seen_by_pool):
            raise UserError(
                f"head.mask_token_id: the data has the token {token}, {tokenizer.convert_ids_to_tokens(token)!r}; name "
                "one that it does not have"
            )


def check_supervision(head: DraftHead, mixture: Mixture) -> None:
    """Raise UserError for data without a label at the head's first depth, since every document is too short."""
    for pool in mixture.pools:
        for index in range(len(pool)):
            rows = pool.row(index)
            if head.counts(rows)[0] > 0:
                return
    raise UserError(
        "data.sources: no token to train on: every document is too short for the head's first depth; give longer ones"
    )
