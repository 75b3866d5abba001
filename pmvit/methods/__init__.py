"""Other ways to run a vision transformer on fewer tokens, for honest side-by-side runs; each written from its paper."""

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from pmvit.methods.act import Act
from pmvit.methods.base import (
    METHODS,
    Method,
    apply,
    fitted,
    make_method,
    method_called,
    method_from,
    method_of,
    remove,
)
from pmvit.methods.dynamic_vit import DynamicVit
from pmvit.methods.evit import Evit
from pmvit.methods.evo_vit import EvoVit
from pmvit.methods.expedite import Expedite
from pmvit.methods.floors import RandomMerging, TopK
from pmvit.methods.ia_red import IaRed2
from pmvit.methods.ps_vit import PsVit
from pmvit.methods.tofu import Tofu
from pmvit.methods.tome import Tome, tome
from pmvit.methods.tps import Tps
from pmvit.methods.uniform import Uniform
from pmvit.methods.zero_tprune import ZeroTPrune

__all__ = [
    "METHODS",
    "Act",
    "DynamicVit",
    "Evit",
    "EvoVit",
    "Expedite",
    "IaRed2",
    "Method",
    "PsVit",
    "RandomMerging",
    "Tofu",
    "Tome",
    "TopK",
    "Tps",
    "Uniform",
    "ZeroTPrune",
    "apply",
    "compress",
    "fitted",
    "make_method",
    "method_called",
    "method_from",
    "method_of",
    "remove",
    "tome",
]

Model = TypeVar("Model", bound=nn.Module)


def compress(model: Model, method: str, *, data: Iterable[Any] | None = None, **options: Any) -> Model:
    """A copy of a model that a method has made faster, as `compress(model, "tome", r=13)`.

    Args:
        model: An original model.
        method: Its name.
        data: A loader, for a method that has to look at images.
        options: Those of the method.
    """
    return apply(model, fitted(make_method(method, **options), model, data))
