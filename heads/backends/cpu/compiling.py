"""Compilation of our C code, on first use and for this processor, if there is a compiler.

As usual, CC names the compiler and CFLAGS adds flags. CFLAGS=-march=x86-64-v3 compiles for processors without AVX-512,
and CC=none disables C.
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
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FLAGS = (
    *("-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC", "-ffp-contract=fast"),
    *("-fno-trapping-math", "-fno-math-errno"),  # else a loop that selects between two numbers is not vectorized
)
COMPILE_SECONDS = 300
logger = logging.getLogger("draftsmith")


def compiled(*sources: Path) -> ctypes.CDLL | None:
    """Compile C files and headers of one folder and load the library, which is named after the first file. If that
    fails, log the reason and return None."""
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(build(sources, compiler)))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:  # RuntimeError: a user without a home
        logger.info("%s could not be compiled (%s): torch's operations are used", sources[0].name, error)
        return None


@cache
def find_compiler() -> str | None:
    """Return the path of a C compiler: the one that CC names, else the first one found; None if there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None or sys.platform == "win32":
        logger.info("no C compiler found: decoding on this CPU takes torch's operations, which are slower")
        return None
    return found


def build(sources: Sequence[Path], compiler: str) -> Path:
    """Compile into the user's cache, unless it holds the complete library. A library's name ends in the hash of its
    content, since loading a truncated library kills the process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
    text = b"".join(source.read_bytes() for source in sources)
    flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    digest = hashlib.sha256(text + repr((compiler, flags, processor())).encode())
    name = f"{sources[0].stem}-{digest.hexdigest()[:16]}"
    for path in folder.glob(f"{name}-*.so"):
        if path.stem == f"{name}-{short_hash(path)}":
            return path
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{sources[0].name} is compiled for this processor, once", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / f"{name}.so"
        files = [str(source) for source in sources if source.suffix == ".c"]
        command = [compiler, *flags, *files, "-o", str(made), "-lm"]
        if run([*command, "-fopenmp"]).returncode:
            run(command).check_returncode()  # without OpenMP: one thread
        return made.replace(folder / f"{name}-{short_hash(made)}.so")


def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a compiler, with a time limit and no input."""
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS)


def short_hash(path: Path) -> str:
    """Return a hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def processor() -> str:
    """Return the processor's features, on which `-march=native` depends. Machines may share one home folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "") + os.uname().machine
