"""Grad-CAM (Selvaraju et al., 2017) on the tokens that leave each block: which patches speak for a class."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode, frozen_parameters
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.reporting.images import Bytes
from pmvit.reporting.pictures.patches import coloured
from pmvit.training.loss import tapped_tokens

OPACITY = (0.3, 0.85)  # of the coldest place and the warmest
MOST = 0.95  # share of the patches below the warmest colour: a few corners often outshine all others
HEAT = "inferno"  # lightness rises with heat, for all eyes


class Explained(NamedTuple):
    """What a model finds in an image, and which patches speak for it.

    The maps have, for each block, a number from 0 up a patch, as (rows, columns); there is none if what the model puts
    out does not depend on the patches that leave the block.
    """

    target: int | None  # the class that is explained; `None` for a model without classes, whose whole output is
    found: int | None  # the class it finds itself; for a model that labels pixels, the most frequent one
    confidence: float  # its probability or, for pixels, the share of them that have it
    is_dense: bool  # whether the model finds classes of many places, and not of the image
    maps: list[Tensor | None]


def explain(model: nn.Module, image: Tensor, target: int | None = None) -> Explained:
    """Grad-CAM of every block: how much each patch that leaves it speaks for a class.

    The gradient of the class's logit, averaged over the patches of a block, says how much each channel counts; the map
    is the sum of the channels so weighted, where it is positive. The image is prepared, (channels, height, width). If
    no target is given, it is the class that the model finds. Where pixels are labelled, the gradient is that of the
    logits of the class at all pixels that have it.
    """
    host = host_of(model)
    parameter = next(model.parameters())
    with (
        evaluation_mode(model),
        frozen_parameters(model),
        tapped_tokens(model) as outputs,
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        images = image[None].to(parameter.device, parameter.dtype, copy=True).requires_grad_(True)
        output = predict(model, images)
        found, confidence = _found(output) if gives_logits(model) else (None, 0.0)
        target, left = found if target is None else target, list(outputs.values())
        gradients = torch.autograd.grad(_evidence(output, target), left, allow_unused=True)
    maps: list[Tensor | None] = [None] * len(left)
    for number, (tokens, gradient, layout) in enumerate(zip(left, gradients, host.layouts(), strict=True)):
        first = layout.num_prefix - host.layout.num_suffix
        if gradient is not None:
            activations, slopes = (
                each.detach().float().cpu().flatten(1, -2)[0, first : first + layout.num_patches]
                for each in (tokens, gradient)
            )
            if slopes.any():
                maps[number] = (activations @ slopes.mean(0)).clamp(min=0).view(layout.grid)
    return Explained(target, found, confidence, output.dim() > 2, maps)


def _found(logits: Tensor) -> tuple[int, float]:
    """The class of an image and its probability, or the most frequent class of its places and its share."""
    rows = logits.detach().float().flatten(0, -2)
    if len(rows) == 1:
        probability, found = rows[0].softmax(-1).max(-1)
        return int(found), float(probability)
    counts = rows.argmax(-1).bincount(minlength=rows.shape[-1])
    return int(counts.argmax()), float(counts.max() / counts.sum())


def _evidence(output: Tensor, target: int | None) -> Tensor:
    """What gradients are taken of."""
    if target is None:
        return 0.5 * output.square().sum()
    rows = output.flatten(0, -2)
    logits = rows[:, target]
    has_it = rows.argmax(-1) == target
    return logits[has_it].sum() if len(rows) > 1 and has_it.any() else logits.sum()


def agreement(first: Tensor | None, second: Tensor | None) -> float | None:
    """Cosine of two maps: 1 where they are high at the same places; `None` if one of them is empty."""
    if first is None or second is None or not first.any() or not second.any():
        return None
    return float(torch.cosine_similarity(first.flatten(), second.flatten(), dim=0))


def heat(values: Tensor) -> Bytes:
    """A map as colours that lie over an image, warm and opaque where it is high."""
    highest = values.flatten().quantile(MOST) or values.max()
    shares = (values / highest.clamp(min=torch.finfo(values.dtype).tiny)).clamp(max=1)
    colours = coloured(shares.numpy(), HEAT)
    least, most = OPACITY
    colours[..., 3] = (255 * (least + (most - least) * shares)).round().byte().numpy()
    return colours
