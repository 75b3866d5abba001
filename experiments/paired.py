"""What several experiments share: answers image by image, kept small, and intervals of paired differences."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.evaluation.classification import measure

Row = dict[str, Any]
RESAMPLES = 2000


@torch.inference_mode()
def logits(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """What a model says of all images."""
    return torch.cat([model(images) for images, _ in batches])


def answers(found: Tensor, labels: Tensor, reference: Tensor) -> Row:
    """What a row keeps of every image: whether original and model are right and agree, and the divergence."""
    result = measure(found, labels, reference)
    return {
        "original": _bits(result["reference_top1"]),
        "correct": _bits(result["top1"]),
        "agrees": _bits(result["agreement"]),
        "kl": [float(f"{value:.3g}") for value in result["kl"].tolist()],
    }


def _bits(values: Tensor) -> str:
    return "".join("1" if value else "0" for value in values.tolist())


def numbers(row: Row, name: str) -> Tensor:
    """What a row has for each image."""
    return torch.tensor([float(value) for value in row[name]], dtype=torch.float64)


def lost(row: Row) -> Tensor:
    """Points lost to the original, image by image."""
    return 100 * (numbers(row, "original") - numbers(row, "correct"))


def with_interval(values: Tensor, form: str) -> str:
    """The mean and, in brackets, its 95 % interval by resampling the images."""
    low, high = interval(values)
    return f"{values.mean():{form}} [{low:{form}}, {high:{form}}]"


def interval(values: Tensor) -> tuple[float, float]:
    """The 95 % interval of the mean, by resampling the images."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    low, high = values[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
