"""The first session on a card: are the kernels right, are the texts exact, how fast is a round? One JSON file.

    python scripts/gpu_check.py facts   # every kernel in bfloat16 against float64, three times
    python scripts/gpu_check.py texts   # drafted texts against plain ones at 8B widths, native and Hugging Face's model
    python scripts/gpu_check.py speed   # steps and rounds of an 8B model against the bandwidth, and transformers'
    python scripts/gpu_check.py texts -k llama    # the tests with these words alone, as of pytest
    TRITON_INTERPRET=1 python scripts/gpu_check.py facts --small      # on a CPU, in Triton's interpreter, in float32

Each command runs a file of tests/gpu, is sized for eight minutes on a card of 80 GB, and adds its part to the JSON
file. Weights are random and dense, as a model's are. A command exits with status 1 if a fact does not hold: a kernel
that is off or does not repeat itself, a text that differs by more than a near-tie, or an engine that runs without its
kernels or its CUDA graphs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.core.command_line import Parser, exit_status
from heads.core.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("Facts, exact texts and speed on a card that no engine has run on yet.")
    parser.add_argument("command", choices=["facts", "texts", "speed"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, for Triton's interpreter on a CPU")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-check.json"),
        help="file that the part is added to; default: %(default)s",
    )
    parser.add_argument("-k", default="", metavar="WORDS", help="run only the tests with these words")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    names = {"GPU_CHECK_OUT": str(options.out.absolute()), "GPU_CHECK_SMALL": "1" if options.small else ""}
    words = ["-m", "pytest", "-q", "-m", "gpu", "-W", "ignore", f"tests/gpu/test_{options.command}.py", "-k", options.k]
    status = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | names, check=False).returncode
    record = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if status == 0 and options.command not in record:
        raise UserError("no CUDA device; use a machine with one, or --small")
    for name, fact in record.get(options.command, {"found": {}})["found"].items():
        print(f"{'' if fact['ok'] else 'WRONG '}{name}: {json.dumps(fact)}")
    return min(status, 1)


if __name__ == "__main__":
    sys.exit(exit_status(main))
