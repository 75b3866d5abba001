"""95 % intervals of what is measured on images."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 1000
LARGEST_DRAW = 2_000_000  # numbers that are drawn at a time
NORMAL_QUANTILE = 1.959964  # 97.5 % of a normal distribution lies below


class Estimate(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(share: float, count: int) -> Estimate:
    """A share of so many images, with Wilson's score interval (1927): it holds near 0 and 1 and for few images."""
    z = NORMAL_QUANTILE
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Estimate(share, min(share, middle - half), max(share, middle + half))


def resampled(values: Tensor, statistic: Callable[[Tensor], Tensor]) -> Estimate:
    """A statistic of the mean over images, with its bootstrap interval.

    Args:
        values: With the images in its first dimension. A difference of two models is paired if it holds both of them.
        statistic: From means, several of them in the first dimension, to a number for each.
    """
    count, shape = len(values), values.shape[1:]
    flat = values.double().reshape(count, -1)
    generator = torch.Generator().manual_seed(0)
    found = []
    for start in range(0, RESAMPLES, at_a_time := max(1, LARGEST_DRAW // count)):
        rows = min(at_a_time, RESAMPLES - start)
        drawn = torch.randint(count, (rows, count), generator=generator) + count * torch.arange(rows)[:, None]
        times = torch.bincount(drawn.flatten(), minlength=rows * count).view(rows, count).double()
        found.append(statistic((times @ flat / count).view(rows, *shape)))
    low, high = torch.cat(found).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(statistic(flat.mean(0).view(1, *shape))), low, high)
