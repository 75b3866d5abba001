"""Small charts for pages: matplotlib's SVG, in colours of the page's style sheet so that they follow its theme."""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import NamedTuple

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


class Series(NamedTuple):
    """Points with one name: joined by a line, and marked if they have titles, which a mark shows when pointed at."""

    name: str
    points: Sequence[tuple[float, float]]
    titles: Sequence[str] = ()
    colour: int | None = 0  # None is ink


class Chart(NamedTuple):
    """A chart to be put on a page: the drawing, and the names that go with its colours."""

    title: str
    svg: Markup
    legend: list[tuple[str, str]]


def line_chart(title: str, series: Sequence[Series], x: str, y: str, *, zero: bool = False) -> Chart:
    """Draw series over a common pair of axes, whose names are `x` and `y`; the first series lies below the others.

    `zero` is whether the upward axis begins at zero.
    """
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
    axes = figure.subplots()
    for number, (_, points, titles, place) in enumerate(series):
        colour = INK if place is None else COLOURS[place % len(COLOURS)]
        (line,) = axes.plot(*zip(*points, strict=True), color=colour, linewidth=2, gid=f"series{number}")
        if titles:
            line.set(marker="o", markersize=9, markeredgecolor=PAPER)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylim(bottom=0 if zero else None)
    axes.set_xlabel(x, color=INK, size=LETTERS, parse_math=False)
    axes.set_ylabel(y, color=INK, size=LETTERS, parse_math=False)
    axes.tick_params(length=0, labelcolor=SOFT, labelsize=LETTERS)
    axes.grid(axis="y", color=LINE)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    content = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(
            content, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None}
        )
    svg = ElementTree.fromstring(content.getvalue())  # noqa: S314  # our own
    for number, one in enumerate(series):
        for mark, words in zip(svg.findall(f".//*[@id='series{number}']//{{*}}use"), one.titles, strict=False):
            ElementTree.SubElement(mark, "title").text = words
    _obey_page(svg)
    svg.attrib = {"viewBox": svg.attrib["viewBox"], "role": "img"}
    svg.set("aria-label", f"{title}: {y} over {x}, {', '.join(one.name for one in series)}")
    text = ElementTree.tostring(svg, encoding="unicode")
    names = [(one.name, "ink" if one.colour is None else f"c{one.colour % len(COLOURS)}") for one in series]
    return Chart(title, Markup(text), names)  # noqa: S704  # serialised, so that every text is escaped


def _obey_page(svg: ElementTree.Element) -> None:
    """Take out of a drawing what the page's security policy forbids (styles), and namespaces."""
    for element in list(svg.iter()):
        for child in list(element):
            if child.tag.endswith(("}metadata", "}style")):
                element.remove(child)
        for name, value in re.findall(r"([\w-]+): ?([^;]+)", element.attrib.pop("style", "")):
            if not name.startswith("font"):  # letters are the style sheet's
                element.set(name, VARIABLES.get(value, value))
        if element.tag.endswith("}g"):
            element.attrib.pop("id", None)
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
