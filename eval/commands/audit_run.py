"""Audit on many prompts: outputs of every draft at every temperature and batch size, compared with plain decoding."""

import argparse
import json
import sys
import time
from itertools import product
from typing import Any

from rich.console import Console

from eval.benchmark.figures import find_differences
from eval.benchmark.loading import Opened, chosen_prompts, facts_of, open_head
from eval.benchmark.measure import Comparison, Variant, make_requests
from eval.benchmark.metrics import loop_share, tau
from eval.benchmark.prompts import Prompt
from eval.benchmark.results import write_results
from eval.command import draft_shapes
from eval.reporting.format import divergence_text, number, percent, sampling_text
from eval.reporting.report import figure_table
from eval.runtime.engine import Engine, EngineOptions
from eval.runtime.sampling import Sampling
from heads.files import check_file
from heads.tree import ROOT_ONLY, TreeShape

Row = dict[str, Any]


def audit(options: argparse.Namespace) -> int:
    """Run every setting, and print and write the results. Return 1 if any token differs, else 0."""
    if options.out:
        check_file(options.out, "--out")
    opened = open_head(options)
    shapes = draft_shapes(options.trees, opened.head)
    prompts = chosen_prompts(options, opened.target, opened.tokenizer, max(shape.nodes for shape in shapes))
    rows: list[Row] = []
    for temperature in options.temperatures:
        rows += audit_temperature(opened, prompts, shapes, Sampling(temperature, seed=options.seed), options)
    print_table(rows)
    if options.out:
        write_results({**facts_of(options, opened.target, prompts), "rows": rows}, options.out)
    divergences = [divergence for row in rows for divergence in row["divergences"]]
    for divergence in divergences[:20]:
        print(divergence_text(divergence))
    whole = sum(row["prompts"] for row in rows)
    near = sum(row["near_ties"] for row in rows)
    but = f", {near} of them but for near-ties" if near else ""
    print(f"output identical to plain decoding: {sum(row['identical'] for row in rows)} of {whole} prompts{but}")
    return 1 if divergences else 0


def audit_temperature(
    opened: Opened, prompts: list[Prompt], shapes: list[TreeShape], sampling: Sampling, options: argparse.Namespace
) -> list[Row]:
    """Return the rows of all settings at one temperature. The reference is plain decoding at batch size 1."""
    requests = make_requests(prompts, sampling, options.max_new_tokens, ignore_eos=True)
    everything, longest = list(range(len(prompts))), max(len(prompt.ids) for prompt in prompts)

    def decode(shape: TreeShape, batch_size: int) -> Variant:
        room = longest + options.max_new_tokens + shape.nodes
        head = None if shape is ROOT_ONLY else opened.head
        size = EngineOptions(shape=shape, batch_size=batch_size, max_length=room)
        variant = Variant(Engine(opened.target, head, size))
        variant.run(0, everything, requests, 0)
        return variant

    comparison = Comparison(prompts, requests, [everything], decode(ROOT_ONLY, 1), [])
    rows = []
    for shape, batch_size in product([ROOT_ONLY, *shapes], options.batch_sizes):
        if shape is ROOT_ONLY and batch_size == 1:
            continue  # the reference itself
        started = time.perf_counter()
        variant = decode(shape, batch_size)
        found = find_differences(comparison, variant, opened.tokenizer)
        divergences = [difference for difference in found if not difference["near_tie"]]
        outputs = list(variant.outputs[0].values())
        row = {
            "tree": "plain" if shape is ROOT_ONLY else str(shape),
            "temperature": sampling.temperature,
            "batch_size": batch_size,
            "prompts": len(prompts),
            "identical": len(prompts) - len(divergences),
            "near_ties": len(found) - len(divergences),
            "tau": tau(outputs),
            "loop_share": loop_share([output.tokens for output in outputs]),
            "seconds": time.perf_counter() - started,
        }
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append({**row, "divergences": divergences})
    return rows


def print_table(rows: list[Row]) -> None:
    """Print a table with a line for each setting."""
    table = figure_table(["draft", "sampling", "batch", "identical", "tau", "loops", "seconds"])
    for row in rows:
        identical = f"{row['identical']} of {row['prompts']}"
        figures = identical, number(row["tau"]), percent(row["loop_share"]), number(row["seconds"], 1)
        table.add_row(row["tree"], sampling_text(row["temperature"]), str(row["batch_size"]), *figures)
    Console().print(table)
