"""A measured number with its 95 % interval."""

import math
from typing import NamedTuple

from pmvit.numbers.tables import format_number

NORMAL_QUANTILE = 1.959964  # 97.5 % of a normal distribution lies below


class Estimate(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, form: str, factor: float = 1.0) -> str:
        """The number and, in brackets, its interval, each in a form as `format_number` takes it."""
        value, low, high = (format_number(factor * each, form) for each in self)
        return f"{value} [{low}, {high}]"

    def __str__(self) -> str:
        """As a ratio: how many times as fast."""
        value, *ends = (format_number(each, ".2f") for each in self)
        return f"{value}x [{', '.join(ends)}]"


def wilson(share: float, count: int) -> Estimate:
    """A share of so many images, with Wilson's score interval (1927): it holds near 0 and 1 and for few images."""
    z = NORMAL_QUANTILE
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Estimate(share, min(share, middle - half), max(share, middle + half))
