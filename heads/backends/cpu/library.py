"""The C library: its sources, and the structs and functions that they define."""

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

from heads.backends.cpu.compiling import compiled

SOURCES = ("layers.c", "products.c", "drafts.c", "draws.c", "commit.c", "kernels.h", "tiles.h")
POINTER = ctypes.c_void_p
NUMBERS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
TYPES: dict[str, Any] = {"void": None, **NUMBERS}


def code_of(name: str) -> str:
    """Return a file's code without its comments."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def structs_of(code: str) -> dict[str, Any]:
    """Return the structs that a header defines, by name, as ctypes structures."""
    found: dict[str, Any] = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", code, re.DOTALL):
        fields = []
        for declaration in body.split(";")[:-1]:
            kind, names = declaration.replace("const ", "").strip().split(maxsplit=1)
            for field in names.split(","):
                held = POINTER if "*" in field else NUMBERS.get(kind) or found[kind]
                fields.append((field.strip("* "), held))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def declare_functions(library: ctypes.CDLL, code: str) -> None:
    """Set the argument and result types of the non-static functions that a file defines."""
    for result, name, arguments in re.findall(r"^(void|int|int64_t) (\w+)\(([^)]*)\)\s*\{", code, re.MULTILINE):
        function, given = getattr(library, name), [] if arguments == "void" else arguments.split(",")
        function.restype = TYPES[result]
        function.argtypes = [POINTER if "*" in argument else TYPES[argument.split()[0]] for argument in given]


STRUCTS = structs_of(code_of("kernels.h"))


@cache
def load() -> ctypes.CDLL | None:
    """Return the compiled library, None if it cannot be compiled or loaded."""
    library = compiled(*(Path(__file__).with_name(name) for name in SOURCES))
    if library is not None:
        for name in SOURCES:
            declare_functions(library, code_of(name))
    return library


def loaded() -> ctypes.CDLL:
    """Return the compiled library, for code that runs only if there is one."""
    library = load()
    assert library is not None
    return library
