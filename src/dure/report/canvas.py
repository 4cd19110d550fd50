"""The settings, ticks and SVG that all figures share.

The module does not use pyplot, and changes the settings of matplotlib only while it draws.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dure.core.packages import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, GRID = "#1F2933", "#52606D", "#E4E7EB"
MOST_MARKS = 7
_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9AA5B1",
    "axes.labelcolor": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
}


def plain(unit: str | None, *, factor: float = 1.0, only: Sequence[int] | None = None) -> Any:
    """Formats ticks as plain numbers; with `only`, those with these leading digits; with None, no tick."""
    from matplotlib.ticker import FuncFormatter

    def text(value: float, _place: object) -> str:
        shown = factor * value
        if unit is None or (only is not None and not _leads(shown, only)):
            return ""
        return f"{shown:,.0f}{unit}" if abs(shown) >= 1000 else f"{shown:.6g}{unit}"

    return FuncFormatter(text)


def round_marks(low: float, high: float) -> list[float]:
    """At most seven round values of a logarithmic axis: powers of ten, with their 2 and 5 or their 3 if they fit.

    >>> round_marks(15, 5000)
    [30.0, 100.0, 300.0, 1000.0, 3000.0]
    """
    from matplotlib.ticker import MaxNLocator

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        every = [float(f"{step}e{power}") for power in powers for step in steps]
        found = [value for value in every if low <= value <= high]
        if len(found) < 3 and steps == (1, 2, 5):
            even = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
            return [float(value) for value in even if low <= value <= high]
        if len(found) <= MOST_MARKS:
            return found
    return found[:: math.ceil(len(found) / MOST_MARKS)]


def _leads(value: float, digits: Sequence[int]) -> bool:
    return value > 0 and round(value / 10 ** math.floor(math.log10(value) + 1e-9)) in digits


@contextmanager
def drawing(
    name: str, *, width: float, height: float, alone: bool = False
) -> Iterator[tuple[Figure, Callable[[], str]]]:
    """Yields a figure of `width` x `height` inches, and a function that gives its SVG after the block.

    The SVG is for a page, or with `alone` a file of its own on a white ground.
    """
    mpl, _ = import_extra("report", "a figure")
    from matplotlib.figure import Figure

    salt = hashlib.sha256(name.encode()).hexdigest()[:8]
    text = io.StringIO()
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": salt}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, lambda: text.getvalue() if alone else _inline(text.getvalue())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=not alone, metadata=nothing)


def _inline(svg: str) -> str:
    """Removes the parts of an SVG that only a file needs, and its fixed width: the page sets it.

    The style of all elements moves to the root, from which they inherit it: in a page it would be that of all pictures.
    """
    svg = svg[svg.index("<svg") :]
    for style in re.findall(r'<style type="text/css">\*\{([^}]*)\}</style>', svg):
        svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
        svg = svg.replace("<svg ", f'<svg style="{style}" ', 1)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r'<g id="[^"]*"', "<g", svg)
