"""Is it the head, the conversion or the engine? The same token ids through this runtime and a real engine.

    python eval/parity.py runs/quickstart --engine llama.cpp
    python eval/parity.py HEAD --target T --engine vllm --prompts mt_bench --tree chain:5
    python eval/parity.py HEAD --target T --engine llama.cpp --server http://localhost:8080

The engine is started here, in the environment that scripts/make_engine.sh made for it, or it runs somewhere
(--server). Texts are greedy. Texts, rounds, draft tokens and accepted ones by position are compared, per request where
the engine says so. Where they differ, a ladder of questions is run (`eval.servers.parity_ladder`), and the last line is
the answer. Writes parity.json and parity.md into a new folder under runs/, or into --out.

Exit status: 0 if all is equal; 1 if not; 2, with one line, for an error that the user can fix.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, add_head_options, check_depths, exit_status, typed
from eval.data.prompts import HELD_OUT_SUITE, check_suites
from eval.records.measure_settings import BenchSettings, add_settings_options
from eval.records.result_folders import own_folder, plain_name, short_name
from eval.servers.openai_client import check_url
from heads.core.contract import split_draft
from heads.core.errors import UserError

ENGINES = ("llama.cpp", "openvino", "vllm", "mlx")
CACHES = ("f32", "f16", "q8_0", "q4_0")
SETTINGS = ("prompts", "num_prompts", "max_prompt_tokens", "max_new_tokens", "seed")
DEFAULTS = {"prompts": HELD_OUT_SUITE, "num_prompts": 8, "max_prompt_tokens": 256, "max_new_tokens": 64}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Run a head here and in a real engine, and say what makes them differ, if they do.")
    add = parser.add_argument
    add_head_options(parser)
    add("--engine", required=True, choices=ENGINES, help="engine to compare with")
    address = typed(Annotated[str, AfterValidator(check_url)])
    add("--server", type=address, metavar="URL", help="a running llama.cpp or vLLM, in place of one started here")
    add("--tree", metavar="chain:K", help="draft tokens in a round; default: the server's, or as trained, at most 5")
    add("--engine-target", metavar="PATH", help="the target as converted for the engine: a GGUF file, an IR's folder")
    add("--engine-head", metavar="PATH", help="the same of the head")
    add("--engine-cache", choices=CACHES, default="f32", help="llama.cpp's caches, if started here; default: f32")
    add_settings_options(parser, SETTINGS, **DEFAULTS)
    add("--out", type=Path, help="folder for the record and the page; default: a new one under runs/")
    options = parser.parse_args(arguments)
    options.skip_long = True
    if options.server and options.engine not in ("llama.cpp", "vllm"):
        parser.error(f"--server: {options.engine} has no server whose counters are read; leave it out")
    if options.server and (options.engine_target or options.engine_head or options.engine_cache != "f32"):
        parser.error("--server: has its own files and cache; leave --engine-target, --engine-head, --engine-cache out")
    if options.engine not in ("llama.cpp", "openvino") and (options.engine_target or options.engine_head):
        parser.error(f"--engine-target, --engine-head: {options.engine} reads the folders as they are; leave them out")
    if options.tree and not options.tree.removeprefix("chain:").isdecimal():
        parser.error(f"--tree: engines draft chains here; expected chain:K, got {options.tree!r}")
    check_depths([options.tree] if options.tree else (), options.max_new_tokens)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from heads.registry import untrained_kind

    if untrained_kind(options.head):
        raise UserError(f"{options.head}: needs no engine's reader; name a head's folder")
    if (alone := split_draft(options.head)[1]) != options.head:
        raise UserError(f"{options.head}: a lookup needs no engine's reader; name the head alone, {alone}")
    check_suites(options.prompts)
    from eval.servers.parity_run import compare, write_parity

    given = {name: value for name, value in vars(options).items() if name in BenchSettings.model_fields}
    settings = BenchSettings(**given)
    parent = Path("runs", plain_name(f"parity-{short_name(options.head)}"))
    with own_folder(parent, settings, options, {}) as (out, _):
        words = sys.argv[1:] if arguments is None else arguments
        record = compare(options, settings, ["python", "eval/parity.py", *words])
        write_parity(record, out)
    print("\n".join(record.lines))
    print(record.answer)
    print(f"written to {out}", file=sys.stderr)
    return 0 if record.equal else 1


if __name__ == "__main__":
    sys.exit(exit_status(main))
