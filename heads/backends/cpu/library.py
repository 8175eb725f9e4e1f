"""The one library of C: its sources, the structs of `kernels.h` and every function that Python calls."""

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

from heads.backends.cpu.compiling import compiled

SOURCES = ("layers.c", "products.c", "drafts.c", "draws.c", "commit.c", "kernels.h", "tiles.h")
POINTER = ctypes.c_void_p
NUMBERS = {"float": ctypes.c_float, "double": ctypes.c_double, "int64_t": ctypes.c_int64}
TYPES = {"p": POINTER, "f": ctypes.c_float, "n": ctypes.c_int64, "i": ctypes.c_int, "-": None}
FUNCTIONS = {
    # the result, then the arguments: p a pointer, n a whole number, f a float, - nothing
    "block_size": "i",
    "lanes": "i",
    "multiply": "-ppnppnn",
    "normalise_rows": "-pnpfpnnn",
    "scratch_size": "npnnnn",
    "decoder_layers": "-pnppnpnpnp",
    "move_slots": "-pppppnnnnnn",
    "module_room": "npnnnn",
    "recycle": "-pppppppp",
    "read_out": "-ppppnnn",
    "draft_chain": "-pppppppp",
    "extend": "-pppppppppppppp",
    "model_chain": "-pppppnpnp",
    "advance": "-ppppppnn",
    "gumbel": "-ppppnnn",
    "choose": "-pppppnnnn",
    "pick": "-ppppppnnnn",
    "commit": "-ppppn",
}


def structs_of(header: str) -> dict[str, Any]:
    """Return the structs that a header defines, by their names, for ctypes."""
    found: dict[str, Any] = {}
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", code, re.DOTALL):
        fields = []
        for declaration in body.split(";")[:-1]:
            kind, names = declaration.replace("const ", "").strip().split(maxsplit=1)
            for field in names.split(","):
                held = POINTER if "*" in field else NUMBERS.get(kind) or found[kind]
                fields.append((field.strip("* "), held))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


STRUCTS = structs_of(Path(__file__).with_name("kernels.h").read_text(encoding="utf-8"))


@cache
def load() -> ctypes.CDLL | None:
    """The compiled library; None where there is no compiler."""
    library = compiled(*(Path(__file__).with_name(name) for name in SOURCES))
    if library is not None:
        for name, kinds in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, *function.argtypes = [TYPES[kind] for kind in kinds]
    return library


def loaded() -> ctypes.CDLL:
    """The compiled library, for what is made only where there is one."""
    library = load()
    assert library is not None
    return library
