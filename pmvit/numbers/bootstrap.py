"""95 % intervals by resampling what was measured: images, or rounds of a benchmark."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pmvit.numbers.estimates import Estimate

RESAMPLES = 2000
LARGEST_DRAW = 4_000_000  # numbers that are drawn at a time

Statistic = Callable[[Tensor, Tensor], Tensor]


def mean(times: Tensor, values: Tensor) -> Tensor:
    """The mean of the drawn values in each resampling, (resamplings, ...), for values of shape (images, ...)."""
    count = len(values)
    return (times @ values.reshape(count, -1) / count).view(len(times), *values.shape[1:])


def median(times: Tensor, values: Tensor) -> Tensor:
    """The median of the drawn values in each resampling, (resamplings,), for one value an image or round."""
    count = len(values)
    ordered = values.sort()
    middles = torch.tensor([(count + 1) // 2, count // 2 + 1], dtype=times.dtype).expand(len(times), 2)
    places = torch.searchsorted(times[:, ordered.indices].cumsum(1), middles.contiguous())
    return ordered.values[places].mean(1)


def bootstrap(values: Tensor, statistic: Statistic = mean) -> Estimate:
    """A statistic of measured values, with its 95 % bootstrap interval (2,000 resamplings, the same at every call).

    Args:
        values: With the images, or rounds, in its first dimension. The interval of a difference of two models is paired
            if it is that of the differences image by image, or if each entry holds both models.
        statistic: From how often each image was drawn, (resamplings, images), and the values, to a number for each
            resampling: `mean`, `median` or a function of them.
    """
    values = values.double()
    found = torch.cat([statistic(times, values) for times in _draws(len(values))])
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = found.quantile(ends, interpolation="nearest").tolist()
    once = torch.ones(1, len(values), dtype=torch.float64)
    return Estimate(float(statistic(once, values)), low, high)


def _draws(count: int) -> Iterator[Tensor]:
    """How often each of so many is drawn, (resamplings, count), in parts that fit into memory."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, RESAMPLES, at_a_time := max(1, LARGEST_DRAW // count)):
        rows = min(at_a_time, RESAMPLES - start)
        drawn = torch.randint(count, (rows, count), generator=generator) + count * torch.arange(rows)[:, None]
        yield torch.bincount(drawn.flatten(), minlength=rows * count).view(rows, count).double()
