"""Any model on the images of all processes: by top-1 if it labels images, by mean IoU if it labels pixels."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from accelerate.utils import gather_object
from torch import nn

from pmvit._system import this_process
from pmvit.data.batches import unpack
from pmvit.evaluation import classification, segmentation
from pmvit.evaluation.classification import Evaluation
from pmvit.evaluation.reference import Reference
from pmvit.evaluation.segmentation import SegmentationEvaluation, labels_pixels

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

    Args:
        model: The model to measure.
        batches: Those of this process; for a model that labels pixels, whole images one at a time.
        reference: The original, for agreement and divergence.
        use_labels: Whether to read labels, if there are any.
        progress: Show a progress bar.
    """
    data = batches if use_labels else Unlabelled(batches)
    several = this_process()[1] > 1
    if labels_pixels(model):
        counts = segmentation.count_pixels(model, data, reference=reference, progress=progress)
        return segmentation.pooled(gather_object([counts]) if several else [counts])
    result = classification.evaluate(model, data, reference=reference, progress=progress)
    return classification.pooled(gather_object([result])) if several else result


def evaluation_from(data: dict[str, Any]) -> AnyEvaluation:
    """The evaluation that `asdict` made JSON data of; what else stands there is left out."""
    kind: type[AnyEvaluation] = SegmentationEvaluation if "miou" in data else Evaluation
    values: dict[str, Any] = {field.name: data[field.name] for field in fields(kind) if field.name in data}
    if isinstance(values.get("class_iou"), list):
        values["class_iou"] = tuple(values["class_iou"])
    return kind(**values)


class Unlabelled:
    """The images of batches, without their labels."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    @property
    def broken(self) -> Any:
        return getattr(self.batches, "broken", ())

    def __iter__(self) -> Iterator[Any]:
        return (unpack(batch)[0] for batch in self.batches)
