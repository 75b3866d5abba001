"""Numbers as people read them."""

from collections.abc import Sequence

from pmvit.evaluation.measures import MEASURES
from pmvit.evaluation.tables import format_number

TITLES = {name: measure.full_title for name, measure in MEASURES.items()}
DIGITS = {"cosine": 4}  # of numbers that are no shares; 3 for the others
IN_PERCENT = [name for name, measure in MEASURES.items() if measure.is_share]
VARIANTS = {
    "original": "original",
    "compressed": "compressed",
    "optimized": "compressed, optimised for inference",
    "bound": "equal-token bound",
}


def number(name: str, value: float) -> str:
    """A measured number, with its unit."""
    factor, digits = _unit(name)
    return format_number(factor * value, f".{digits}f") + (" %" if name in IN_PERCENT else "")


def interval(name: str, estimate: Sequence[float] | None) -> str:
    """The ends of an interval, in the unit of its number; nothing if it has none."""
    if estimate is None or estimate[1] is None or estimate[1] == estimate[2] == estimate[0]:
        return ""
    factor, digits = _unit(name)
    return " – ".join(format_number(factor * end, f".{digits}f") for end in estimate[1:])


def change(name: str, value: float) -> str:
    """A difference with its sign; of shares in points."""
    factor, digits = _unit(name)
    return signed(factor * value, digits) + (" points" if name in IN_PERCENT else "")


def change_interval(name: str, estimate: Sequence[float] | None) -> str:
    """The ends of the interval of a difference."""
    if estimate is None or estimate[1] is None:
        return ""
    factor, digits = _unit(name)
    return " to ".join(signed(factor * end, digits) for end in estimate[1:])


def _unit(name: str) -> tuple[int, int]:
    """What a measured number is multiplied with, and its digits."""
    return (100, 1) if name in IN_PERCENT else (1, DIGITS.get(name, 3))


def signed(value: float, digits: int) -> str:
    """A number with its sign, minus as typesetters have it."""
    text = format_number(value, f"+.{digits}f")
    return text.replace("-", "−") if float(text) else text[1:]


def times(ratio: Sequence[float]) -> str:
    return f"{format_number(ratio[0], '.2f')}×"


def times_interval(ratio: Sequence[float]) -> str:
    return " – ".join(format_number(end, ".2f") for end in ratio[1:])
