"""What a verb says: text and tables for people, or one JSON document; an error in one line.

rich is loaded when something is printed with it, so that `pmvit --help` does not wait for it.
"""

import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

CLOSED_PIPE = 141  # 128 + SIGPIPE, what a shell says of other commands that write to `| head`


class Screen:
    """Prints for people: on standard output, or on standard error where that is kept for a JSON document."""

    quiet = False

    @cached_property
    def rich(self) -> "Console":
        """What prints; it follows where standard output goes."""
        from rich.console import Console

        class Terminal(Console):
            def on_broken_pipe(self) -> None:
                end_of_pipe()

        return Terminal(markup=False, highlight=False)

    @property
    def width(self) -> int:
        return self.rich.width

    def print(self, thing: "RenderableType", style: str | None = None, *, soft_wrap: bool = False) -> None:
        if not self.quiet:
            self.rich.print(thing, style=style, soft_wrap=soft_wrap)

    def table(
        self,
        titles: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        left: Collection[str] | None = None,
        least_width: int = 0,
    ) -> None:
        """Print a table.

        Args:
            titles: Of the columns.
            rows: The cells.
            left: The columns of words; the first one if not given. The others are numbers.
            least_width: Columns of a terminal that cuts it rather than breaks it into pieces.
        """
        from rich.table import Table

        words = titles[:1] if left is None else left
        table = Table(show_edge=False, pad_edge=False)
        for title in titles:
            table.add_column(title, justify="left" if title in words else "right")
        for cells in rows:
            table.add_row(*cells)
        if not self.quiet:
            self.rich.print(table, width=max(self.width, least_width), crop=not least_width)


console = Screen()
_answers: list[TextIO] = []  # where the JSON document goes, while standard output is standard error


def keep_output_for_json(context: typer.Context, wanted: bool) -> bool:
    """With --json, whatever else a verb or a library prints goes to standard error."""
    if wanted and not context.resilient_parsing:
        _answers.append(sys.stdout)
        context.call_on_close(_answers.pop)
        context.with_resource(redirect_stdout(sys.stderr))
    return wanted


def print_json(data: Any) -> None:
    """Print the one JSON document that a verb with --json gives; a number that is not finite is null."""
    output = _answers[-1] if _answers else sys.stdout
    try:
        output.write(json.dumps(_plain(data), indent=1, allow_nan=False) + "\n")
        output.flush()
    except BrokenPipeError:
        end_of_pipe()


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(name): _plain(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if isinstance(data, Path):
        return str(data)
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
