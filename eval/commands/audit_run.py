"""The audit of many prompts: every draft at every temperature and batch size against plain decoding."""

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from eval.benchmark.audit import find_divergences
from eval.benchmark.figures import environment, target_facts
from eval.benchmark.measure import Comparison, Variant, trace
from eval.benchmark.metrics import loop_share, tau
from eval.benchmark.opening import Opened, chosen_prompts, open_head, prompt_facts
from eval.benchmark.prompts import Prompt
from eval.benchmark.results import write_results
from eval.command import draft_shapes
from eval.files import check_file
from eval.reporting.format import divergence_text, number, percent, sampling_text
from eval.runtime.engine import Engine, Request
from eval.runtime.sampling import Sampling
from heads.tree import ROOT_ONLY, TreeShape

Row = dict[str, Any]


def audit(options: argparse.Namespace) -> int:
    """Run every setting; 1 if a token differs anywhere."""
    if options.out:
        check_file(options.out, "--out")
    opened = open_head(options)
    shapes = draft_shapes(options.trees, opened.head)
    prompts = chosen_prompts(options, opened.target, opened.tokenizer, max(shape.nodes for shape in shapes))
    rows: list[Row] = []
    for temperature in options.temperatures:
        rows += audit_temperature(opened, prompts, shapes, Sampling(temperature, seed=options.seed), options)
    print_table(rows)
    record = {
        "target": target_facts(opened.target),
        "head": options.head,
        **environment(opened.target),
        **prompt_facts(options, prompts),
        "rows": rows,
    }
    if options.out:
        write_results(record, options.out)
    divergences = [divergence for row in rows for divergence in row["divergences"]]
    for divergence in divergences[:20]:
        print(divergence_text(divergence))
    whole = sum(row["prompts"] for row in rows)
    print(f"output identical to plain decoding: {sum(row['identical'] for row in rows)} of {whole} prompts")
    return 1 if divergences else 0


def audit_temperature(
    opened: Opened,
    prompts: list[Prompt],
    shapes: list[TreeShape],
    sampling: Sampling,
    options: argparse.Namespace,
) -> list[Row]:
    """All settings at one temperature, against plain decoding one prompt at a time."""
    requests = [
        Request(list(prompt.ids), options.max_new_tokens, replace(sampling, seed=sampling.seed + i), ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    everything = list(range(len(prompts)))
    reference = Variant(make_engine(opened, prompts, ROOT_ONLY, 1, options))
    reference.run(0, everything, requests, 0)
    comparison = Comparison(prompts, requests, [everything], reference, [])
    rows = []
    for shape in [ROOT_ONLY, *shapes]:
        for batch in options.batch_sizes:
            if shape is ROOT_ONLY and batch == 1:
                continue  # the reference itself
            started = time.perf_counter()
            variant = Variant(make_engine(opened, prompts, shape, batch, options))
            variant.run(0, everything, requests, 0)
            divergences = find_divergences(comparison, variant, opened.target, opened.tokenizer)
            outputs = list(variant.outputs[0].values())
            rows.append(
                {
                    "tree": "plain" if shape is ROOT_ONLY else str(shape),
                    "temperature": sampling.temperature,
                    "batch_size": batch,
                    "prompts": len(prompts),
                    "identical": len(prompts) - len(divergences),
                    "divergences": divergences,
                    "tau": tau([trace(output) for output in outputs]),
                    "loop_share": loop_share([output.tokens for output in outputs]),
                    "seconds": time.perf_counter() - started,
                }
            )
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "divergences"}), file=sys.stderr, flush=True)
    return rows


def make_engine(
    opened: Opened, prompts: list[Prompt], shape: TreeShape, batch: int, options: argparse.Namespace
) -> Engine:
    """An engine with room for every prompt."""
    room = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens + shape.nodes
    head = None if shape is ROOT_ONLY else opened.head
    return Engine(opened.target, head, shape=shape, batch_size=batch, max_length=room)


def print_table(rows: list[Row]) -> None:
    """The settings, a line each."""
    table = Table(box=box.SIMPLE, show_edge=False)
    for name in ("draft", "sampling", "batch", "identical", "tau", "loops", "seconds"):
        table.add_column(name, justify="left" if name in ("draft", "sampling") else "right")
    for row in rows:
        table.add_row(
            row["tree"],
            sampling_text(row["temperature"]),
            str(row["batch_size"]),
            f"{row['identical']} of {row['prompts']}",
            number(row["tau"]),
            percent(row["loop_share"]),
            number(row["seconds"], 1),
        )
    Console().print(table)
