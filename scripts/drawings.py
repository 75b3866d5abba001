"""Draw the figures of the documentation as SVG files.

    python -m scripts.drawings

They take their colours from the page they stand in (docs/style.css), and from the reader's system where they stand
alone.
"""

from pathlib import Path

from pmvit.files import write_text
from pmvit.numbers.colours import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILLION, to_hex

FOLDER = Path(__file__).parents[1] / "docs/drawings"
STYLE = """
.pm { --pm-ink: #24292f; --pm-soft: #57606a; --pm-line: #8c959f; --pm-box: #eef2f7;
--pm-paper: #fff; font: 15px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
.pm { --pm-ink: #e6e8ee; --pm-soft: #aab2c0; --pm-line: #7d8694; --pm-box: #2c313d; --pm-paper: #1e2129; } }
.pm .paper { fill: var(--pm-paper); }
.pm text { fill: var(--pm-ink); text-anchor: middle; }
.pm .soft { fill: var(--pm-soft); font-size: 13px; }
.pm .verb { font-weight: 600; }
.pm .code { font: 13px ui-monospace, monospace; fill: var(--pm-soft); }
.pm .start { text-anchor: start; }
.pm .box { fill: var(--pm-box); stroke: var(--pm-line); }
.pm .line { fill: none; stroke: var(--pm-line); stroke-width: 1.6; }
.pm .head { fill: var(--pm-line); }
.pm .pruned { fill: none; stroke: var(--pm-line); stroke-dasharray: 3 3; }
.pm .class { fill: var(--pm-ink); }
.pm .letter { fill: var(--pm-box); font-size: 13px; }
"""
COLOURS = tuple(map(to_hex, (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY_BLUE)))
KEPT, MERGED, PRUNED = "ABCDEF", "abcdef", "."
TOKENS = (".Aa.", "bBCc", "dDEe", ".dFf")  # a capital is a kept token, its small letters are merged into it
CELL = 28


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" class="pm" role="img" viewBox="0 0 {width} {height}">'
    paper = '<rect width="100%" height="100%" class="paper"/>'
    return "\n".join([opening, f"<title>{title}</title>", f"<style>{STYLE}</style>", paper, *parts, "</svg>", ""])


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{content}</text>'


def box(x: float, y: float, width: float, height: float, *lines: tuple[str, str]) -> str:
    """A box with lines of text, each with its kind, in its middle."""
    first = y + height / 2 + 5 - 10 * (len(lines) - 1)
    rows = [text(x + width / 2, first + 20 * row, content, kind) for row, (content, kind) in enumerate(lines)]
    outline = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="box"/>'
    return "\n".join([outline, *rows])


def arrow(x: float, y: float, to_x: float, to_y: float, path: str = "") -> str:
    """A line with a head that points right, or down or up where it is vertical; `path` bends it."""
    line = path or f"M{x:g} {y:g}L{to_x:g} {to_y:g}"
    if x == to_x or path:
        back = -8 if to_y > y or path else 8
        head = f"M{to_x:g} {to_y:g}l-4.5 {back}h9z"
    else:
        head = f"M{to_x:g} {to_y:g}l-8 -4.5v9z"
    return f'<path d="{line}" class="line"/>\n<path d="{head}" class="head"/>'


def token(x: float, y: float, letter: str, updated: bool = False) -> str:
    """One token: full colour if it is kept, pale if merged, an outline if pruned; a ring if a block updated it."""
    square = f'x="{x + 2:g}" y="{y + 2:g}" width="{CELL - 4}" height="{CELL - 4}" rx="4"'
    if letter == PRUNED:
        return f'<rect {square} class="pruned"/>'
    if letter == "1":
        return f'<rect {square} class="class"/>\n' + text(x + CELL / 2, y + CELL / 2 + 5, "c", "letter")
    colour = COLOURS[KEPT.index(letter.upper())]
    opacity = "" if letter in KEPT else ' fill-opacity="0.38"'
    ring = f' stroke="{colour}" stroke-width="4" stroke-opacity="0.5"' if updated else ""
    return f'<rect {square} fill="{colour}"{opacity}{ring}/>'


def grid(x: float, y: float, updated: bool = False) -> list[str]:
    """The class token above a grid of patch tokens."""
    cells = [token(x, y - CELL - 6, "1", updated)]
    for row, letters in enumerate(TOKENS):
        cells += [token(x + CELL * column, y + CELL * row, letter, updated) for column, letter in enumerate(letters)]
    return cells


def groups(x: float, y: float, updated: bool = False) -> list[str]:
    """The class token above the groups' tokens, two a row."""
    cells = [token(x, y - CELL - 6, "1", updated)]
    return cells + [
        token(x + CELL * (number % 2), y + CELL * (number // 2), letter, updated) for number, letter in enumerate(KEPT)
    ]


def token_flow() -> str:
    top, middle = 108, 160
    parts = [
        arrow(72, 62, 692, 62, "M72 62C72 26 90 26 130 26H634C674 26 692 26 692 54"),
        text(382, 18, "every token keeps its own content; a pruned one only passes by", "soft"),
        *grid(16, top),
        arrow(136, middle, 208, middle),
        text(172, middle - 12, "merge"),
        text(172, middle + 22, "M", "soft"),
        *groups(214, top),
        arrow(276, middle, 304, middle),
        box(306, top - 6, 120, 112, ("block", "verb"), ("on m tokens", "soft")),
        arrow(428, middle, 456, middle),
        *groups(462, top, updated=True),
        arrow(524, middle, 628, middle),
        text(576, middle - 12, "reconstruct"),
        text(576, middle + 22, "R", "soft"),
        *grid(636, top, updated=True),
        text(72, 246, "N tokens", "soft"),
        text(242, 246, "m tokens", "soft"),
        text(490, 246, "m tokens", "soft"),
        text(692, 246, "N tokens", "soft"),
    ]
    legend = (("1", "class token"), ("A", "kept"), ("a", "merged into it"), (PRUNED, "pruned"))
    for x, (letter, meaning) in zip((120, 272, 382, 552), legend, strict=True):
        parts += [token(x, 268, letter), text(x + 36, 287, meaning, "soft start")]
    return svg(764, 306, "Tokens on their way through a compressed block", parts)


def pipeline() -> str:
    verbs = ("measure", "costs.json"), ("plan", "plan.json"), ("compress", "out/"), ("finetune", "tuned/")
    parts = [box(16, 12, 536, 36, ("pretrained model", "")), box(16, 216, 700, 36, ("your images", ""))]
    for number, (verb, written) in enumerate((*verbs, ("export", "model.onnx"))):
        x = 16 + 145 * number
        parts.append(box(x, 98, 120, 66, (verb, "verb"), (written, "code")))
        parts += [arrow(x + 122, 131, x + 143, 131)] if number < len(verbs) else []
    for x, why in ((76, "gradients"), (366, "weights"), (511, "teacher")):
        parts += [arrow(x, 50, x, 96), text(x + 8, 78, why, "soft start")]
    for x, why in ((76, "some of them"), (511, "all"), (656, "a few")):
        parts += [arrow(x, 214, x, 166), text(x + 8, 196, why, "soft start")]
    return svg(732, 264, "From a pretrained model to a file for a runtime", parts)


def transition() -> str:
    parts = [
        text(16, 22, "as compressed", "verb start"),
        box(16, 40, 110, 60, ("block 4", "verb"), ("m tokens", "soft")),
        arrow(128, 70, 168, 70),
        box(170, 40, 110, 60, ("reconstruct", ""), ("R", "soft")),
        arrow(282, 70, 314, 70),
        box(316, 40, 100, 60, ("N tokens", "soft")),
        arrow(418, 70, 450, 70),
        box(452, 40, 110, 60, ("merge", ""), ("M of block 5", "soft")),
        arrow(564, 70, 604, 70),
        box(606, 40, 110, 60, ("block 5", "verb"), ("m tokens", "soft")),
        text(16, 152, "optimised", "verb start"),
        box(16, 170, 110, 60, ("block 4", "verb"), ("m tokens", "soft")),
        arrow(128, 200, 248, 200),
        box(
            250,
            170,
            232,
            104,
            ("one sparse product", ""),
            ("the N tokens in between", "soft"),
            ("are never formed", "soft"),
        ),
        arrow(484, 200, 604, 200),
        text(544, 191, "groups", "soft"),
        box(606, 170, 110, 60, ("block 5", "verb"), ("m tokens", "soft")),
        arrow(16, 256, 248, 256),
        text(132, 247, "remainder", "soft"),
        arrow(484, 256, 716, 256),
        text(600, 247, "remainder", "soft"),
        text(366, 302, "remainder: what tokens keep for themselves, until a block reads it or nothing will", "soft"),
    ]
    return svg(732, 316, "The transition between two blocks, before and after optimisation", parts)


def icon() -> str:
    squares = ((1, 1, 0.4), (9, 1, 1), (1, 9, 1), (9, 9, 0.4))
    cell = '<rect x="{}" y="{}" width="6" height="6" rx="1" fill="#0072b2" fill-opacity="{}"/>'
    parts = [cell.format(*square) for square in squares]
    return "\n".join(['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">', *parts, "</svg>", ""])


DRAWINGS = {"token_flow": token_flow, "pipeline": pipeline, "transition": transition, "icon": icon}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        write_text(FOLDER / f"{name}.svg", draw())
