"""tau during training: the runtime drafts with the head as it stands, on held-out prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.benchmark.auto import LARGEST_TREE
from eval.benchmark.measure import check_decoded, trace
from eval.benchmark.metrics import acceptance_by_depth, tau
from eval.benchmark.prompts import HELD_OUT_SUITE, Prompt, load_prompts
from eval.command import AUTO
from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling import Sampling
from heads.base import Batch, DraftHead, most_nodes, shape_for
from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from heads.tree import is_chain
from train.data.features import make_batch
from train.estimate import estimate_tau, text_rows
from train.recipe import Eval


@dataclass(frozen=True)
class Measured:
    """What the runtime gave with the head as it stands."""

    tau: float
    alpha: list[float | None]
    estimate: float | None
    """tau by the training step, on the same texts; None where drafts are not greedy chains."""


def nodes_needed(settings: Eval, head: DraftHead) -> int:
    """The nodes of the largest tree that will be measured. UserError for one that the head cannot have."""
    trees = [settings.tree, *(settings.report.trees or [])]
    return max(LARGEST_TREE if tree == AUTO else most_nodes(tree, head) for tree in trees)


def load_requests(settings: Eval, tokenizer: PreTrainedTokenizerBase, context_length: int, nodes: int) -> list[Request]:
    """The held-out prompts as requests. UserError now, not after hours of training, if they, or the ones of the report,
    do not fit the context with a tree of `nodes`."""
    report = settings.report
    room = context_length - max(settings.max_new_tokens, report.max_new_tokens or 0) - nodes
    if room < 1:
        raise UserError(
            f"eval.max_new_tokens: the new tokens and a tree of {nodes} nodes leave no room for a prompt in the "
            f"target's {context_length} positions; lower it, or eval.report.max_new_tokens"
        )

    limit = min(settings.max_prompt_tokens, room) if settings.skip_long else settings.max_prompt_tokens

    def load(num_prompts: int) -> list[Prompt]:
        return load_prompts(
            settings.prompts,
            tokenizer,
            num_prompts=num_prompts,
            max_prompt_tokens=limit,
            seed=settings.seed,
            skip_long=settings.skip_long,
            remedy="raise eval.max_prompt_tokens, or leave long prompts out with eval.skip_long=true",
        )

    prompts = load(settings.num_prompts)
    others = load(report.num_prompts) if report.num_prompts and settings.prompts != HELD_OUT_SUITE else []
    sampling = Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        seed=settings.seed,
    )
    longest = max(len(prompt.ids) for prompt in (*prompts, *others))
    if longest > room:
        raise UserError(
            f"eval.max_new_tokens: prompts of up to {longest} tokens, the new ones and a tree of {nodes} nodes need "
            f"{longest - room + context_length} positions, the target has {context_length}; lower it, or leave long "
            "prompts out with eval.skip_long=true"
        )
    return [
        Request(prompt.ids, settings.max_new_tokens, replace(sampling, seed=settings.seed + n))
        for n, prompt in enumerate(prompts)
    ]


def measure(target: FrozenTarget, head: nn.Module, requests: Sequence[Request], settings: Eval) -> Measured:
    """tau and acceptance by depth over all requests."""
    draft_head = cast(DraftHead, head)
    if draft_head.own_tree is not None:
        grow_own_tree(target, draft_head, requests, settings)
    shape = shape_for(settings.tree, draft_head)
    longest = max(len(request.prompt) for request in requests) + settings.max_new_tokens + shape.nodes
    engine = Engine(
        target,
        draft_head,
        EngineOptions(
            shape=shape, batch_size=min(settings.batch_size, len(requests)), max_length=longest, rule=settings.rule
        ),
    )
    outputs = engine.generate(requests)
    check_decoded(outputs, f"eval.prompts {settings.prompts}")
    traces = [trace(output) for output in outputs]
    estimate = None
    if settings.temperature == 0 and is_chain(shape):
        prompts, texts = [request.prompt for request in requests], [output.tokens for output in outputs]
        dtype = next(head.parameters()).dtype
        estimate = estimate_tau(target, draft_head, prompts, texts, shape.depth, dtype=dtype)
    return Measured(tau(traces), acceptance_by_depth(traces, shape.depth), estimate)


def grow_own_tree(target: FrozenTarget, head: DraftHead, requests: Sequence[Request], settings: Eval) -> None:
    """Let the head choose its tree by the target's own greedy answers to the requests, prompts not counted."""
    longest = max(len(request.prompt) + request.max_new_tokens + 1 for request in requests)
    engine = Engine(target, None, EngineOptions(batch_size=min(settings.batch_size, len(requests)), max_length=longest))
    outputs = engine.generate([replace(request, sampling=Sampling()) for request in requests])

    def batches() -> Iterator[Batch]:
        dtype = next(cast(nn.Module, head).parameters()).dtype
        for start in range(0, len(requests), settings.batch_size):
            part = slice(start, start + settings.batch_size)
            prompts = [request.prompt for request in requests[part]]
            texts = [[*prompt, *output.tokens] for prompt, output in zip(prompts, outputs[part], strict=True)]
            rows = text_rows(texts)
            for n, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                rows.loss_mask[n, len(prompt) + 1 : len(text)] = True  # the first answer token is never drafted
            yield make_batch(target, rows, head.aux_layer_ids, dtype)

    assert head.own_tree is not None
    head.own_tree.grow_tree(batches())
