"""Training rows for a recipe's `data`: from its sources, the target's answers, and the draft's own text."""

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from heads.base import DraftHead
from heads.errors import UserError
from heads.target.hf import positions_of
from heads.target.model import FrozenTarget
from train.data.answers import Answering
from train.data.corpus import Corpus, Tally, open_entry
from train.data.dialogues import Dialogue
from train.data.on_policy import Samples
from train.data.packing import Mixture, Pool, shares
from train.data.reader import Reader
from train.data.settings import Answers, Data
from train.data.sources import AnySource, ChatSource, describe_skipped
from train.data.templates import ChatTemplate


def check_data(data: Data, target: FrozenTarget) -> None:
    """Raise UserError for data that the target cannot process."""
    if data.context_length > target.context_length:
        raise UserError(
            f"data.context_length: expected at most {target.context_length}, the context of {target.name}, "
            f"got {data.context_length}"
        )
    if target.start_token is None:
        return
    # The decoder of an encoder-decoder target generates only answers.
    for number, source in enumerate(data.sources):
        if source.kind != "chat":
            raise UserError(
                f"data.sources.{number}: an encoder-decoder target learns from questions and their answers, got kind "
                f"{source.kind}; use kind chat"
            )
    if data.regenerate is not None and data.regenerate.server is not None:
        raise UserError("data.regenerate.server: servers take no prompts of an encoder-decoder target; leave it out")
    for name, answers in (("regenerate", data.regenerate), ("on_policy", data.on_policy)):
        if answers is not None and answers.train_on_prompts:
            raise UserError(
                f"data.{name}.train_on_prompts: an encoder-decoder target never writes prompts; leave it out"
            )


def has_date(data: Data, rendering: ChatTemplate) -> bool:
    """Return True if a chat template of the data prints the date."""
    return any(source.template(rendering).has_date for source in data.sources if isinstance(source, ChatSource))


def read_answering(data: Data, seed: int, target: FrozenTarget, reader: Reader, *, quiet: bool = False) -> Answering:
    """Return the answering that `data.regenerate` describes, without generating any answer. `quiet`: do not report
    skipped records."""
    settings = data.regenerate
    assert settings is not None
    found = find_prompts(data, seed, settings, "data.regenerate", reader, quiet=quiet)

    def dialogues() -> Iterator[Dialogue]:
        for source, count, _ in found:
            yield from source.dialogues(reader.rendering, Tally(), settings.prompt_tokens, count, seed)

    return Answering(settings, dialogues, [entry for _, _, entry in found], target, reader)


def find_prompts(
    data: Data, seed: int, settings: Answers, name: str, reader: Reader, *, recorded: bool = False, quiet: bool
) -> list[tuple[AnySource, int | None, str]]:
    """Return the sources, each with its number of prompts, in proportion to its weight (None: all), and the entry that
    holds them. `name`: the key of `settings` in the recipe. UserError if the prompts are too few, or too long to train
    on."""
    if settings.prompts is not None and settings.prompts < len(data.sources):
        raise UserError(
            f"{name}.prompts: expected at least one for each of {len(data.sources)} sources, got {settings.prompts}"
        )
    found: list[tuple[AnySource, int | None, str]] = []
    wanted: list[int | None] = [None] * len(data.sources)
    if settings.prompts is not None:
        wanted = [*shares([source.weight or 1.0 for source in data.sources], settings.prompts)]
    for source, count in zip(data.sources, wanted, strict=True):
        entry = reader.prompts(source, settings.prompt_tokens, count, seed, recorded=recorded)
        prompts = open_entry(entry)
        if count is None or len(prompts) < count:  # the whole source has been read
            source.check(prompts.tally)
        if prompts.tally.skipped and not quiet:
            reader.say(describe_skipped(prompts.tally, str(source)))
        if len(prompts) < (count or 1):
            mend = "raise prompt_tokens" if count is None else "lower prompts or raise prompt_tokens"
            raise UserError(
                f"{name}.prompts: {source} gives {len(prompts)} prompts of at most {settings.prompt_tokens} tokens, "
                f"expected {count or 'at least 1'}; {mend}"
            )
        if count is None:
            what = "conversations" if source.kind == "chat" else "texts"
            long = f"; {prompts.tally.too_long:,} begin with a prompt of more than {settings.prompt_tokens:,} tokens"
            left_out = f"{long} ({name}.prompt_tokens) and are left out" if prompts.tally.too_long else ""
            reader.say(f"{name}: {source}: {len(prompts):,} {what} to answer{left_out}")
        too_long = max(len(document.ids) for document in prompts) + settings.new_tokens
        if too_long > data.context_length:
            raise UserError(
                f"data.context_length: expected at least {too_long}, the longest prompt and answer of {name}, "
                f"got {data.context_length}"
            )
        found.append((source, count, entry))
    return found


def describe_cut(tally: Tally) -> str:
    """Return one line with the number of conversations that end early, by reason."""
    reasons = ", ".join(f"{count} before {why}" for why, count in sorted(tally.skipped.items()))
    return f"data.regenerate: {sum(tally.skipped.values())} of {tally.records} conversations end early: {reasons}"


def read_source(source: AnySource, name: str, reader: Reader) -> Corpus:
    """Return the documents of a source, and report skipped records and rewritten turns. `name`: the source's key in the
    recipe. UserError if there is nothing to train on."""
    corpus = reader.documents(source)
    source.check(corpus.tally)
    if corpus.tally.skipped:
        reader.say(describe_skipped(corpus.tally, str(source)))
    if corpus.num_labels == 0:
        raise UserError(f"{source}: no token to train on in its {len(corpus)} texts; give longer ones")
    if 0 < corpus.tally.last_tokens < len(corpus.tokens):
        factor = len(corpus.tokens) / corpus.tally.last_tokens
        reader.say(
            f"{name}: the chat template rewrites earlier turns, so answers are documents of their own: {factor:.2f} "
            f"times the conversations' tokens; {name}.answers=last trains on their last answers alone"
        )
    return corpus


def load_data(
    data: Data,
    seed: int,
    head: DraftHead,
    target: FrozenTarget,
    reader: Reader,
    folder: Path,
) -> tuple[Mixture, Samples | None]:
    """Return the packed rows of the sources, of the target's answers, or of both, and the samples of the draft's own
    text if the recipe has them, else None. `head`: a head of the shape that will be trained."""
    check_data(data, target)
    if len(head.depth_weights) >= data.context_length:
        raise UserError(
            f"data.context_length: {data.context_length} tokens cannot hold a root and a draft of "
            f"{len(head.depth_weights)}; raise it, or let the head draft less"
        )
    if target.is_recurrent:
        reader.say(f"{target.name}: one document a row, because its recurrent layers cannot be masked by document")
    regenerate = data.regenerate
    pools: list[Pool] = []
    weights: list[float] = []
    num_texts = 0
    kept = 1.0 if regenerate is None else 1 - regenerate.share
    num_positions = target.context_length
    if head.language_model is not None:
        num_positions = min(num_positions, positions_of(head.language_model.config.get_text_config()))

    def add(corpus: Corpus, weight: float | None, name: str) -> None:
        pool = Pool(corpus, data.context_length, num_positions, packs=not target.is_recurrent)
        reader.say(pool.describe(name))
        pools.append(pool)
        weights.append(len(pool) if weight is None else weight)

    if kept > 0:
        for number, source in enumerate(data.sources):
            name = f"data.sources.{number}"
            corpus = read_source(source, name, reader)
            num_texts += corpus.tally.records - sum(corpus.tally.skipped.values())
            add(corpus, source.weight, name)
        weights = [kept * weight / sum(weights) for weight in weights]
    if regenerate is not None:
        # If the sources are rows too, their skipped records have been reported already.
        corpus = read_answering(data, seed, target, reader, quiet=bool(pools)).corpus()
        if corpus.tally.skipped:
            reader.say(describe_cut(corpus.tally))
        num_texts = max(num_texts, corpus.tally.records)
        add(corpus, regenerate.share, "data.regenerate")
    mixture = Mixture(pools, weights, seed)
    mixture.num_texts = num_texts
    check_reserved(head, mixture, reader.rendering.tokenizer)
    check_supervision(head, mixture)
    if data.on_policy is None:
        return mixture, None
    found = find_prompts(data, seed, data.on_policy, "data.on_policy", reader, recorded=True, quiet=True)
    prompts = [document.ids.tolist() for _, _, entry in found for document in open_entry(entry)]
    return mixture, Samples(mixture, prompts, data.on_policy, folder / "on_policy")


def check_reserved(head: DraftHead, mixture: Mixture, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for data with a token that the head reserves for itself."""
    for token in head.reserved_ids:
        if any(token < len(seen) and seen[token] for seen in (pool.corpus.counts[0] for pool in mixture.pools)):
            raise UserError(
                f"head.mask_token_id: the data has the token {token}, {tokenizer.convert_ids_to_tokens(token)!r}; name "
                "one that it does not have"
            )


def check_supervision(head: DraftHead, mixture: Mixture) -> None:
    """Raise UserError for data without a label at the head's first depth, since every document is too short."""
    for pool in mixture.pools:
        for index in range(len(pool)):
            rows = pool.row(index)
            if head.counts(rows.loss_mask, rows.documents)[0] > 0:
                return
    raise UserError(
        "data.sources: no token to train on: every document is too short for the head's first depth; give longer ones"
    )
