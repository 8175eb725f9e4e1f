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
NEEDS_VLLM = [pytest.mark.engine, pytest.mark.skipif(PYTHON is None, reason="see scripts/make_engine.sh vllm")]
HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "recipes/quickstart/target"
SECONDS = 600
"""Time limit of an answer, and of a server's start."""


def ask_vllm(folder: Path, **job: Any) -> dict[str, Any]:
    """Return what vllm_answers.py writes about a job."""
    assert PYTHON is not None
    return run_job(PYTHON, "vllm_answers.py", job, what="vLLM", folder=folder)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def vllm_server(folder: Path, *options: str, target: str = str(TARGET)) -> Iterator[str]:
    """Serve a target for a `with` block, and give the address."""
    port = free_port()
    # As `vllm serve`, which asks for the version of a package that the build for CPUs calls otherwise.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    command += ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"]
    command += ["--host", "127.0.0.1", "--port", port, "--max-model-len", "512", "--max-num-seqs", "8", *options]
    with serving(command, f"http://127.0.0.1:{port}", folder) as url:
        yield url


@contextmanager
def serving(command: list[str], url: str, folder: Path) -> Iterator[str]:
    """Run the command of a server in a folder for a `with` block."""
    with (folder / "server.log").open("w") as log:
        own = variables() | {"PYTHONPATH": str(HERE)}
        server = subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log, process_group=0)
    try:
        until = time.monotonic() + SECONDS
        while not is_up(url):
            assert server.poll() is None and time.monotonic() < until, (folder / "server.log").read_text()[-6000:]
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
