"""What a verb says: text and tables for people, or one JSON document; an error in one line.

rich is loaded when something is printed with it, so that `pmvit --help` does not wait for it.
"""

import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

CLOSED_PIPE = 141  # 128 + SIGPIPE, what a shell says of other commands that write to `| head`
LONGEST_WORD = 24  # letters of what stays in one piece
FEW_COLUMNS = 6  # that have lines between them


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
        if not (self.is_quiet or self.is_json):
            self.rich.print(thing, soft_wrap=soft_wrap)

    def warn(self, text: str) -> None:
        if not self.is_quiet:
            self.rich.print(text, style="yellow")

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> None:
        """Print a table, rather wider than the screen than with a title or a number cut.

        The first column and those in `left` are words, the others numbers.
        """
        from rich.box import HEAVY_HEAD, SIMPLE_HEAD
        from rich.table import Table

        cells, is_wide = list(rows), len(titles) > FEW_COLUMNS
        box = SIMPLE_HEAD if is_wide else HEAVY_HEAD
        table = Table(box=box, collapse_padding=is_wide, show_edge=False, pad_edge=False)
        for title, *column in zip(titles, *cells, strict=True):
            words = [word for cell in column for word in cell.split() if len(word) <= LONGEST_WORD]
            widest = max(map(len, (*title.split(), *words)), default=0)
            table.add_column(title, justify="left" if title in (titles[0], *left) else "right", min_width=widest)
        for row in cells:
            table.add_row(*row)
        if not (self.is_quiet or self.is_json):
            self.rich.print(table, crop=False)

    @contextmanager
    def for_json(self) -> Iterator[None]:
        """Whatever a verb or a library prints in here goes to standard error."""
        self.is_json = True
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            self.is_json = False


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
