"""A sheet to draw on that becomes a PNG or an SVG: pictures, text and rectangles at their places."""

import base64
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape

from PIL import Image, ImageDraw, ImageFont

from pmvit.files import write_atomically, write_text
from pmvit.reporting.colours import Colour

Format = Literal["png", "svg"]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

BACKGROUND: Colour = (250, 250, 250)
INK, FAINT_INK, FRAME = (25, 25, 25), (95, 95, 95), (170, 170, 170)
TILE = 168  # longer side of one of many pictures; whole pixels for the patches of grids of 7, 14, 28 and 56
FAMILY = "Aileron, Helvetica, Arial, 'Liberation Sans', sans-serif"
BASELINE = 0.95  # of the size of letters, from their top down to the line they stand on
QUALITY = 90  # of photographs inside an SVG


class Box(NamedTuple):
    """A place on a sheet, in pixels."""

    left: int
    top: int
    width: int
    height: int


class Layer(NamedTuple):
    """A picture of any size, drawn into a box over what is there; `smooth` if its pixels are not to be seen."""

    picture: Image.Image
    smooth: bool = False

    def at(self, width: int, height: int) -> Image.Image:
        """The picture at a size."""
        if self.picture.size == (width, height):
            return self.picture
        larger = width > self.picture.width
        smooth = Image.Resampling.BICUBIC if larger else Image.Resampling.LANCZOS
        return self.picture.resize((width, height), smooth if self.smooth else Image.Resampling.NEAREST)


class _Picture(NamedTuple):
    box: Box
    layer: Layer


class _Text(NamedTuple):
    left: int
    top: int
    words: str
    size: int
    colour: Colour


class _Rectangle(NamedTuple):
    box: Box
    fill: Colour
    outline: Colour | None


@dataclass
class Canvas:
    """Pictures, words and rectangles in the order they were drawn; every file has them all.

    Attributes:
        width: In pixels.
        height: In pixels.
        title: What an SVG says of itself to those who cannot see it.
    """

    width: int
    height: int
    title: str = ""
    _items: list[_Picture | _Text | _Rectangle] = field(default_factory=list)

    def picture(self, box: Box, *layers: Layer) -> None:
        """Draw pictures one over the other. Those with transparency are flat colours, the others photographs."""
        self._items += [_Picture(box, layer) for layer in layers]

    def text(self, left: int, top: int, words: str, size: int, colour: Colour = INK) -> None:
        """Write words in letters of a size, below a top."""
        self._items.append(_Text(left, top, words, size, colour))

    def rectangle(self, box: Box, fill: Colour, outline: Colour | None = None) -> None:
        """Fill a rectangle; its outline is inside it."""
        self._items.append(_Rectangle(box, fill, outline))

    def image(self) -> Image.Image:
        """All of it as pixels."""
        made = Image.new("RGB", (self.width, self.height), BACKGROUND)
        pen = ImageDraw.Draw(made)
        for item in self._items:
            if isinstance(item, _Text):
                pen.text((item.left, item.top), item.words, fill=item.colour, font=font(item.size))
                continue
            left, top, width, height = item.box
            if isinstance(item, _Rectangle):
                corners = (left, top, left + width - 1, top + height - 1)
                pen.rectangle(corners, fill=item.fill, outline=item.outline)
            else:
                drawn = item.layer.at(width, height)
                made.paste(drawn, (left, top), drawn if drawn.mode == "RGBA" else None)
        return made

    def svg(self) -> str:
        """All of it as an SVG: words as words, pictures inside, each of them once."""
        names: dict[tuple[int, bool], str] = {}
        stored, drawn = [], []
        for item in self._items:
            if isinstance(item, _Text):
                drawn.append(
                    f'<text x="{item.left}" y="{item.top + BASELINE * item.size:.1f}" font-size="{item.size}" '
                    f'fill="{_hex(item.colour)}">{escape(item.words)}</text>'
                )
                continue
            left, top, width, height = item.box
            if isinstance(item, _Rectangle):
                outline = "" if item.outline is None else f' stroke="{_hex(item.outline)}"'
                inset = 0.0 if item.outline is None else 0.5
                drawn.append(
                    f'<rect x="{left + inset:g}" y="{top + inset:g}" width="{width - 2 * inset:g}" '
                    f'height="{height - 2 * inset:g}" fill="{_hex(item.fill)}"{outline}/>'
                )
                continue
            key = (id(item.layer.picture), item.layer.smooth)
            if key not in names:
                names[key] = f"p{len(names)}"
                pixelated = "" if item.layer.smooth else ' style="image-rendering:pixelated"'
                stored.append(
                    f'<image id="{names[key]}" width="1" height="1" preserveAspectRatio="none"{pixelated} '
                    f'href="{_data_url(item.layer.picture)}"/>'
                )
            place = f"translate({left} {top}) scale({width} {height})"
            drawn.append(f'<use href="#{names[key]}" transform="{place}"/>')
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{FAMILY}" role="img">'
        )
        ground = f'<rect width="{self.width}" height="{self.height}" fill="{_hex(BACKGROUND)}"/>'
        lines = [head, f"<title>{escape(self.title)}</title>", "<defs>", *stored, "</defs>", ground, *drawn, "</svg>"]
        return "\n".join(lines) + "\n"

    def save(self, path: Path, kind: Format) -> Path:
        """Write it, all or nothing."""
        if kind == "svg":
            write_text(path, self.svg())
        else:
            write_png(self.image(), path)
        return path


def write_png(picture: Image.Image, path: Path) -> Path:
    """Write pixels, all or nothing."""
    write_atomically(path, lambda temporary: picture.save(temporary, format="PNG", optimize=True))
    return path


def numbered_stem(number: int, count: int, name: str) -> str:
    """The name of a picture's file, without its ending, from the number of an image of so many and the image's name."""
    words = re.sub(r"[^\w.-]+", "-", Path(name).stem)
    return f"{number + 1:0{len(str(count))}}-{words}"


def font(size: int) -> Font:
    """The letters of a PNG; those of an SVG are much as wide."""
    return ImageFont.load_default(size)


def shortened(words: str, size: int, width: int) -> str:
    """Words that fit into a width: their middle is left out if it has to be."""
    letters = font(size)
    if letters.getlength(words) <= width:
        return words
    kept = len(words)
    while kept > 2 and letters.getlength(f"{words[: kept - kept // 2]}...{words[-(kept // 2) :]}") > width:
        kept -= 1
    return f"{words[: kept - kept // 2]}...{words[-(kept // 2) :]}"


def in_lines(words: str, size: int, width: int) -> list[str]:
    """Words in as many lines of a width as they need."""
    lines: list[str] = []
    for word in words.split():
        if lines and font(size).getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _hex(colour: Colour) -> str:
    red, green, blue = colour
    return f"#{red:02x}{green:02x}{blue:02x}"


def _data_url(picture: Image.Image) -> str:
    """Photographs as JPEG, flat colours as PNG."""
    content = io.BytesIO()
    if picture.mode == "RGBA":
        picture.save(content, "PNG", optimize=True)
    else:
        picture.save(content, "JPEG", quality=QUALITY, subsampling=0)
    kind = "png" if picture.mode == "RGBA" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
