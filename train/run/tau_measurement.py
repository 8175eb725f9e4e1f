"""tau during training: measured with the runtime on held-out prompts, and estimated with the training step.

The estimate needs only known text. A greedy chain of K draft tokens with root x_r is accepted up to the first draft
token that differs from the target's next token. So one pass of the target's greedy outputs through the training step
gives the outcome of a round at every position. Walking from root to root then selects the rounds that take place. If
the two values disagree, training and drafting do not compute the same function.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from eval.core.progress import Progress
from eval.data.prompts import HELD_OUT_SUITE, Prompt, load_prompts, split_prompts
from eval.measure.compare import check_decoded
from eval.records.head_schema import PointSuite, TauFigures
from eval.records.metrics import acceptance_by_depth, tau, tau_interval
from eval.runtime.engine import Engine, EngineOptions, Output, Request
from eval.runtime.sampling_params import Sampling
from heads.core.contract import Batch, DraftHead, shape_for
from heads.core.errors import UserError
from heads.core.tree import is_chain
from heads.targets.frozen_target import FrozenTarget
from heads.targets.masks import TILE
from train.core.processes import on_main
from train.data.packing import Mixture, text_rows
from train.features.feature_source import FeatureSource, make_batch
from train.recipe.recipe import Eval
from train.run.checks import check_trees

ESTIMATE_TOKENS = 2**15
"""Tokens of training text on which tau is estimated if nothing can be decoded; at least one row is used."""
ESTIMATE_ROWS = 8
"""Decoded texts in one batch of the head."""


class Evaluation:
    """Measurements of tau with the settings in a recipe's `eval`."""

    def __init__(
        self, settings: Eval, features: FeatureSource, tokenizer: PreTrainedTokenizerBase, head: DraftHead
    ) -> None:
        """`head`: a head of the shape that will be measured. UserError for trees that it cannot fill, or prompts that
        are too long."""
        self.settings = settings
        self.features = features
        target = features.target
        nodes = check_trees(settings, target, head)
        self.suites, self.requests = load_requests(settings, tokenizer, target, nodes)
        self.longest = max(len(request.prompt) for request in self.requests) + settings.max_new_tokens

    def measure(self, head: nn.Module) -> TauFigures:
        """Return tau and acceptance by depth over all requests. Called on the main process."""
        settings = self.settings
        requests = self.requests
        drafts = cast(DraftHead, head)
        batch_size = min(settings.batch_size, len(requests))
        with self.features.whole() as target:
            if drafts.tree_nodes:  # it is chosen from the target's greedy answers, without the prompts
                engine = Engine(target, None, EngineOptions(batch_size=batch_size, max_length=self.longest + 1))
                answers = engine.generate([replace(request, sampling=Sampling()) for request in requests])
                # The first token of an answer is never drafted.
                batches = answer_batches(target, drafts, requests, answers, settings.batch_size, first_label=1)
                drafts.grow_tree(batches)
            shape = shape_for(settings.tree, drafts)
            longest = self.longest + shape.nodes
            options = EngineOptions(shape=shape, batch_size=batch_size, max_length=longest, rule=settings.rule)
            engine = Engine(target, drafts, options)
            most = sum(request.max_new_tokens for request in requests)
            with Progress(f"measuring {shape} on {len(requests)} prompts: token", most) as progress:
                outputs = engine.generate(requests, on_tokens=lambda _, fresh: progress.advance(len(fresh)))
            check_decoded(outputs, f"eval.prompts {settings.prompts}")
            estimate = None
            if settings.temperature == 0 and not settings.penalises and is_chain(shape):
                batches = answer_batches(target, drafts, requests, outputs, ESTIMATE_ROWS)
                estimate = known_text_tau(drafts, batches, shape.depth).tau
        suites = {}
        for suite in dict.fromkeys(self.suites):
            of_suite = [output for output, name in zip(outputs, self.suites, strict=True) if name == suite]
            counts = [(output.decoded, output.rounds) for output in of_suite]
            suites[suite] = PointSuite(tau=tau(of_suite), ci95=tau_interval(of_suite), prompts=counts)
        alpha = acceptance_by_depth(outputs, shape.depth)
        return TauFigures(
            tau=tau(outputs),
            ci95=tau_interval(outputs),
            alpha=alpha,
            tau_by_training_step=estimate,
            suites=suites,
        )

    @torch.no_grad()
    def estimate(self, head: nn.Module, mixture: Mixture, begin: int, accelerator: Accelerator) -> TauFigures:
        """Return tau and acceptance by depth of greedy chains as deep as the tree, estimated with the training step on
        the rows from index `begin` of the data on. Called by every process, since the target's layers may be sharded.
        Only the main process drafts with its `head`."""
        drafts = cast(DraftHead, head)
        dtype = next(head.parameters()).dtype
        end = begin + max(1, ESTIMATE_TOKENS // mixture.row_length)
        parts = [mixture.rows([index]) for index in range(begin, end)]
        batches = [make_batch(self.features.target, part, drafts.aux_layer_ids, dtype) for part in parts]

        def act() -> TauFigures:
            if drafts.tree_nodes:
                drafts.grow_tree(batches)
            return known_text_tau(drafts, batches, shape_for(self.settings.tree, drafts).depth)

        return on_main(accelerator, act)


def load_requests(
    settings: Eval, tokenizer: PreTrainedTokenizerBase, target: FrozenTarget, nodes: int
) -> tuple[list[str], list[Request]]:
    """Return the held-out prompts as requests, and the suite of each. To fail before training, raise UserError if they,
    or the prompts of the report, do not fit into the context together with a tree of `nodes`."""
    report = settings.report
    context_length = target.context_length
    room = context_length - max(settings.max_new_tokens, report.max_new_tokens or 0) - nodes
    limit = min(settings.max_prompt_tokens, room) if settings.skip_long else settings.max_prompt_tokens
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=limit,
        seed=settings.seed,
        skip_long=settings.skip_long,
        remedy="raise eval.max_prompt_tokens, or leave long prompts out with eval.skip_long=true",
        vocab_size=target.vocab_size,
    )
    prompts: list[Prompt] = []
    others: list[Prompt] = []
    for suite in split_prompts(settings.prompts):
        prompts += load(suite, num_prompts=settings.num_prompts)
        if report.num_prompts and suite != HELD_OUT_SUITE:
            others += load(suite, num_prompts=report.num_prompts)
    longest = max(len(prompt.ids) for prompt in (*prompts, *others))
    if longest > room:
        raise UserError(
            f"eval.max_new_tokens: prompts of up to {longest} tokens, the new ones and a tree of {nodes} nodes need "
            f"{longest - room + context_length} positions, the target has {context_length}; lower it (or "
            "eval.report.max_new_tokens), or leave long prompts out with eval.skip_long=true"
        )
    sampling = Sampling(temperature=settings.temperature, **settings.shared())
    requests = [
        Request(prompt.ids, settings.max_new_tokens, sampling.with_seed(settings.seed + n))
        for n, prompt in enumerate(prompts)
    ]
    return [prompt.suite for prompt in prompts], requests


def answer_batches(
    target: FrozenTarget,
    head: DraftHead,
    requests: Sequence[Request],
    outputs: Sequence[Output],
    rows: int,
    *,
    first_label: int = 0,
) -> Iterator[Batch]:
    """Yield prompts with their answers, `rows` texts per batch, in the head's dtype. The labels are the answers' tokens
    from index `first_label` on. All batches are padded to one length, since attention is compiled for each shape."""
    dtype = next(cast(nn.Module, head).parameters()).dtype
    pairs = [(request.prompt, output.tokens) for request, output in zip(requests, outputs, strict=True)]
    tiles = max(-(-(len(prompt) + len(answer)) // TILE) for prompt, answer in pairs)
    for start in range(0, len(pairs), rows):
        part = pairs[start : start + rows]
        packed = text_rows([[*prompt, *answer] for prompt, answer in part], tiles * TILE)
        for n, (prompt, answer) in enumerate(part):
            packed.loss_mask[n, len(prompt) + first_label : len(prompt) + len(answer)] = True
        yield make_batch(target, packed, head.aux_layer_ids, dtype)


@torch.no_grad()
def known_text_tau(head: DraftHead, batches: Iterable[Batch], depth: int) -> TauFigures:
    """Return tau and acceptance of greedy chains of `depth` over the labels of each batch, as if they were the target's
    own tokens."""
    emitted: list[int] = []
    reached = [0] * depth
    accepted = [0] * depth
    for batch in batches:
        for row, runs in enumerate(accepted_lengths(batch, head, depth).tolist()):
            for root, end in answer_spans(batch.loss_mask[row].tolist(), batch.documents[row].tolist()):
                for tokens in emitted_by_round(runs, root=root, end=end):
                    for k in range(min(depth, end - 1 - root)):
                        reached[k] += runs[root] >= k
                        accepted[k] += runs[root] > k
                    emitted.append(tokens)
                    root += tokens
    alpha = [hits / rounds if rounds else None for hits, rounds in zip(accepted, reached, strict=True)]
    return TauFigures(tau=sum(emitted) / len(emitted) if emitted else 1.0, alpha=alpha, is_estimate=True)


def answer_spans(labels: Sequence[bool], documents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (root, end) of each contiguous run of labels in a row: its first token that can be a root, and the position
    after its last token."""
    begin = 0
    while begin < len(labels):
        end = begin
        while end < len(labels) and labels[end] and documents[end] == documents[begin]:
            end += 1
        is_first = begin == 0 or documents[begin] != documents[begin - 1]  # of its document: it is never drafted
        root = begin + is_first
        if end - root > 1:
            yield root, end
        begin = max(end, begin + 1)


def accepted_lengths(batch: Batch, head: DraftHead, depth: int) -> Tensor:
    """Return (B, T) int64: for a chain with its root at each position, how many draft tokens match the text."""
    hits = head.chain_hits(batch, depth)  # (depth, B, T), by slot
    return hits.long().cumprod(0).sum(0).roll(1, dims=1).cpu()  # the chain of slot t has its root at t + 1


def emitted_by_round(accepted: Sequence[int], *, root: int, end: int) -> list[int]:
    """Return the number of tokens that each round emits, from `root` to `end`. The root itself is already decided."""
    emitted = []
    while root < end - 1:
        emitted.append(min(accepted[root] + 1, end - 1 - root))
        root += emitted[-1]
    return emitted
