"""A server of vLLM. Run by a Python that has vLLM: python vllm_server.py JOB

It prints its address when it answers, and ends when its standard input ends: so it never outlives the process that
started it.
"""

import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path


def announce(address: str, out: int) -> None:
    """Print the address once the server answers there, and end the server with the standard input."""

    def end() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except OSError:
            time.sleep(0.2)
    os.write(out, f"{address}\n".encode())


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    out = os.dup(1)
    os.dup2(2, 1)  # what the engine prints goes to the log
    if job["device"] is None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(job["cache_gib"])
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = job["device"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model": job["target"],
        "served-model-name": job["name"],
        "dtype": job["dtype"],
        "max-model-len": str(job["context"]),
        "max-num-seqs": str(job["rows"]),
        "gpu-memory-utilization": str(job["share"]),
        "generation-config": "vllm",
        "host": "127.0.0.1",
        "port": str(port),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    words += ["--disable-uvicorn-access-log"]
    if job["device"] is None:
        words.append("--enforce-eager")  # compiling needs a C compiler
        words.append("--no-enable-chunked-prefill")  # 0.32 ends at a request with a seed, of which it reads a part
    if job["trust_remote_code"]:
        words.append("--trust-remote-code")
    threading.Thread(target=announce, args=(f"http://127.0.0.1:{port}", out), daemon=True).start()
    # As `vllm serve`, which asks for the version of a package that the build for CPUs calls otherwise.
    sys.argv[1:] = words
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
