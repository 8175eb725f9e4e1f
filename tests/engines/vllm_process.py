"""Processes of a whole vLLM, in the environment whose Python DRAFTSMITH_VLLM_PYTHON names."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("DRAFTSMITH_VLLM_PYTHON", "")
NEEDS_VLLM = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="DRAFTSMITH_VLLM_PYTHON names no Python with vLLM"),
]
HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "recipes/quickstart/target"
SECONDS = 600
"""Time limit of an answer, and of a server's start."""


def environment() -> dict[str, str]:
    """Return the variables of a small vLLM on a CPU, with this folder's modules and without this project's packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return kept | {
        "PYTHONPATH": str(HERE),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


def ask_vllm(folder: Path, **job: Any) -> dict[str, Any]:
    """Return what vllm_generate.py writes about a job."""
    (folder / "job.json").write_text(json.dumps(job))
    program = [PYTHON, str(HERE / "vllm_generate.py"), "job.json", "result.json"]
    own = environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with (folder / "vllm.log").open("w") as log:
        done = subprocess.run(program, cwd=folder, env=own, stdout=log, stderr=log, timeout=SECONDS)
    assert done.returncode == 0, (folder / "vllm.log").read_text()[-6000:]
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@contextmanager
def vllm_server(folder: Path, *options: str) -> Iterator[str]:
    """Serve the quickstart's target for a `with` block, and give the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As `vllm serve`, which asks for the version of a package that the build for CPUs calls otherwise.
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET)]
    command += ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "8", *options]
    with (folder / "vllm.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log, process_group=0)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
        while not is_up(url):
            assert server.poll() is None and time.monotonic() < until, (folder / "vllm.log").read_text()[-6000:]
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
