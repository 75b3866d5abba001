"""How strong a method has to be for a model to cost what it should."""

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from pmvit.compression import compress
from pmvit.errors import PmvitError
from pmvit.measuring.flops import flops
from pmvit.methods.base import Method, encoder_of

M = TypeVar("M", bound=Method)

TOLERANCE = 0.01  # of the FLOPs asked for
STEPS = 12  # halvings of the range of strengths


def method_for(
    model: nn.Module, kind: type[M], gflops: float, *, data: Iterable[Any] | None = None, **options: Any
) -> M:
    """The method that makes a model cost so many GFLOPs, as `flops` counts them.

    Args:
        model: An original model.
        kind: Of method.
        gflops: Billions of multiply-accumulates an image.
        data: A loader, for a method that needs images.
        options: Those of the method but the one that says how much it reduces.

    Raises:
        PmvitError: If nothing comes within 1 % of it.
    """
    method, reached = nearest(model, kind, gflops, data=data, **options)
    if abs(reached - gflops) > TOLERANCE * gflops:
        raise PmvitError(
            f"expected GFLOPs that {kind.name} can reach with this model; got {gflops:.4g}, and the nearest is "
            f"{reached:.4g}"
        )
    return method


def nearest(
    model: nn.Module, kind: type[M], gflops: float, *, data: Iterable[Any] | None = None, **options: Any
) -> tuple[M, float]:
    """What `method_for` returns, as near as it comes, and its GFLOPs. Only shapes are computed, on no device."""
    shapes = copy.deepcopy(model).to("meta")
    if kind.needs_images and data is None:
        raise PmvitError(f"{kind.name} chooses by looking at images: give it some (data=, --data)")
    observed = None if data is None else kind.observe(model, data)

    def made(strength: float) -> tuple[M, float]:
        method = kind.at(strength, encoder_of(model), **options).choose(observed)
        return method, flops(compress(shapes, method)).gflops

    low, high = 0.0, 1.0
    tried = [made(low), made(high)]
    for _ in range(STEPS):  # the stronger, the cheaper
        middle = (low + high) / 2
        tried.append(made(middle))
        if abs(tried[-1][1] - gflops) < TOLERANCE / 10 * gflops:
            break
        low, high = (middle, high) if tried[-1][1] > gflops else (low, middle)
    return min(tried, key=lambda found: abs(found[1] - gflops))
