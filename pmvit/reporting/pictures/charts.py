"""Small charts for pages: matplotlib's SVG, in colours of the page's style sheet so that they follow its theme."""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT = 440, 300
COLOURS = tuple(f"#{number + 1:06x}" for number in range(8))  # each stands for a variable of the style sheet
INK, SOFT, LINE, PAPER = "#00000a", "#00000b", "#00000c", "#00000d"
VARIABLES = {colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", PAPER: "var(--paper)"}
LETTERS = 12


@dataclass(frozen=True)
class Series:
    """Points with one name: joined by a line, and marked if they have titles, which a mark shows when pointed at."""

    name: str
    points: Sequence[tuple[float, float]]
    titles: Sequence[str] = ()
    colour: int | None = 0  # None is ink


@dataclass(frozen=True)
class Chart:
    """A chart to be put on a page: the drawing, and the names that go with its colours."""

    title: str
    svg: Markup
    legend: list[tuple[str, str]]


def line_chart(title: str, series: Sequence[Series], x: str, y: str, *, zero: bool = False) -> Chart:
    """Draw series over a common pair of axes.

    Args:
        title: Of the chart.
        series: What to draw; the first one lies below the others.
        x: What goes to the right.
        y: What goes upwards.
        zero: Whether the upward axis begins at zero.
    """
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
    axes = figure.subplots()
    for number, one in enumerate(series):
        colour = INK if one.colour is None else COLOURS[one.colour % len(COLOURS)]
        axes.plot(*zip(*one.points, strict=True), color=colour, linewidth=2)
        if one.titles:
            style: dict[str, Any] = {
                "color": colour,
                "markersize": 9,
                "markeredgecolor": PAPER,
                "gid": f"marks{number}",
            }
            axes.plot(*zip(*one.points, strict=True), "o", **style)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylim(bottom=0 if zero else None)
    axes.set_xlabel(x, color=INK, size=LETTERS, parse_math=False)
    axes.set_ylabel(y, color=INK, size=LETTERS, parse_math=False)
    axes.tick_params(length=0, labelcolor=SOFT, labelsize=LETTERS)
    axes.grid(axis="y", color=LINE)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    svg = _inline_svg(figure, title, {f"marks{number}": one.titles for number, one in enumerate(series)})
    svg.set("aria-label", f"{title}: {y} over {x}, {', '.join(one.name for one in series)}")
    text = ElementTree.tostring(svg, encoding="unicode")
    names = [(one.name, "ink" if one.colour is None else f"c{one.colour % len(COLOURS)}") for one in series]
    return Chart(title, Markup(text), names)  # noqa: S704  # serialised, so that every text is escaped


def _inline_svg(figure: Figure, salt: str, titles: dict[str, Sequence[str]]) -> ElementTree.Element:
    """What matplotlib draws without what the page's security policy forbids (styles), and with titles on marks."""
    content = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(
            content, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None}
        )
    root = ElementTree.fromstring(content.getvalue())  # noqa: S314  # our own
    for name, words in titles.items():
        marks = root.findall(f".//*[@id='{name}']//{{*}}use")
        for mark, title in zip(marks, words, strict=False):
            ElementTree.SubElement(mark, "title").text = title
    for element in list(root.iter()):
        for child in list(element):
            if child.tag.endswith(("}metadata", "}style")):
                element.remove(child)
        for name, value in re.findall(r"([\w-]+): ?([^;]+)", element.attrib.pop("style", "")):
            if not name.startswith("font"):  # letters are the style sheet's
                element.set(name, VARIABLES.get(value, value))
        if element.tag.endswith("}g"):
            element.attrib.pop("id", None)
        element.tag = _without_namespace(element.tag)
        element.attrib = {_without_namespace(name): value for name, value in element.attrib.items()}
    for size in ("width", "height"):
        del root.attrib[size]
    root.set("role", "img")
    return root


def _without_namespace(name: str) -> str:
    return name.rpartition("}")[2]
