"""What several experiments share: answers image by image, kept small, and intervals of paired differences."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from experiments.common import Row, bits, interval
from pmvit.evaluation.classification import measure


@torch.inference_mode()
def logits(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """What a model says of all images."""
    return torch.cat([model(images) for images, _ in batches])


def answers(found: Tensor, labels: Tensor, reference: Tensor) -> Row:
    """What a row keeps of every image: whether original and model are right and agree, and the divergence."""
    result = measure(found, labels, reference)
    return {
        "original": bits(result["reference_top1"]),
        "correct": bits(result["top1"]),
        "agrees": bits(result["agreement"]),
        "kl": [float(f"{value:.3g}") for value in result["kl"].tolist()],
    }


def numbers(row: Row, name: str) -> Tensor:
    """What a row has for each image."""
    return torch.tensor([float(value) for value in row[name]], dtype=torch.float64)


def lost(row: Row) -> Tensor:
    """Points lost to the original, image by image."""
    return 100 * (numbers(row, "original") - numbers(row, "correct"))


def with_interval(values: Tensor, form: str) -> str:
    """The mean and, in brackets, its 95 % interval by resampling the images."""
    return interval(values).text(form)
