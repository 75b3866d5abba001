"""Top-1, top-5 and cross-entropy; agreement and divergence from a reference model on the same images; cosine to its
embeddings where there are no classes."""

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.data.batches import check_labels, count_items, unpack, unreadable
from pmvit.data.opening import ImageData, evaluation_loader
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import Reference, named
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.numbers.measures import WithQuality
from pmvit.progress import track

Measured = dict[str, Tensor]  # what was measured of each image, (images, ...), by name


@dataclass(frozen=True)
class Evaluation(WithQuality):
    """Means over the images, shares as numbers from 0 to 1. What could not be measured is `None`.

    Attributes:
        images: How many images were measured.
        broken: How many could not be read and were left out.
        top1: Share whose label is the first prediction.
        top1_error: Standard error of `top1`.
        top5: Share whose label is among the first five predictions.
        cross_entropy: In nats.
        agreement: Share on which the first predictions of model and reference are the same.
        kl: Divergence KL(reference || model) of the predictions, in nats.
        reference_top1: Top-1 of the reference on the same images.
        cosine: Of the output and the reference's, for models without classes.
        reference: What the reference is, where `evaluate` was told: `original`, `uncompressed` or `other`.
    """

    images: int
    broken: int
    top1: float | None
    top1_error: float | None
    top5: float | None
    cross_entropy: float | None
    agreement: float | None
    kl: float | None
    reference_top1: float | None
    cosine: float | None = None
    reference: str | None = None


def measure(logits: Tensor, labels: Tensor | None, reference: Tensor | None) -> Measured:
    """What one batch contributes: a number for each image, by name. Dense predictions count as their mean.

    Beside what `Evaluation` has: `label`, if there are labels, and the class that is predicted, `prediction`.
    """
    result = {"prediction": logits.argmax(-1)} if logits.dim() == 2 else {}
    log_probabilities = logits.float().log_softmax(-1)
    if labels is not None:
        result["label"] = labels
        ranked = logits.topk(min(5, logits.shape[-1])).indices
        result["top1"] = ranked[:, 0] == labels
        result["top5"] = (ranked == labels[:, None]).any(1)
        result["cross_entropy"] = F.nll_loss(log_probabilities, labels, reduction="none")
    if reference is not None:
        result["agreement"] = _per_image(logits.argmax(-1) == reference.argmax(-1))
        target = reference.float().log_softmax(-1)
        result["kl"] = _per_image(F.kl_div(log_probabilities, target, reduction="none", log_target=True).sum(-1))
        if labels is not None:
            result["reference_top1"] = reference.argmax(-1) == labels
    return {name: values.cpu().double() for name, values in result.items()}


def _per_image(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.double().flatten(1).mean(1)


def evaluate(
    model: nn.Module, data: ImageData, *, reference: nn.Module | Reference | None = None, progress: bool = True
) -> Evaluation:
    """Measure a classifier on labelled images, on unlabelled ones against a reference alone.

    A model without classes (an image tower, a backbone) is compared with the reference by cosine; labels are not read.

    Args:
        model: The model to measure, compressed or not.
        data: Images with or without labels, as `as_loader` knows them: a path or a word for a dataset, a `Dataset`, a
            tensor, or what yields batches of `(images, labels)` or of images.
        reference: The original, for agreement and divergence; `reference_for(model)` finds it.
        progress: Show a progress bar.
    """
    return evaluate_all([model], data, reference=reference, progress=progress)[0]


def evaluate_all(
    models: Sequence[nn.Module],
    data: ImageData,
    *,
    reference: nn.Module | Reference | None = None,
    progress: bool = True,
) -> list[Evaluation]:
    """`evaluate` several models on the same images, which are read once and shown to the reference once."""
    compared_with, name = named(reference)
    loader = evaluation_loader(models[0], data)
    found = [summarize(each, name) for each in measure_each_image(models, loader, compared_with, progress)]
    if any(one.quality is None for one in found):
        raise PmvitError(
            "expected images with labels, or the original as reference= to compare with; got images alone: at the "
            "command line, labels are one folder a class, and a compressed model finds its original"
        )
    return found


def measure_each_image(
    models: Sequence[nn.Module], data: Iterable[Any], reference: nn.Module | None, progress: bool
) -> list[Measured]:
    """For each model, a number for each image, by the names of `Evaluation`; `images` and `broken` are ones to count.

    Raises:
        PmvitError: If there is no image, a label that a model does not know, or an output that is not finite.
    """
    collected: list[dict[str, list[Tensor]]] = [{"images": []} for _ in models]
    with ExitStack() as modes, torch.inference_mode():
        for model in models if reference is None else [*models, reference]:
            modes.enter_context(evaluation_mode(model))
        for batch in track(data, "evaluate", count_items(data), show=progress):
            images, labels = unpack(batch)
            expected = None if reference is None else predict(reference, images.to(device_of(reference)))
            if expected is not None:
                check_finite(expected, "the reference")
            for model, found in zip(models, collected, strict=True):
                known = expected if model is reference else None
                logits = predict(model, images.to(device_of(model))) if known is None else known
                check_finite(logits, "the model")
                found["images"].append(torch.ones(len(images)))
                for name, values in _measured(model, logits, labels, expected).items():
                    found.setdefault(name, []).append(values)
    if not collected[0]["images"]:
        raise PmvitError(f"expected at least one image to evaluate on; got none{unreadable(data)}")
    broken = {"broken": torch.ones(len(getattr(data, "broken", ())))}
    return [{name: torch.cat(values) for name, values in found.items()} | broken for found in collected]


def check_finite(outputs: Tensor, whose: str) -> None:
    """Raise `PmvitError` if outputs, the images first, are not finite: numbers made of them would mean nothing."""
    is_finite = outputs.isfinite().reshape(len(outputs), -1).all(1)
    if not is_finite.all():
        raise PmvitError(
            f"expected finite outputs, got NaN or infinity from {whose} for {int((~is_finite).sum())} of "
            f"{len(outputs)} images of a batch: are its weights and these images finite? Half precision overflows early"
        )


def device_of(model: nn.Module) -> torch.device:
    """Where the weights of a model are."""
    return next(model.parameters()).device


def _measured(model: nn.Module, logits: Tensor, labels: Tensor | None, expected: Tensor | None) -> Measured:
    """What the outputs for one batch say of a model."""
    expected = None if expected is None else expected.to(logits.device)
    if gives_logits(model):
        if labels is not None and logits.dim() != 2:
            raise PmvitError(
                f"expected a classifier for labelled images, got predictions of shape {tuple(logits.shape)}: use "
                "evaluate_segmentation, or pass images alone and the original as reference="
            )
        if labels is not None:
            labels = labels.to(logits.device)
            check_labels(labels, logits.shape[-1])
        return measure(logits, labels, expected)
    if expected is None:
        raise PmvitError(
            f"a {type(model).__name__} has no classes to measure: pass the uncompressed original as reference="
        )
    similarity = F.cosine_similarity(logits.float().flatten(1), expected.float().flatten(1))
    return {"cosine": similarity.cpu().double()}


def summarize(found: Measured, reference: str | None) -> Evaluation:
    """The means over what `measure_each_image` found."""
    images, broken = len(found["images"]), len(found["broken"])
    means = {name: values.mean().item() for name, values in found.items()}
    known: dict[str, Any] = {field.name: means.get(field.name) for field in fields(Evaluation)}
    error = math.sqrt(means["top1"] * (1 - means["top1"]) / images) if "top1" in means else None
    return Evaluation(**known | {"images": images, "broken": broken, "top1_error": error, "reference": reference})
