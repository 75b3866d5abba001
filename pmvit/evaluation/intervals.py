"""95 % intervals of what is measured on images."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 1000
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


def resampled(values: Tensor, statistic: Callable[[Tensor], float]) -> Estimate:
    """A statistic of the mean over images, with its bootstrap interval; `values` has the images in its first dimension.

    Differences between two models on the same images are paired if `values` holds both.
    """
    flat = values.double().flatten(1) if values.dim() > 1 else values.double()[:, None]
    count = len(flat)
    generator = torch.Generator().manual_seed(0)
    shape = values.shape[1:]
    found = []
    for _ in range(RESAMPLES):
        times = torch.bincount(torch.randint(count, (count,), generator=generator), minlength=count)
        found.append(statistic((times.double() @ flat / count).view(shape)))
    ends = torch.tensor(sorted(found), dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Estimate(statistic(flat.mean(0).view(shape)), *ends.tolist())
