"""Speed and texts of this runtime beside llama.cpp and others: one model, the same prompts, batch 1, greedy, in turns.

    python scripts/bench_engines.py MODEL HEAD --prompts mine.jsonl --out speed.json
    python scripts/bench_engines.py MODEL HEAD --gguf model-Q8_0.gguf,model-Q4_K_M.gguf
    python scripts/bench_engines.py MODEL HEAD --server http://localhost:8000,http://localhost:8001

Both decode plainly and with the head in chains, with float32 weights and caches and as many threads (OMP_NUM_THREADS).
Every prompt is decoded by all of them before the next one. Seconds are those after the prompt was read. --gguf adds
llama.cpp alone on other files of the model: does a draft still pay there, and is drafted text the plain one? --server
adds servers that run already with the same model in float32, such as a vLLM with the head and one without. The bound
beside the figures is the time to read the weights once. Needs llama.cpp's environment (scripts/make_engine.sh).
Exit status 1 if texts of float32 differ.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, add_head_options, exit_status, typed
from eval.data.prompts import Prompt, prompts_hash
from eval.records.measure_settings import add_prompt_options, to_settings
from eval.servers.openai_client import check_url
from heads.core.errors import UserError
from heads.core.files import check_file
from heads.core.strict_settings import Count

FLOAT32 = "float32"
WARM_UP_TOKENS = 8


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
    with ExitStack() as opened:
        return measure(options, opened)


def measure(options: argparse.Namespace, opened: ExitStack) -> int:
    import asyncio

    import torch

    from eval.core.progress import Progress
    from eval.measure.machine import environment
    from eval.measure.model_facts import target_facts
    from eval.measure.open_models import choose_prompts, fitting_head, open_target_of
    from eval.measure.roofline import bytes_read, copy_bandwidth
    from eval.pages.texts import with_interval
    from eval.records.metrics import rate_ratio, rate_ratio_interval
    from eval.records.results import write_record
    from eval.runtime.engine import Engine, EngineOptions, Request
    from eval.runtime.sampling_params import Sampling
    from eval.servers.engine_client import EngineServer
    from eval.servers.engine_process import need_python, running
    from eval.servers.llamacpp import convert, spec_type
    from eval.servers.parity_engines import open_server
    from heads.core.tree import parse_shape
    from heads.registry import kind_of
    from heads.saved import find_head
    from heads.targets.quantization import weight_bytes

    python = need_python("llama.cpp")
    target, tokenizer = open_target_of(options.head, options)
    if target.dtype != torch.float32:
        raise UserError(f"--dtype {options.dtype}: float32 is compared with float32; leave it out")
    head = fitting_head(options.head, target)
    depths = options.depths
    new_tokens = options.max_new_tokens
    prompts = choose_prompts(target, tokenizer, to_settings(options), max(depths) + 1)
    length = max(len(prompt.ids) for prompt in prompts) + new_tokens + max(depths) + 2
    runner = opened.enter_context(asyncio.Runner())
    made = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="draftsmith-")))

    Decode = Callable[[Prompt, int], tuple[list[int], float, int]]
    decoders: dict[tuple[str, str, int], Decode] = {}
    """(engine, weights, draft tokens) -> a function that gives a text, its seconds and its passes."""
    engines = {}
    for depth in (0, *depths):
        shape = parse_shape(f"chain:{depth}") if depth else EngineOptions(max_length=1).shape
        engine = engines[depth] = Engine(target, head if depth else None, EngineOptions(shape=shape, max_length=length))

        def here(prompt: Prompt, count: int, engine: Engine = engine) -> tuple[list[int], float, int]:
            (output,) = engine.generate([Request(list(prompt.ids), count)])
            return output.tokens, engine.timings.decode_seconds, output.rounds

        decoders["draftsmith", FLOAT32, depth] = here

    head_file = made / "head.gguf"
    files = {FLOAT32: str(made / "target.gguf"), **{Path(file).stem: file for file in options.gguf}}
    with Progress("converting for llama.cpp", announced=True):
        convert(options.model, Path(files[FLOAT32]), log=made / "log")
        kind = kind_of(head)
        method = spec_type(kind)
        folder = str(find_head(options.head))
        convert(folder, head_file, target=None if kind == "draft" else options.model, log=made / "log")
    for name, file in files.items():
        for depth in (0, *depths):
            job = {
                "target": str(Path(file).absolute()),
                "head": str(head_file) if depth else None,
                "method": method,
                "depth": depth,
                "threads": torch.get_num_threads(),
                "context": max(256, length + 8),
                "cache": "f32",
            }
            place = made / f"{name}-{depth}"
            place.mkdir()
            what = f"{file}: llama.cpp refuses it"
            url = opened.enter_context(running(python, "llamacpp_server.py", job, what=what, folder=place))
            server = opened.enter_context(open_server(url, runner.run))

            def there(prompt: Prompt, count: int, server: EngineServer = server) -> tuple[list[int], float, int]:
                answer = runner.run(server.ask(prompt, Sampling(), count))
                seconds = answer.pieces[-1][0] - answer.pieces[0][0]  # as the server says them
                return answer.tokens, seconds, max(len(answer.tokens) - 1 - answer.accepted, 1)

            decoders["llama.cpp", name, depth] = there
    servers = []
    for url in options.server:
        server = opened.enter_context(open_server(check_url(url), runner.run))
        servers.append(server.name)

        def served(prompt: Prompt, count: int, server: EngineServer = server) -> tuple[list[int], float, int]:
            answer = runner.run(server.ask(prompt, Sampling(), count, target.eos_token_ids))
            rounds = sum(answer.rounds) if server.depth else len(answer.tokens) - 1
            return answer.tokens, answer.pieces[-1][0] - answer.pieces[0][0], rounds  # as they arrive

        decoders[server.engine, FLOAT32, server.depth] = served

    for name, form, _ in decoders:
        if (name, form, 0) not in decoders:
            raise UserError(f"--server: {name} drafts; name one without a draft, too, to compare it with")
    for decode in decoders.values():
        decode(prompts[0], WARM_UP_TOKENS)
    texts: dict[tuple[str, str, int], list[list[int]]] = {key: [] for key in decoders}
    passes = dict.fromkeys(decoders, 0)
    tokens = {key: [0.0] * len(prompts) for key in decoders}
    seconds = {key: [0.0] * len(prompts) for key in decoders}
    order = list(decoders)
    with Progress("decoding: text", options.repeats * len(prompts) * len(order)) as progress:
        for repeat in range(options.repeats):
            for i, prompt in enumerate(prompts):
                turn = (repeat + i) % len(order)
                for key in order[turn:] + order[:turn]:  # so that none is always first
                    text, spent, rounds = decoders[key](prompt, new_tokens)
                    if repeat == 0:
                        texts[key].append(text)
                        passes[key] += rounds
                    tokens[key][i] += len(text) - 1
                    seconds[key][i] += spent
                    progress.advance()
    bandwidth = copy_bandwidth(engines[0])
    weights = weight_bytes(target.model)
    plain = texts["draftsmith", FLOAT32, 0]
    rows = []
    for key in order:
        engine_name, name, depth = key
        own = texts[engine_name, name, 0]
        reference = (tokens[engine_name, name, 0], seconds[engine_name, name, 0])
        rate = tokens[key], seconds[key]
        drafted = bytes_read(engines[depth])[0] if depth in depths else 0
        ratio = with_interval(rate_ratio(rate, reference), rate_ratio_interval(rate, reference)) if depth else "1"
        decoded = sum(len(text) - 1 for text in texts[key])
        tau = decoded / max(passes[key], 1)
        is_bound = name == FLOAT32 and depth in (0, *depths)
        rows.append(
            {
                "engine": engine_name,
                "weights": name,
                "draft_tokens": depth,
                "tokens_per_second": sum(rate[0]) / sum(rate[1]),
                "tau": tau,
                "over_plain": ratio,
                "bound_tokens_per_second": tau * bandwidth / (weights + drafted) if is_bound else None,
                "equal_to_plain": sum(one == other for one, other in zip(texts[key], own, strict=True)),
                "equal_to_float32": sum(one == other for one, other in zip(texts[key], plain, strict=True)),
                "texts": len(prompts),
            }
        )
    print(f"{len(prompts)} prompts, {new_tokens} new tokens, {torch.get_num_threads()} threads, greedy, batch 1")
    print(f"{'':32}{'tokens/s':>10}{'tau':>7}  {'over its plain':22}{'bound':>8}{'= plain':>9}{'= ours':>8}")
    for row in rows:
        label = f"{row['engine']} {row['weights']}" + (f", chain:{row['draft_tokens']}" if row["draft_tokens"] else "")
        bound = f"{row['bound_tokens_per_second']:.0f}" if row["bound_tokens_per_second"] else "-"
        print(
            f"{label:32}{row['tokens_per_second']:10.1f}{row['tau']:7.2f}  {row['over_plain']:22}{bound:>8}"
            f"{row['equal_to_plain']:>9}{row['equal_to_float32']:>8}"
        )
    equal = all(row["equal_to_float32"] == len(prompts) for row in rows if row["weights"] == FLOAT32)
    if options.out:
        record = {
            "target": target_facts(target),
            **environment(target),
            "head": options.head,
            "kind": kind,
            "prompts": options.prompts,
            "num_prompts": len(prompts),
            "prompts_hash": prompts_hash(prompts),
            "max_new_tokens": new_tokens,
            "repeats": options.repeats,
            "copy_bandwidth": bandwidth,
            "llama_cpp": "b11549 (xllamacpp 2026.10.11549), caches in float32, no flash attention",
            "servers": servers,
            "time": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
        write_record(record, options.out)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(exit_status(main))
