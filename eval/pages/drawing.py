"""Charts as files and inside a page: one drawing in matplotlib, written as PNG and SVG.

Colours have names. A page defines each name as a CSS variable, for light and dark. Files use `COLOURS` on white.
"""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heads.core.files import write_bytes

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
STYLE: dict[Any, object] = {
    "font.family": "sans-serif",
    "font.size": FONT_SIZE,
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # a dollar sign in a name is literal
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
    "svg.fonttype": "none",  # keeps text searchable, in the reader's own font
}


@dataclass(frozen=True)
class Chart:
    name: str
    """Name of its files, without the suffix."""
    title: str
    note: str
    """One or two sentences of explanation."""
    draw: Callable[[Axes], None]
    height: float = 2.7
    """Height in inches."""
    folded: bool = True
    """True for diagnosis, which a page folds."""


def inline_svg(chart: Chart) -> str:
    """Return a chart as an SVG element that takes its colours, by name, and its font from the page."""
    with drawn(chart) as figure:
        text = to_svg(figure, chart.name, transparent=True)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = text[text.index(">", box.end()) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")  # these ids are the same in every chart
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return f'<svg {box[0]} role="img" aria-label="{escape(f"{chart.title}. {chart.note}")}">{body}</svg>'


def svg_file(chart: Chart, dark: Mapping[str, str]) -> str:
    """Return a chart as an SVG document with the colours of its reader's theme, light or `dark`, by name."""
    light = "".join(f"--{name}:{hue};" for name, hue in COLOURS.items())
    dark_ones = "".join(f"--{name}:{hue};" for name, hue in dark.items())
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark_ones}}}}}</style>"
    return (
        inline_svg(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{style}", 1)
    )


def write_charts(charts: Sequence[Chart], caption: str, folder: Path) -> list[Path]:
    """Write each chart as NAME.png and NAME.svg, with its title above and the caption below, and without a date, so
    that equal results give equal files. Return the files."""
    files = []
    for chart in charts:
        with drawn(chart, caption) as figure:
            png = io.BytesIO()
            figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
            for ending, data in (("png", png.getvalue()), ("svg", to_svg(figure, chart.name).encode())):
                files.append(folder / f"{chart.name}.{ending}")
                write_bytes(files[-1], data)
    return files


@contextmanager
def drawn(chart: Chart, caption: str | None = None) -> Iterator[Figure]:
    """Draw a chart as a figure. If there is a caption, add the title and the caption."""
    lines = textwrap.wrap(caption or "", LETTERS)
    extra = 0.4 + 0.17 * len(lines) if caption else 0.0
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # letters that the font of a PNG lacks
        figure = Figure(figsize=(WIDTH, chart.height + extra), layout="constrained")
        chart.draw(figure.subplots())
        if caption:
            figure.suptitle(chart.title, x=0.02, ha="left", fontsize=FONT_SIZE + 1, fontweight="bold")
            small: Any = {"fontsize": FONT_SIZE - 3, "color": COLOURS["soft"]}
            figure.supxlabel("\n".join(lines), x=0.02, ha="left", **small)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # computed once, not for each file
        yield figure


def to_svg(figure: Figure, name: str, *, transparent: bool = False) -> str:
    """Return a figure as an SVG document whose ids depend on `name` alone."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=transparent, metadata=nothing)
    return buffer.getvalue()
