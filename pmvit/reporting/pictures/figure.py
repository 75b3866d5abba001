"""A figure laid out in pixels: pictures, words and rectangles at their places, written as PNG or SVG."""

import io
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path
from PIL import Image

from pmvit.files import write_atomically, write_text
from pmvit.numbers.colours import Colour, to_hex
from pmvit.reporting.images import Bytes, data_uri

Format = Literal["png", "svg"]
Box = tuple[float, float, float, float]  # left, top, width and height, in pixels from the top left of a figure

BACKGROUND: Colour = (250, 250, 250)
INK, FAINT_INK, FRAME = (25, 25, 25), (95, 95, 95), (170, 170, 170)
DPI = 100
INSET = 1e-3  # pixels by which a picture is smaller than its box, so that rounding never gives it one more


class Layer(NamedTuple):
    """A picture of any size, bytes of shape (rows, columns, 3 or 4), drawn into a box over what is there."""

    pixels: Bytes  # three channels are a photograph; four are flat colours, transparent where there is nothing to draw
    smooth: bool = False  # whether pixels are blended when it is enlarged, or stay squares


class PixelFigure:
    """A matplotlib figure with one pair of axes over all of it, whose units are pixels.

    The title is what an SVG says of itself to those who cannot see it, the scale how many pixels of the file there are
    for each pixel of the layout. The height is set when all is drawn.
    """

    def __init__(self, width: float, title: str = "", scale: float = 1.0) -> None:
        self.width, self.title, self.scale = width, title, scale
        self.height = 1.0
        self._figure = Figure(dpi=DPI, facecolor=to_hex(BACKGROUND))
        self._canvas: Any = FigureCanvasAgg(self._figure)
        self._axes = self._figure.add_axes((0, 0, 1, 1), autoscale_on=False)
        self._axes.set_axis_off()
        self._layers: dict[int, tuple[str, Layer]] = {}

    def picture(self, box: Box, *layers: Layer) -> None:
        """Draw pictures one over the other."""
        left, top, width, height = (round(self.scale * each) for each in box)
        extent = (left + INSET, left + width - INSET, top + height - INSET, top + INSET)
        for layer in layers:
            name, _ = self._layers.setdefault(id(layer.pixels), (f"picture{len(self._layers)}", layer))
            way = ("bicubic" if width > layer.pixels.shape[1] else "lanczos") if layer.smooth else "nearest"
            self._axes.imshow(
                layer.pixels, extent=extent, interpolation=way, aspect="auto", gid=name, clip_on=False, zorder=2
            )

    def text(self, left: float, top: float, words: str, size: float, colour: Colour = INK) -> None:
        """Write words in letters of a size, below a top."""
        style: dict[str, Any] = {"size": 72 / DPI * self.scale * size, "color": to_hex(colour)}
        self._axes.text(self.scale * left, self.scale * top, words, va="top", parse_math=False, **style)

    def rectangle(self, box: Box, fill: Colour, outline: Colour | None = None) -> None:
        """Fill a rectangle; its outline is inside it."""
        left, top, width, height = (round(self.scale * each) for each in box)
        if outline is not None:
            self.rectangle(box, outline)
            line = max(1, round(self.scale))
            left, top, width, height = left + line, top + line, width - 2 * line, height - 2 * line
        style: dict[str, Any] = {"facecolor": to_hex(fill), "linewidth": 0, "clip_on": False, "zorder": 2}
        self._axes.add_patch(Rectangle((left, top), width, height, **style))

    def _fit(self) -> None:
        width, height = (round(self.scale * side) for side in (self.width, self.height))
        self._figure.set_size_inches(width / DPI, height / DPI)
        self._axes.set(xlim=(0, width), ylim=(height, 0))

    def image(self) -> Image.Image:
        """All of it as pixels."""
        self._fit()
        with rc_context({"text.hinting": "none"}):  # letters as wide as they were measured
            self._canvas.draw()
        return Image.fromarray(np.asarray(self._canvas.buffer_rgba())[..., :3].copy())

    def svg(self) -> str:
        """All of it as an SVG: words as words, pictures inside, each of them once."""
        self._fit()
        content, ways = io.StringIO(), [artist.get_interpolation() for artist in self._axes.images]
        for artist in self._axes.images:
            artist.set_interpolation("none")  # the picture itself, and not as many pixels as the figure has
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pmvit", "image.composite_image": False}):
            self._figure.savefig(content, format="svg", metadata={"Date": None, "Title": self.title})
        for artist, way in zip(self._axes.images, ways, strict=True):
            artist.set_interpolation(way)
        stored = "".join(_image_element(name, layer) for name, layer in self._layers.values())
        drawn = re.sub(r"<image [^>]*/>", _use_of_image, content.getvalue())
        return drawn.replace("<defs>", f"<defs>\n{stored}", 1)

    def save(self, path: Path, kind: Format) -> Path:
        """Write it, all or nothing."""
        if kind == "svg":
            write_text(path, self.svg())
            return path
        return write_png(self.image(), path)


def _use_of_image(element: re.Match[str]) -> str:
    name, transform = (re.findall(rf'{key}="([^"]*)"', element[0])[0] for key in (" id", "transform"))
    return f'<use xlink:href="#{name}" transform="{transform}"/>'


def _image_element(name: str, layer: Layer) -> str:
    """A picture to be used in several places: flat colours without loss."""
    height, width, channels = layer.pixels.shape
    squares = "" if layer.smooth else ' style="image-rendering:pixelated"'
    size = f'width="{width}" height="{height}" preserveAspectRatio="none"'
    uri = data_uri(Image.fromarray(layer.pixels), lossless=channels == 4)
    return f'<image id="{name}" {size}{squares} xlink:href="{uri}"/>\n'


def write_png(picture: Image.Image, path: Path) -> Path:
    """Write pixels, all or nothing."""
    write_atomically(path, lambda temporary: picture.save(temporary, format="PNG", optimize=True))
    return path


def numbered_stem(number: int, count: int, name: str) -> str:
    """The name of a picture's file, without its ending, from the number of an image of so many and the image's name."""
    words = re.sub(r"[^\w.-]+", "-", Path(name).stem)
    return f"{number + 1:0{len(str(count))}}-{words}"


@lru_cache(maxsize=4096)
def text_width(words: str, size: float) -> float:
    """Pixels that words in letters of a size take."""
    width, _, _ = text_to_path.get_text_width_height_descent(words, FontProperties(size=size), ismath=False)
    return float(width)


def shortened(words: str, size: float, width: float) -> str:
    """Words that fit into a width: their middle is left out if it has to be."""
    made, kept = words, len(words)
    while kept > 2 and text_width(made, size) > width:
        kept -= 1
        made = f"{words[: kept - kept // 2]}...{words[-(kept // 2) :]}"
    return made


def in_lines(words: str, size: float, width: float) -> list[str]:
    """Words in as many lines of a width as they need."""
    lines: list[str] = []
    for word in words.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
