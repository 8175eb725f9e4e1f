"""Comparison of the acceptance rules: tokens per round of every rule on every tree that it can judge."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from rich.console import Console
from torch import Tensor

from eval.benchmark.loading import chosen_prompts, facts_of, open_head
from eval.benchmark.measure import check_decoded
from eval.benchmark.metrics import acceptance_by_depth, rate_ratio, rate_ratio_interval, ratio_interval, tau
from eval.benchmark.results import write_results
from eval.command import draft_shapes
from eval.reporting.format import number, with_interval
from eval.reporting.report import figure_table
from eval.runtime.acceptance import Rejection, block, expected_tokens, ratio
from eval.runtime.engine import Engine, EngineOptions, Output, Request
from eval.runtime.sampling import RULES, Sampling, check_rule
from heads.errors import UserError
from heads.files import check_file
from heads.tree import Acceptance, Proposal, TreeShape, is_chain

Record = dict[str, Any]


@dataclass
class Run:
    """One rule on one tree, with its outputs by prompt and seed."""

    rule: str
    shape: TreeShape
    outputs: list[list[Output]] = field(default_factory=list)

    @property
    def rate(self) -> tuple[list[float], list[float]]:
        """Tokens emitted and number of rounds, by prompt."""
        emitted = [float(sum(o.decoded for o in by_seed)) for by_seed in self.outputs]
        return emitted, [float(sum(o.rounds for o in by_seed)) for by_seed in self.outputs]

    def record(self) -> Record:
        """Return the figures of the run."""
        outputs = [output for by_seed in self.outputs for output in by_seed]
        return {
            "rule": self.rule,
            "tree": str(self.shape),
            "nodes": self.shape.nodes,
            "tau": {"mean": tau(outputs), "ci95": ratio_interval(*self.rate)},
            "alpha": acceptance_by_depth(outputs, self.shape.depth),
            "rounds": sum(output.rounds for output in outputs),
        }


class OnOneDraft(Rejection):
    """Rule `ratio` on a chain that also records the expected tokens (B,) of `ratio` and of `block` for each draft."""

    expected: list[tuple[Tensor, Tensor]]

    def accept(self, proposal: Proposal, consulted: Tensor, positions: Tensor, above: Tensor | None) -> Acceptance:
        q = self.draws.distribution(consulted.shape[2])
        single = ratio(consulted, q, proposal.tokens, self.family).odds
        whole = block(consulted, q, proposal.tokens).odds
        self.expected.append((expected_tokens(single, whole=False), expected_tokens(whole, whole=True)))
        return super().accept(proposal, consulted, positions, above)


def bench_rules(options: argparse.Namespace) -> int:
    """Decode with every rule, and compare, print and write the figures. Return the exit status."""
    shapes = draft_shapes(options.trees)
    if options.out:
        check_file(options.out, "--out")
    sampling = Sampling(options.temperature, seed=options.seed)
    if options.temperature == 0:
        raise UserError("--temperature: at 0 all rules are one; ask for a higher one")
    head, target, tokenizer = open_head(options)
    prompts = chosen_prompts(options, target, tokenizer, max(shape.nodes for shape in shapes))
    count, new_tokens = len(prompts), options.max_new_tokens
    requests = [
        [
            Request(list(prompt.ids), new_tokens, replace(sampling, seed=options.seed + i + s * count))
            for s in range(options.seeds)
        ]
        for i, prompt in enumerate(prompts)
    ]
    longest = max(len(prompt.ids) for prompt in prompts)

    def engine_of(rule: str, shape: TreeShape) -> Engine:
        most = longest + new_tokens + shape.nodes
        size = EngineOptions(shape=shape, batch_size=options.batch_size, max_length=most, rule=rule)
        return Engine(target, head, size)

    runs = [Run(rule, shape) for shape in shapes for rule in RULES if can_judge(rule, shape)]
    whole = [request for by_seed in requests for request in by_seed]
    for run in runs:
        check_decoded(done := engine_of(run.rule, run.shape).generate(whole), options.prompts)
        outputs = iter(done)
        run.outputs = [[next(outputs) for _ in by_seed] for by_seed in requests]
        print(f"{run.rule} on {run.shape}: tau {run.record()['tau']['mean']:.3f}", file=sys.stderr, flush=True)
    chains = [shape for shape in shapes if is_chain(shape)]
    record = {
        **facts_of(options, target, prompts),
        "seeds": options.seeds,
        "temperature": options.temperature,
        "runs": [run.record() for run in runs],
        "compared": [compare(one, other) for one, other in combinations(runs, 2) if one.shape == other.shape],
        "on_one_draft": [expect_on_one_draft(engine_of("ratio", shape), requests) for shape in chains],
    }
    print_tables(record)
    if options.out:
        write_results(record, options.out)
    return 0


def can_judge(rule: str, shape: TreeShape) -> bool:
    """Return True if a rule can judge trees of this shape."""
    try:
        check_rule(rule, shape)
    except UserError:
        return False
    return True


def compare(one: Run, other: Run) -> Record:
    """Return the ratio of the second run's tau to the first one's, paired over prompts."""
    rates = other.rate, one.rate
    between = {"ratio": rate_ratio(*rates), "ci95": rate_ratio_interval(*rates)}
    return {"tree": str(one.shape), "rule": other.rule, "over": one.rule, **between}


def expect_on_one_draft(engine: Engine, requests: Sequence[Sequence[Request]]) -> Record:
    """Return the ratio of the expected tokens of `block` to those of `ratio` for the same drafts, over all rounds of
    all requests."""
    rule = OnOneDraft("ratio", engine.options.shape, engine.decoder.sampling)
    engine.decoder = replace(engine.decoder, rule=rule)
    plain, whole, ones = [0.0] * len(requests), [0.0] * len(requests), [1.0] * len(requests)
    jobs = [(i, request) for i, by_seed in enumerate(requests) for request in by_seed]
    for start in range(0, len(jobs), engine.options.batch_size):
        part = jobs[start : start + engine.options.batch_size]  # at most one per row, so that each keeps its row
        rule.expected = []
        outputs = engine.generate([request for _, request in part])
        for row, ((prompt, _), output) in enumerate(zip(part, outputs, strict=True)):
            plain[prompt] += sum(float(ratio_[row]) for ratio_, _ in rule.expected[: output.rounds])
            whole[prompt] += sum(float(block_[row]) for _, block_ in rule.expected[: output.rounds])
    return {
        "tree": str(engine.options.shape),
        "block_over_ratio": sum(whole) / sum(plain),
        "ci95": rate_ratio_interval((whole, ones), (plain, ones)),
        "least_prompt": min(w / p for w, p in zip(whole, plain, strict=True) if p),
    }


def print_tables(record: Record) -> None:
    """Print tau of every rule, and the comparisons."""
    console = Console()
    table = figure_table(["draft", "rule", "tau"])
    for run in record["runs"]:
        table.add_row(run["tree"], run["rule"], with_interval(run["tau"]["mean"], run["tau"]["ci95"], digits=3))
    console.print(table)
    for c in record["compared"]:
        shown = with_interval(c["ratio"], c["ci95"], digits=3)
        console.print(f"{c['tree']}: {c['rule']} over {c['over']} {shown}", highlight=False)
    for c in record["on_one_draft"]:
        shown = with_interval(c["block_over_ratio"], c["ci95"], digits=4)
        least = number(c["least_prompt"], 4)
        console.print(
            f"{c['tree']}: block over ratio on the same drafts {shown}, least prompt {least}", highlight=False
        )
