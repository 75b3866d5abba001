"""How results are written: numbers rounded half away from zero, tables in Markdown, files side by side."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from decimal import ROUND_HALF_UP, Decimal, localcontext
from pathlib import Path
from typing import Any, ClassVar

from pmvit.files import write_atomically, write_text

NOT_MEASURED = "-"


def format_number(value: float | None, form: str) -> str:
    """A number for a table, rounded half away from zero: 67.25 is 67.3 in the form `.1f`, and -0.05 is -0.1.

    Python's own formatting rounds 67.25 to the even 67.2, and 2.675 down, because it is a little less in binary.

    Args:
        value: The number; `-` stands for what was not measured.
        form: As Python's `format` takes it: `.1f`, `+.3f`, `,.0f`, `.2%`.
    """
    if value is None:
        return NOT_MEASURED
    with localcontext() as context:
        context.rounding = ROUND_HALF_UP  # what decimal calls up is away from zero
        return format(Decimal(f"{value:.12g}"), form)  # 12 digits: without the noise of binary fractions


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(titles)}", *lines[1:]])


@dataclass(frozen=True)
class Results(ABC):
    """Rows that were measured, and where: as a table, as JSON and as a picture."""

    rows: list[Any]
    environment: dict[str, Any] = field(default_factory=dict)
    name: ClassVar[str]  # of the files
    note: ClassVar[str] = ""

    @abstractmethod
    def columns(self) -> list[str]:
        """The heads of the table."""

    @abstractmethod
    def cells(self) -> list[list[str]]:
        """The rows as text, under `columns`."""

    @abstractmethod
    def draw(self, path: Path) -> None:
        """Draw a chart as a PNG."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def to_markdown(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        head = " ".join(text for text in (f"{said}." if said else "", self.note) if text)
        return (f"{head}\n\n" if head else "") + markdown_table(self.columns(), self.cells()) + "\n"

    def write(self, folder: str | Path) -> None:
        """Write a file in JSON, one in Markdown and the chart."""
        folder = Path(folder)
        write_text(folder / f"{self.name}.json", self.to_json())
        write_text(folder / f"{self.name}.md", self.to_markdown())
        write_atomically(folder / f"{self.name}.png", self.draw)
