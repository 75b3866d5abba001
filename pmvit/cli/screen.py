"""What a verb says: text and tables for people, or one JSON document; an error in one line.

rich is loaded when something is printed with it, so that `pmvit --help` does not wait for it.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from pmvit.errors import PmvitWarning

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

CLOSED_PIPE = 141  # 128 + SIGPIPE, what a shell says of other commands that write to `| head`
LONGEST_WORD = 24  # letters of what stays in one piece
FEW_COLUMNS = 6  # that have lines between them
GAP = 3  # letters from one column to the next, at most


class Screen:
    """Prints for people, unless another process does that or a JSON document is all that is wanted.

    Attributes:
        is_quiet: Nothing is printed.
        is_json: Only warnings are, and not on standard output.
    """

    is_quiet = is_json = False

    @cached_property
    def rich(self) -> "Console":
        """What prints; it follows where standard output goes."""
        from rich.console import Console

        class Terminal(Console):
            def on_broken_pipe(self) -> None:
                end_of_pipe()

        return Terminal(markup=False, highlight=False)

    def print(self, thing: "RenderableType", *, soft_wrap: bool = False) -> None:
        """Print something; in a file, where there is no edge to break it at, a sentence stays one line."""
        if not (self.is_quiet or self.is_json):
            self.rich.print(thing, soft_wrap=soft_wrap or self._is_line(thing))

    def warn(self, text: str) -> None:
        if not self.is_quiet:
            self.rich.print(text, style="yellow", soft_wrap=self._is_line(text))

    def _is_line(self, thing: "RenderableType") -> bool:
        return isinstance(thing, str) and not self.rich.is_terminal

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> None:
        """Print a table with no title or number cut: one line a row in a file, in parts on a screen that is narrow.

        The first column and those in `left` are words, the others numbers; all up to the last with words, which say
        what a row is of, stand in every part.
        """
        if self.is_quiet or self.is_json:
            return
        columns, words = list(zip(titles, *rows, strict=True)), (titles[0], *left)
        named = max(number for number, title in enumerate(titles) if title in words) + 1
        parts: list[list[tuple[str, ...]]] = [columns[:named]]
        for column in columns[named:]:
            needed = sum(GAP + min(LONGEST_WORD, max(map(len, each))) for each in (*parts[-1], column))
            if self.rich.is_terminal and needed > self.rich.width and len(parts[-1]) > named:
                parts.append(columns[:named])
            parts[-1].append(column)
        longest = LONGEST_WORD if self.rich.is_terminal else max(len(cell) for column in columns for cell in column)
        for part in parts:
            self.rich.print(_table(part, words, longest, is_wide=len(titles) > FEW_COLUMNS), crop=False)

    @contextmanager
    def shows_warnings(self) -> Iterator[None]:
        """pmvit's own warnings in here are lines on the screen."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", PmvitWarning)
            others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
                if issubclass(category, PmvitWarning):
                    self.warn(str(message))
                else:
                    others(message, category, *where, **more)

            warnings.showwarning = show
            yield

    @contextmanager
    def for_json(self) -> Iterator[None]:
        """Whatever a verb or a library prints in here goes to standard error."""
        self.is_json = True
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            self.is_json = False


def _table(columns: Sequence[Sequence[str]], words: Collection[str], longest: int, is_wide: bool) -> "RenderableType":
    """A table of columns, each with its title first; texts up to a length stay in one piece, longer ones are broken."""
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.table import Table

    box = SIMPLE_HEAD if is_wide else HEAVY_HEAD
    table = Table(box=box, collapse_padding=is_wide, show_edge=False, pad_edge=False)
    for title, *cells in columns:
        pieces = [piece for cell in cells for piece in ([cell] if len(cell) <= longest else cell.split())]
        widest = max((len(piece) for piece in (*title.split(), *pieces) if len(piece) <= longest), default=0)
        table.add_column(title, justify="left" if title in words else "right", min_width=widest)
    for row in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*row)
    return table


console = Screen()


def print_json(data: Any) -> None:
    """Print the one JSON document that a verb with --json gives; a number that is not finite is null."""
    try:
        sys.stdout.write(json.dumps(_finite(data), indent=1, allow_nan=False, default=str) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        end_of_pipe()


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def end_of_pipe() -> NoReturn:
    """Nobody reads any more: end in silence."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to flush goes there
    sys.exit(CLOSED_PIPE)


def fail(message: str, code: int = 1) -> NoReturn:
    """Say what is wrong, in one line on standard error, and end."""
    from rich.console import Console
    from rich.text import Text

    line = message.strip().partition("\n")[0]
    Console(stderr=True).print(Text.assemble(("pmvit: ", "bold red"), line), soft_wrap=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stderr.flush()
        os._exit(code)  # taking leave of processes that may wait for this one could take forever
    sys.exit(code)
