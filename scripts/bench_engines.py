"""Speed and texts of this runtime beside llama.cpp and others: one model, the same prompts, batch 1, greedy, in turns.

    python scripts/bench_engines.py MODEL HEAD --prompts mine.jsonl --out speed.json
    python scripts/bench_engines.py MODEL HEAD --gguf model-Q8_0.gguf,model-Q4_K_M.gguf
    python scripts/bench_engines.py MODEL HEAD --server http://localhost:8000,http://localhost:8001

Both decode plainly and with the head in chains, with float32 weights and caches and as many threads (OMP_NUM_THREADS).
Every prompt is decoded by all of them before the next one. Seconds are those after the prompt was read. --gguf adds
llama.cpp alone on other files of the model, with the head in Q8_0: does a draft still pay there, and is drafted text
the plain one? --server adds servers that run already with the same model in float32, such as a vLLM with the head and
one without. The bound beside the figures is the time to read the weights once. Needs llama.cpp's environment
(scripts/make_engine.sh).
Exit status 1 if texts of float32 differ.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, add_head_options, exit_status, typed
from eval.data.prompts import prompts_hash
from eval.records.measure_settings import add_prompt_options, to_settings
from heads.core.errors import UserError
from heads.core.files import check_file
from heads.core.strict_settings import Count

if TYPE_CHECKING:
    from eval.servers.engine_speed import Row

OURS = "draftsmith"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Speed of this runtime beside that of engines.")
    add: Any = parser.add_argument
    add("model", help="folder of the target")
    add_head_options(parser)
    add("--depths", type=typed(tuple[Count, ...]), default=(3, 5), help="draft tokens in a round; default: 3,5")
    add("--gguf", type=typed(tuple[str, ...]), default=(), help="other files of the target, separated by commas")
    add("--server", type=typed(tuple[str, ...]), default=(), help="servers of the model that run, separated by commas")
    add("--repeats", type=typed(Count), default=1, help="times that each decodes each prompt; default: %(default)s")
    add_prompt_options(parser, num_prompts=12, max_prompt_tokens=256, max_new_tokens=96)
    options = parser.parse_args(arguments)
    options.target = options.model
    for file in options.gguf:
        if not Path(file).is_file():
            raise UserError(f"--gguf {file}: no such file")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.out:
        check_file(options.out, "--out")
    import torch

    from eval.measure.machine import environment
    from eval.measure.model_facts import target_facts
    from eval.measure.open_models import choose_prompts, fitting_head, open_target_of
    from eval.records.results import write_record
    from eval.servers import engine_speed as speed
    from eval.servers.gguf_conversion import Q8_0
    from heads.registry import kind_of
    from heads.saved import find_head

    target, tokenizer = open_target_of(options.head, options)
    if target.dtype != torch.float32:
        raise UserError(f"--dtype {options.dtype}: float32 is compared with float32; leave it out")
    head = fitting_head(options.head, target)
    depths = options.depths
    prompts = choose_prompts(target, tokenizer, to_settings(options), max(depths) + 1)
    length = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens + max(depths) + 10
    folders = options.model, str(find_head(options.head))
    here = speed.engines_here(target, head, depths, length)
    decoders = {speed.Way(OURS, speed.FLOAT32, depth): speed.decode_here(engine) for depth, engine in here.items()}
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="draftsmith-") as made, ExitStack() as opened:
        files = options.gguf, depths, length, runner, Path(made)
        decoders |= opened.enter_context(speed.llamacpp_servers(target, head, folders, *files))
        decoders |= opened.enter_context(speed.running_servers(options.server, target, runner))
        found = speed.decode_in_turns(decoders, prompts, options.max_new_tokens, options.repeats)
    rows, bandwidth = speed.rows_of(found, here, OURS)
    about = f"{len(prompts)} prompts, {options.max_new_tokens} new tokens, {torch.get_num_threads()} threads"
    print("\n".join([f"{about}, greedy, batch 1", *table(rows)]))
    if options.out:
        record = {
            "target": target_facts(target),
            **environment(target),
            "head": options.head,
            "kind": kind_of(head),
            "prompts": options.prompts,
            "num_prompts": len(prompts),
            "prompts_hash": prompts_hash(prompts),
            "max_new_tokens": options.max_new_tokens,
            "repeats": options.repeats,
            "copy_bandwidth": bandwidth,
            "llama_cpp": "b11549 (xllamacpp 2026.10.11549), caches in float32, no flash attention",
            "head_type": {"float32": "f32", "others": Q8_0},
            "time": time.strftime("%Y-%m-%d"),
            "rows": [row._asdict() for row in rows],
        }
        write_record(record, options.out)
    return 0 if all(row.equal_to_float32 == len(prompts) for row in rows if row.weights == speed.FLOAT32) else 1


def table(rows: "Sequence[Row]") -> Iterator[str]:
    from eval.pages.texts import number, with_interval

    yield f"{'':32}{'tokens/s':>10}{'tau':>7}  {'over its plain':22}{'bound':>8}{'= plain':>9}{'= ours':>8}"
    for row in rows:
        label = f"{row.engine} {row.weights}" + (f", chain:{row.draft_tokens}" if row.draft_tokens else "")
        ratio = with_interval(row.over_plain, row.over_plain_interval)
        yield (
            f"{label:32}{row.tokens_per_second:10.1f}{row.tau:7.2f}  {ratio:22}"
            f"{number(row.bound_tokens_per_second, 0):>8}{row.equal_to_plain:>9}{row.equal_to_float32:>8}"
        )


if __name__ == "__main__":
    sys.exit(exit_status(main))
