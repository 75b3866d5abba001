"""How strong a method has to be for a model to cost what it should."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from pmvit.compression import compress
from pmvit.data.opening import ImageData
from pmvit.errors import PmvitError
from pmvit.measuring.flops import flops
from pmvit.methods.base import M, encoder_of

T = TypeVar("T")

TOLERANCE = 0.01  # of the FLOPs asked for
STEPS = 12  # halvings of the range of strengths


def method_for(model: nn.Module, kind: type[M], gflops: float, *, data: ImageData | None = None, **options: Any) -> M:
    """The kind of method that makes an original model cost so many GFLOPs, as `flops` counts them, within 1 %.

    `data` are images, for a method that needs some; options are all but the one that says how much it reduces.
    """
    method, reached = nearest(model, kind, gflops, data=data, **options)
    if abs(reached - gflops) > TOLERANCE * gflops:
        raise PmvitError(
            f"expected GFLOPs that {kind.name} can reach with this model; got {gflops:.4g}, and the nearest is "
            f"{reached:.4g}"
        )
    return method


def nearest(
    model: nn.Module, kind: type[M], gflops: float, *, data: ImageData | None = None, **options: Any
) -> tuple[M, float]:
    """What `method_for` returns, as near as it comes, and its GFLOPs. Only shapes are computed, on no device."""
    shapes = copy.deepcopy(model).to("meta")
    if kind.needs_images and data is None:
        raise PmvitError(f"{kind.name} chooses by looking at images: give it some (data=, --data)")
    observed = None if data is None else kind.observe(model, data)

    def made(strength: float) -> tuple[M, float]:
        method = kind.at(strength, encoder_of(model), **options).choose(observed)
        return method, flops(compress(shapes, method)).gflops

    return bisect(made, gflops)


def bisect(made: Callable[[float], tuple[T, float]], gflops: float, most: float = 1.0) -> tuple[T, float]:
    """What is made at a strength of 0 ... `most`, with its GFLOPs: the stronger, the fewer; as near as it comes."""
    low, high = 0.0, most
    tried = [made(low), made(high)]
    for _ in range(STEPS):
        middle = (low + high) / 2
        tried.append(made(middle))
        if abs(tried[-1][1] - gflops) < TOLERANCE / 10 * gflops:
            break
        low, high = (middle, high) if tried[-1][1] > gflops else (low, middle)
    return min(tried, key=lambda found: abs(found[1] - gflops))
