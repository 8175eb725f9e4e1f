"""Everything a run needs before its first step: target, data, head."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.benchmark.environment import device_facts, versions
from eval.benchmark.opening import load_pair
from heads.base import DraftHead
from heads.errors import UserError
from heads.registry import build_head
from heads.target.frozen import FrozenTarget
from train.data.answers import answer_documents, make_answers
from train.data.on_policy import Samples
from train.data.packing import Document, Mixture, Pool
from train.data.sources import read_documents, read_prompts, silent
from train.head_settings import resolved_settings
from train.launch import unpartitioned
from train.recipe import ChatSource, Recipe, plain_settings
from train.run_folder import RunFolder
from train.tracker import Tracker


@dataclass(frozen=True)
class LoadedTarget:
    """The frozen target and its tokenizer."""

    target: FrozenTarget
    tokenizer: PreTrainedTokenizerBase


def load_recipe_target(accelerator: Accelerator, recipe: Recipe) -> LoadedTarget:
    """The target on this process's device, and its tokenizer."""
    settings = recipe.target
    with unpartitioned(accelerator):
        target, tokenizer = load_pair(
            settings.path,
            dtype=settings.dtype,
            device=accelerator.device,
            trust_remote_code=settings.trust_remote_code,
            quantize=settings.quantize,
        )
    if recipe.data.context_length > target.context_length:
        raise UserError(
            f"data.context_length: expected at most {target.context_length}, the context of {settings.path}, "
            f"got {recipe.data.context_length}"
        )
    return LoadedTarget(target, tokenizer)


def check_head(recipe: Recipe, target: FrozenTarget) -> DraftHead:
    """Refuse settings of the head that the target cannot bear, before time is spent on data; else such a head."""
    head: DraftHead = build_head(*_head_settings(recipe), target, torch.zeros(target.vocab_size, dtype=torch.int64))
    return head


def with_head_defaults(recipe: Recipe, head: DraftHead) -> Recipe:
    """The recipe with all settings of its head, those that follow the target included."""
    return recipe.model_copy(update={"head": resolved_settings(recipe.head["kind"], head.config)})


def load_data(
    accelerator: Accelerator, recipe: Recipe, loaded: LoadedTarget, folder: RunFolder, tracker: Tracker
) -> Mixture:
    """The packed training rows: the sources, the target's answers to prompts from them, or both."""
    regenerate, tokenizer = recipe.data.regenerate, loaded.tokenizer
    if loaded.target.start_token is not None:
        check_answers(recipe)
    pools: list[Pool] = []
    weights: list[float] = []
    kept = 1.0 if regenerate is None else 1 - regenerate.share

    def add(documents: list[Document], weight: float | None, name: str) -> None:
        pool = Pool(documents, recipe.data.context_length)
        tracker.say(
            f"{name}: {len(documents)} documents, {len(pool.tokens)} tokens, {int(pool.labels.sum())} labels, "
            f"{len(pool)} rows"
        )
        pools.append(pool)
        weights.append(len(pool) if weight is None else weight)

    if kept > 0:
        for number, source in enumerate(recipe.data.sources):
            add(read_documents(source, tokenizer, tracker.say), source.weight, f"data.sources.{number}")
        weights = [kept * weight / sum(weights) for weight in weights]
    if regenerate is not None:
        say = tracker.say if kept == 0 else silent  # what is left out of sources that are rows, too, is said already
        prompts = read_prompts(recipe, tokenizer, regenerate, "data.regenerate", say)
        answers = make_answers(
            loaded.target,
            prompts,
            regenerate,
            folder.path,
            process=accelerator.process_index,
            num_processes=accelerator.num_processes,
            wait=accelerator.wait_for_everyone,
            progress=answering(tracker),
        )
        documents = answer_documents(prompts, answers, train_on_prompts=regenerate.train_on_prompts)
        add(documents, regenerate.share, "data.regenerate")
    return Mixture(pools, weights, recipe.train.seed)


def load_samples(recipe: Recipe, loaded: LoadedTarget, mixture: Mixture, folder: RunFolder) -> Samples | None:
    """Where the draft's own text comes from, if the recipe wants any beside `mixture`."""
    settings = recipe.data.on_policy
    if settings is None:
        return None
    prompts = read_prompts(recipe, loaded.tokenizer, settings, "data.on_policy")
    return Samples(mixture, prompts, settings, folder.path / "on_policy")


def check_answers(recipe: Recipe) -> None:
    """Refuse data in which nothing is an answer: a decoder behind an encoder writes nothing else."""
    for number, source in enumerate(recipe.data.sources):
        if not isinstance(source, ChatSource):
            raise UserError(
                f"data.sources.{number}: an encoder-decoder target learns from questions and their answers, got kind "
                f"{source.kind}; use kind chat"
            )
    for name, answers in (("regenerate", recipe.data.regenerate), ("on_policy", recipe.data.on_policy)):
        if answers is not None and answers.train_on_prompts:
            raise UserError(
                f"data.{name}.train_on_prompts: an encoder-decoder target never writes prompts; leave it out"
            )


def answering(tracker: Tracker) -> Callable[[int, int, int], None]:
    def show(done: int, total: int, tokens: int) -> None:
        text = f"data.regenerate: {done}/{total} prompts answered, {tokens} tokens"
        tracker.progress(text, last=done == total)

    return show


def make_head(recipe: Recipe, target: FrozenTarget, mixture: Mixture) -> nn.Module:
    """A new head in float32, the same on every process."""
    counts = mixture.label_counts(target.vocab_size)
    torch.manual_seed(recipe.train.seed)
    head: nn.Module = build_head(*_head_settings(recipe), target, counts)
    return head.to(target.device, torch.float32)


def check_supervision(head: DraftHead, mixture: Mixture) -> None:
    """Refuse data of which no row says anything to the head, as where every document is shorter than its first step."""
    for pool in mixture.pools:
        for index in range(len(pool)):
            rows = pool.row(index)
            if head.counts(rows.loss_mask, rows.documents)[0] > 0:
                return
    raise UserError(
        "data.sources: no token to train on: every document is too short for the head's first depth; give longer ones"
    )


def _head_settings(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    return recipe.head["kind"], {name: value for name, value in recipe.head.items() if name != "kind"}


def make_provenance(recipe: Recipe, target: FrozenTarget, data_hash: str, *, num_processes: int) -> dict[str, Any]:
    """What provenance.json and the head's own record say."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "device": device_facts(target.device),
        "num_processes": num_processes,
        "target": {
            "path": target.name,
            "fingerprint": target.fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
        },
        "data": {"sources": plain_settings(recipe)["data"], "sha256": data_hash},
    }
