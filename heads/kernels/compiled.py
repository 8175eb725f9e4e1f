"""The C of this folder, compiled on first use for this machine's processor.

CC names the compiler and CFLAGS adds flags: CFLAGS=-march=x86-64-v3 compiles for processors without AVX-512, and
CC=none disables C.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCES = [Path(__file__).with_name(name) for name in ("product.c", "noisy_argmax.c")]
FLAGS = (
    *("-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC", "-ffp-contract=fast"),
    *("-fno-trapping-math", "-fno-math-errno"),  # else a loop that selects between two numbers is not vectorized
)
COMPILE_SECONDS = 300
logger = logging.getLogger("draftsmith")


@cache
def find_compiler() -> str | None:
    """Return the path of a C compiler: the one that CC names, else the first one found; None if there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    if sys.platform == "win32":
        return None
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def compiled() -> ctypes.CDLL | None:
    """Return the compiled library. If it cannot be compiled or loaded, log the reason and return None."""
    compiler = find_compiler()
    if compiler is None:
        logger.info("no C compiler found: products on this CPU take oneDNN, which is slower")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:  # RuntimeError: a user without a home
        logger.info("C could not be compiled (%s): products on this CPU take oneDNN, which is slower", error)
        return None


def _build(compiler: str) -> Path:
    """Compile into the user's cache, unless it holds the complete library. A library's name ends in the hash of its
    content, since loading a truncated library kills the process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
    flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    code = b"".join(source.read_bytes() for source in SOURCES)
    digest = hashlib.sha256(code + repr((compiler, flags, _processor())).encode())
    name = f"kernels-{digest.hexdigest()[:16]}"
    for path in folder.glob(f"{name}-*.so"):
        if path.stem == f"{name}-{_short_hash(path)}":
            return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        library = Path(scratch) / f"{name}.so"
        command = [compiler, *flags, *map(str, SOURCES), "-o", str(library), "-lm"]
        if _run([*command, "-fopenmp"]).returncode:
            _run(command).check_returncode()  # without OpenMP: one thread
        return library.replace(folder / f"{name}-{_short_hash(library)}.so")


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS)


def _short_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's features, on which `-march=native` depends. Machines may share one home folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "") + os.uname().machine
