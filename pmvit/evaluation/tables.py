"""How tables are written: numbers rounded half away from zero, and Markdown."""

from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal, localcontext

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
