"""Measured numbers as cells of a table: the number with its unit and, in smaller print, its interval."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pmvit.numbers.measures import MEASURES
from pmvit.numbers.tables import format_number

DIGITS = {"cosine": 4}  # of numbers that are no shares; 3 for the others
Numbers = Sequence[Any] | None  # an `Estimate` as JSON: the value and the ends of its interval, which may be `None`


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    aside: str = ""


NOTHING = Cell("–")


def value_cell(name: str, estimate: Numbers) -> Cell:
    """What was measured, and its interval if it has one."""
    if estimate is None:
        return NOTHING
    value, *ends = (_scaled(name, number) for number in estimate)
    return Cell(value + (" %" if MEASURES[name].is_share else ""), "" if _is_point(estimate) else " – ".join(ends))


def change_cell(name: str, estimate: Numbers) -> Cell:
    """A difference with its sign; of shares in points."""
    if estimate is None:
        return NOTHING
    value, *ends = (_scaled(name, number, "+") for number in estimate)
    return Cell(
        value + (" points" if MEASURES[name].is_share else ""), "" if estimate[1] is None else " to ".join(ends)
    )


def ratio_cell(ratio: Numbers) -> Cell:
    """How many times as fast."""
    if ratio is None:
        return NOTHING
    value, *ends = (format_number(number, ".2f") for number in ratio)
    return Cell(f"{value}×", " – ".join(ends))


def _is_point(estimate: Sequence[Any]) -> bool:
    return estimate[1] is None or estimate[0] == estimate[1] == estimate[2]


def _scaled(name: str, number: float | None, sign: str = "") -> str:
    """A number in the unit of its measure, with the minus of typesetters."""
    if number is None:
        return ""
    digits = 1 if MEASURES[name].is_share else DIGITS.get(name, 3)
    text = format_number(MEASURES[name].factor * number, f"{sign}.{digits}f")
    return text.replace("-", "−") if float(text) else text.lstrip("+-")
