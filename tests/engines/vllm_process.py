"""Processes of a whole vLLM, in its environment (scripts/make_engine.sh vllm)."""

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

from eval.servers.engine_process import engine_python, run_job, variables

PYTHON = engine_python("vllm")
NEEDS_VLLM = [
    pytest.mark.engine,
    pytest.mark.skipif(PYTHON is None, reason="no environment with vLLM (scripts/make_engine.sh vllm)"),
]
HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "recipes/quickstart/target"
SECONDS = 600
"""Time limit of an answer, and of a server's start."""


def ask_vllm(folder: Path, **job: Any) -> dict[str, Any]:
    """Return what vllm_answers.py writes about a job."""
    assert PYTHON is not None
    return run_job(PYTHON, "vllm_answers.py", job, what="vLLM", folder=folder)


@contextmanager
def vllm_server(folder: Path, *options: str) -> Iterator[str]:
    """Serve the quickstart's target for a `with` block, and give the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As `vllm serve`, which asks for the version of a package that the build for CPUs calls otherwise.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET)]
    command += ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "8", *options]
    with (folder / "vllm.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=variables() | {"PYTHONPATH": str(HERE)}, stdout=log, stderr=log, process_group=0
        )
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
