"""Engines in Python environments of their own, which scripts/make_engine.sh makes, and the programs that run in them.

An engine's packages do not go with this project's, so nothing here imports them. A program gets a job as a file of JSON
(`inside/`).
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heads.core.engines import READERS
from heads.core.errors import UserError

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".engines"
INSIDE = Path(__file__).parent / "inside"
SECONDS = 600.0
"""Time limit of an engine's start, and of all its answers."""


def variable_of(name: str) -> str:
    return f"DRAFTSMITH_{name.replace('.', '').upper()}_PYTHON"


def engine_python(name: str) -> Path | None:
    """Return the Python of an engine's environment; None if there is none."""
    named = os.environ.get(variable_of(name))
    python = Path(named) if named else ENVIRONMENTS / name / "bin/python"
    return python if python.is_file() else None


def need_python(name: str) -> Path:
    python = engine_python(name)
    if python is None:
        raise UserError(
            f"{READERS[name]} is not installed here; run scripts/make_engine.sh {name}, or name the Python of its "
            f"environment in {variable_of(name)}"
        )
    return python


def variables() -> dict[str, str]:
    """Return the variables of an engine's process: without this project's packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return kept | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_inside(python: Path, program: str, *arguments: str, what: str, log: Path) -> str:
    """Run a program of `inside/`, or a module's after `-m`, to its end, and return what it printed. UserError, with the
    last line of its log, if it fails."""
    command = [str(python), *([program] if program.startswith("-") else [str(INSIDE / program)]), *arguments]
    alone = variables() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    with log.open("w") as errors:
        try:
            done = subprocess.run(command, env=alone, stderr=errors, timeout=SECONDS, **pipes)
        except subprocess.TimeoutExpired:
            raise UserError(f"{what}: no end after {SECONDS:g} s; ask for fewer or shorter answers") from None
    if done.returncode != 0:
        raise UserError(f"{what}: {last_line(log)}")
    return str(done.stdout)


def run_job(python: Path, program: str, job: dict[str, object], *, what: str, folder: Path) -> dict[str, Any]:
    """Return the result, as JSON, of a program's job."""
    (folder / "job.json").write_text(json.dumps(job))
    run_inside(python, program, str(folder / "job.json"), str(folder / "result.json"), what=what, log=folder / "log")
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    return found


@contextmanager
def running(python: Path, program: str, job: dict[str, object], *, what: str, folder: Path) -> Iterator[str]:
    """Run a server for a `with` block, and give the address that it prints. It reads its standard input, a pipe from
    here, and ends with it: however this process ends, no server is left."""
    (folder / "job.json").write_text(json.dumps(job))
    log = folder / f"{Path(program).stem}.log"
    with log.open("w") as errors:
        server = subprocess.Popen(
            [str(python), str(INSIDE / program), str(folder / "job.json")],
            env=variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0,
        )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    try:
        lines = (line.strip() for line in server.stdout)
        address = next((line for line in lines if line.startswith("http")), None)
        if address is None:
            raise UserError(f"{what}: {last_line(log)}")
        yield address
    except UserError:
        if server.poll() is not None:  # what the client saw is only that
            raise UserError(f"{what}: {last_line(log)}") from None
        raise
    finally:
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def last_line(log: Path) -> str:
    """Return the last line of a log that says something, for an error of one line."""
    lines = [" ".join(line.split()) for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if "rror" in line] or [line for line in lines if line]
    return said[-1][:300] if said else "it ended without a word"
