"""Charts as files and inside a page: each is drawn once in matplotlib and written as PNG and SVG.

Colours have names. A page defines each as a CSS variable, for light and dark mode. A file uses the values of `COLOURS`
on white.
"""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heads.files import write_bytes

COLOURS = {
    "card": "#ffffff",
    "ink": "#16191f",
    "soft": "#5a6372",
    "line": "#d5d9e0",
    "draft": "#0a6ebd",
    "verify": "#c4570c",
    "accept": "#2e7d5b",
    "commit": "#6b7280",
    "plain": "#c9ced8",
    "faded": "#8b94a3",
}
WIDTH = 4.6
"""Width of a chart in inches. A page shows it 330 to 430 pixels wide, readable on a phone."""
FONT_SIZE = 12
LETTERS = 58
"""Maximum number of letters in a line of a caption."""
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": FONT_SIZE,
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # a dollar sign in a name does not start a formula
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["soft"],
    "axes.titlelocation": "left",
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["soft"],
    "ytick.labelcolor": COLOURS["soft"],
    "legend.frameon": False,
    "legend.labelcolor": COLOURS["soft"],
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.06,
    "svg.fonttype": "none",  # text stays text: it can be searched, and uses the reader's own font
}


@dataclass(frozen=True)
class Chart:
    """One chart of a report."""

    name: str
    """Name of its files, without the suffix."""
    title: str
    note: str
    """One or two sentences of explanation."""
    draw: Callable[[Axes], None]
    height: float = 2.7
    """Height in inches."""


def inline_svg(chart: Chart) -> str:
    """Return a chart as an SVG element that uses the page's font and the page's values of the named colours."""
    with drawn(chart) as figure:
        text = to_svg(figure, chart.name, transparent=True)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = text[text.index(">", box.end()) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")  # these ids are the same in all charts
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return f'<svg {box[0]} role="img" aria-label="{escape(f"{chart.title}. {chart.note}")}">{body}</svg>'


def write_charts(charts: Sequence[Chart], caption: str, folder: Path) -> list[Path]:
    """Write each chart as NAME.png and NAME.svg, with its title above it and the caption below. Return the files."""
    files = []
    for chart in charts:
        with drawn(chart, caption) as figure:
            files += save(figure, folder / chart.name)
    return files


@contextmanager
def drawn(chart: Chart, caption: str | None = None) -> Iterator[Figure]:
    """Yield a figure with a chart drawn on it, and with its title and the caption if there is a caption."""
    lines = textwrap.wrap(caption or "", LETTERS)
    extra = 0.4 + 0.17 * len(lines) if caption else 0.0
    with style():
        figure = Figure(figsize=(WIDTH, chart.height + extra), layout="constrained")
        chart.draw(figure.subplots())
        if caption:
            title(figure, chart.title, "\n".join(lines))
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # keep this layout, instead of computing it again for each file
        yield figure


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of all charts, and suppress warnings about letters that are missing in the font of a PNG."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def title(figure: Figure, text: str, caption: str) -> None:
    """Add a title above a figure and a caption below it."""
    figure.suptitle(text, x=0.02, ha="left", fontsize=FONT_SIZE + 1, fontweight="bold")
    figure.supxlabel(caption, x=0.02, ha="left", fontsize=FONT_SIZE - 3, color=COLOURS["soft"])


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG, without a date, so that equal results produce equal files. `path` has no
    suffix."""
    png, svg = path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    write_bytes(png, buffer.getvalue())
    write_bytes(svg, to_svg(figure, path.name).encode())
    return [png, svg]


def to_svg(figure: Figure, name: str, *, transparent: bool = False) -> str:
    """Return a figure as an SVG document whose ids depend only on `name`."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=transparent, metadata=nothing)
    return buffer.getvalue()
