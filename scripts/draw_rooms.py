"""Draw the rooms of heads/, eval/ and train/ from the imports of their files: `.github/rooms.svg`, the picture of
ARCHITECTURE.md. `scripts/write_pages.py` writes it.

A package's own files are its roof, its folders are its rooms. An arrow goes from a room to one that it imports, and
only where no other path of arrows says so. Colours are of the reader's theme, light or dark.
"""

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / ".github/rooms.svg"
ROOF = "roof"
PACKAGES = {"train": "trains a head", "eval": "runs and measures a head", "heads": "is a head, and its target"}
ROOFS = {"train": "commands, one a method", "eval": "commands", "heads": "what others call"}
ROOMS = {
    ("train", "core"): "YAML, processes, interrupts",
    ("train", "data"): "chats to packed rows",
    ("train", "features"): "rows to the target's states",
    ("train", "recipe"): "the settings of a run",
    ("train", "steps"): "one optimizer step",
    ("train", "run"): "loop, checkpoints, tau",
    ("train", "plan"): "recipes derived; hours",
    ("eval", "runtime"): "exact decoding with drafts",
    ("eval", "core"): "command line, progress",
    ("eval", "data"): "prompts, records, forms",
    ("eval", "records"): "what was measured",
    ("eval", "measure"): "heads, on prompts",
    ("eval", "pages"): "records to tables, reports",
    ("eval", "servers"): "the same over HTTP",
    ("heads", "core"): "the contract, errors, trees",
    ("heads", "kernels"): "products, attention, choice",
    ("heads", "targets"): "the frozen target, its cache",
    ("heads", "parts"): "layers, losses, start, trees",
    ("heads", "methods"): "model, loss and drafting",
    ("heads", "blocks"): "DFlash and its corrections",
    ("heads", "foreign"): "heads by other projects",
    ("heads", "formats"): "files that engines load",
}
"""What each room does."""
COLUMN, GAP, LINE = 128, 18, 13
LIGHT = {"card": "#ffffff", "ink": "#16191f", "soft": "#5a6372", "line": "#b9c0cb", "arrow": "#0a6ebd"}
DARK = {"card": "#181c23", "ink": "#e8eaee", "soft": "#9aa3b2", "line": "#454d5b", "arrow": "#58aef0"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted names of all imports of a file, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: relative import"
            yield node.module or ""


def room_of(package: str, name: str) -> str:
    """Return the room of a module of a package, given its dotted name; `ROOF` for the package's own files."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / package / parts[1]).is_dir() else ROOF


def imports_of(package: str) -> dict[str, set[str]]:
    """Return the rooms of a package, each with the other rooms of the package that it imports."""
    found: dict[str, set[str]] = {}
    for path in modules(package):
        own = room_of(package, ".".join(path.relative_to(ROOT).with_suffix("").parts))
        names = {room_of(package, name) for name in imported_names(path) if name.split(".")[0] == package}
        found.setdefault(own, set()).update(names - {own})
    return found


def others_of(package: str) -> set[str]:
    """Return the other packages that a package imports."""
    names = {name.split(".")[0] for path in modules(package) for name in imported_names(path)}
    return names & PACKAGES.keys() - {package}


def in_order(imports: dict[str, set[str]]) -> list[str]:
    """Return the rooms, each after those that it imports. Raises graphlib.CycleError if there is no such order."""
    depths: dict[str, int] = {}
    for room in TopologicalSorter(imports).static_order():
        depths[room] = 1 + max((depths[other] for other in imports[room]), default=0)
    return sorted(depths, key=lambda room: (depths[room], room))


def direct(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the imports (importer, imported) that no longer path of imports implies."""

    def reached(rooms: Iterable[str]) -> set[str]:
        near = set(rooms)
        return near.union(*(reached(imports[room]) for room in near))

    pairs = [(room, other) for room, others in imports.items() for other in others]
    return sorted((room, other) for room, other in pairs if other not in reached(imports[room] - {other}))


def box(x: int, y: int, height: int, title: str, note: str, files: list[str]) -> Iterator[str]:
    dash = ' stroke-dasharray="4 3"' if title == ROOF else ""
    yield f'<rect x="{x}" y="{y}" width="{COLUMN}" height="{height}" rx="6" class="room"{dash}/>'
    yield f'<text x="{x + 8}" y="{y + 18}" class="title">{escape(title)}</text>'
    yield f'<text x="{x + 8}" y="{y + 31}" class="note">{escape(note)}</text>'
    for row, name in enumerate(files):
        yield f'<text x="{x + 8}" y="{y + 48 + LINE * row}" class="file">{escape(name)}</text>'


def arrow(start: int, end: int, y: int) -> str:
    """Return an arrow from the box at column `start` to that at column `end`, over the tops of boxes at y."""
    if start - end == 1:
        right = place(start)
        return f'<path d="M{right} {y + 14}H{right - GAP + 3}" class="arrow"/>'
    begin = place(start) + COLUMN // 3
    finish = place(end) + 2 * COLUMN // 3
    return f'<path d="M{begin} {y}C{begin} {y - 22} {finish} {y - 22} {finish} {y - 3}" class="arrow"/>'


def place(column: int) -> int:
    return 8 + column * (COLUMN + GAP)


def picture() -> str:
    """Return the picture as an SVG document."""
    parts: list[str] = []
    width, y = 0, 8
    for package, purpose in PACKAGES.items():
        imports = imports_of(package)
        rooms = in_order(imports)
        files = {room: file_names(ROOT / package / (room if room != ROOF else "")) for room in rooms}
        height = 56 + LINE * max(map(len, files.values()))
        parts.append(f'<text x="8" y="{y + 14}" class="package">{package}/</text>')
        others = ", ".join(sorted(others_of(package)))
        parts.append(
            f'<text x="80" y="{y + 14}" class="purpose">{purpose}{f"; imports {others}" * bool(others)}</text>'
        )
        y += 34
        for column, room in enumerate(rooms):
            note = ROOFS[package] if room == ROOF else ROOMS[package, room]
            parts += box(place(column), y, height, room, note, files[room])
        width = max(width, place(len(rooms)) - GAP + 8)
        columns = {room: column for column, room in enumerate(rooms)}
        parts += [arrow(columns[room], columns[other], y) for room, other in direct(imports)]
        y += height + 16
    light, dark = ("".join(map("--{}:{};".format, hues.keys(), hues.values())) for hues in (LIGHT, DARK))
    style = (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "text{font-family:Helvetica,Arial,sans-serif;fill:var(--ink)}"
        ".package{font-size:17px;font-weight:bold}.purpose{font-size:13px;fill:var(--soft)}"
        ".title{font-size:13px;font-weight:bold}.note{font-size:9px;fill:var(--soft)}.file{font-size:10px}"
        ".room{fill:var(--card);stroke:var(--line)}"
        ".arrow{fill:none;stroke:var(--arrow);stroke-width:1.6;marker-end:url(#head)}.head{fill:var(--arrow)}"
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
    )
    label = "Rooms of train, eval and heads with their files. An arrow goes from a room to one that it imports."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img" aria-label="{label}">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{y}" fill="var(--card)"/>',
            marker,
            *parts,
            "</svg>\n",
        ]
    )


def file_names(folder: Path) -> list[str]:
    """Return the names of a folder's own files of code, without the suffix of Python."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".py", ".c") and path.name != "__init__.py")
    return [path.stem if path.suffix == ".py" else path.name for path in files]
