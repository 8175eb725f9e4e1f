"""Training rows by a recipe's `data`: its sources, the target's answers, and the draft's own text."""

from pathlib import Path
from typing import Annotated

from accelerate import Accelerator
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from heads.base import DraftHead
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from train.data.answers import Answers, Progress, Regenerate, answer_documents, make_answers
from train.data.on_policy import OnPolicy, Samples
from train.data.packing import Document, Mixture, Pool, shares
from train.data.sources import AnySource, Say
from train.strict_yaml import Settings


class Data(Settings):
    """Training data."""

    sources: Annotated[list[AnySource], Field(min_length=1)]
    """Sources of the text: one or more of the kinds below."""
    context_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens of one training row. Documents are packed into rows; attention does not cross documents. A target with
    recurrent layers gets one document a row, padded."""
    regenerate: Regenerate | None = None
    """Answers of the target to train on. Null: the sources as they are."""
    on_policy: OnPolicy | None = None
    """Samples of the draft to train on. Null: none."""


def check_data(data: Data, target: FrozenTarget) -> None:
    """Refuse data that the target cannot read."""
    if data.context_length > target.context_length:
        raise UserError(
            f"data.context_length: expected at most {target.context_length}, the context of {target.name}, "
            f"got {data.context_length}"
        )
    if target.start_token is None:
        return
    # A decoder behind an encoder writes answers and nothing else.
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


def silent(_: str) -> None:
    """Say nothing."""


def read_prompts(
    data: Data,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    settings: Answers,
    name: str,
    say: Say = silent,
) -> list[list[int]]:
    """The prompts of `settings`, called `name` in the recipe, in a fixed order, shared among the sources by weight."""
    if settings.prompts < len(data.sources):
        raise UserError(
            f"{name}.prompts: expected at least one for each of {len(data.sources)} sources, got {settings.prompts}"
        )
    prompts: list[list[int]] = []
    wanted = shares([source.weight or 1.0 for source in data.sources], settings.prompts)
    for source, count in zip(data.sources, wanted, strict=True):
        found = source.prompts(tokenizer, settings.prompt_tokens, count, seed, say)
        if len(found) < count:
            raise UserError(
                f"{name}.prompts: {source} gives {len(found)} prompts of at most {settings.prompt_tokens} tokens, "
                f"expected {count}; lower prompts or raise prompt_tokens"
            )
        prompts += found
    too_long = max(map(len, prompts)) + settings.new_tokens
    if too_long > data.context_length:
        raise UserError(
            f"data.context_length: expected at least {too_long}, the longest prompt and answer of {name}, "
            f"got {data.context_length}"
        )
    return prompts


def load_data(
    data: Data,
    seed: int,
    head: DraftHead,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    accelerator: Accelerator,
    say: Say,
    progress: Progress,
) -> tuple[Mixture, Samples | None]:
    """The packed rows of the sources, of the target's answers to prompts from them, or of both; and the source of the
    draft's own text, where the recipe asks for it. `head`: of the shape that will be trained."""
    check_data(data, target)
    if len(head.depth_weights) >= data.context_length:
        raise UserError(
            f"data.context_length: {data.context_length} tokens cannot hold a root and a draft of "
            f"{len(head.depth_weights)}; raise it, or let the head draft less"
        )
    if target.is_recurrent:
        say(f"{target.name}: one document a row, because its recurrent layers cannot be masked by document")
    regenerate = data.regenerate
    pools: list[Pool] = []
    weights: list[float] = []
    kept = 1.0 if regenerate is None else 1 - regenerate.share

    def add(documents: list[Document], weight: float | None, name: str) -> None:
        pool = Pool(documents, data.context_length, packs=not target.is_recurrent)
        say(
            f"{name}: {len(documents)} documents, {len(pool.tokens)} tokens, {int(pool.labels.sum())} labels, "
            f"{len(pool)} rows"
        )
        pools.append(pool)
        weights.append(len(pool) if weight is None else weight)

    if kept > 0:
        for number, source in enumerate(data.sources):
            documents = source.documents(tokenizer, say)
            if not any(document.labels.any() for document in documents):
                raise UserError(f"{source}: no token to train on in its {len(documents)} texts; give longer ones")
            add(documents, source.weight, f"data.sources.{number}")
        weights = [kept * weight / sum(weights) for weight in weights]
    if regenerate is not None:
        # Of sources that are rows too, the records left out are said already.
        prompts = read_prompts(data, seed, tokenizer, regenerate, "data.regenerate", silent if pools else say)
        requests = [regenerate.request(prompt, n) for n, prompt in enumerate(prompts)]
        answers = make_answers(
            target,
            requests,
            regenerate.batch_size,
            folder,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
            wait=accelerator.wait_for_everyone,
            progress=progress,
        )
        documents = answer_documents(prompts, answers, train_on_prompts=regenerate.train_on_prompts)
        add(documents, regenerate.share, "data.regenerate")
    mixture = Mixture(pools, weights, seed)
    check_reserved(head, mixture, tokenizer)
    check_supervision(head, mixture)
    if data.on_policy is None:
        return mixture, None
    prompts = read_prompts(data, seed, tokenizer, data.on_policy, "data.on_policy")
    return mixture, Samples(mixture, prompts, data.on_policy, folder / "on_policy")


def check_reserved(head: DraftHead, mixture: Mixture, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse data with a token that the head has a use of its own for."""
    for token in head.reserved_ids:
        if any((pool.tokens == token).any() for pool in mixture.pools):
            raise UserError(
                f"head.mask_token_id: the data has the token {token}, {tokenizer.convert_ids_to_tokens(token)!r}; name "
                "one that it does not have"
            )


def check_supervision(head: DraftHead, mixture: Mixture) -> None:
    """Refuse data without a label at the head's first depth, as where every document is too short for it."""
    for pool in mixture.pools:
        for index in range(len(pool)):
            rows = pool.row(index)
            if head.counts(rows.loss_mask, rows.documents)[0] > 0:
                return
    raise UserError(
        "data.sources: no token to train on: every document is too short for the head's first depth; give longer ones"
    )
