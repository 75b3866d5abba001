"""Validation of any model, by all processes together: top-1 if it labels images, mean IoU if it labels pixels."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from pmvit._system import this_process
from pmvit.data.batches import unpack
from pmvit.evaluation import classification, segmentation
from pmvit.evaluation.classification import Evaluation, Measured
from pmvit.evaluation.reference import Reference, named
from pmvit.evaluation.segmentation import SegmentationEvaluation, labels_pixels
from pmvit.files import config_from

AnyEvaluation = Evaluation | SegmentationEvaluation


def validate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    reference: nn.Module | Reference | None = None,
    use_labels: bool = True,
    progress: bool = False,
) -> AnyEvaluation:
    """Measure a model on the batches of this process and of all others; every process gets the result.

    For a model that labels pixels, batches are whole images one at a time.
    """
    data = batches if use_labels else Unlabelled(batches)
    compared_with, name = named(reference)
    of_pixels = labels_pixels(model)
    if of_pixels:
        found = segmentation.count_pixels(model, data, reference, progress)
    else:
        (found,) = classification.measure_each_image([model], data, compared_with, progress)
    if this_process()[1] > 1:
        found = pooled(gather_object([found]))
    return segmentation.summarize(found, model, reference) if of_pixels else classification.summarize(found, name)


def pooled(parts: Sequence[Measured]) -> Measured:
    """What was measured of all images, from parts of them."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def evaluation_from(data: dict[str, Any], where: str = "the evaluation") -> AnyEvaluation:
    """The evaluation that `asdict` made JSON data of; what else stands there is left out."""
    kind: type[AnyEvaluation] = SegmentationEvaluation if "miou" in data else Evaluation
    known = {field.name: data[field.name] for field in fields(kind) if field.name in data}
    return config_from(kind, known, where)


class Unlabelled:
    """The images of batches, without their labels."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    @property
    def broken(self) -> Any:
        return getattr(self.batches, "broken", ())

    def __iter__(self) -> Iterator[Any]:
        return (unpack(batch)[0] for batch in self.batches)
