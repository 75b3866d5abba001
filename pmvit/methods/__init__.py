"""Other ways to run a vision transformer on fewer tokens, for honest side-by-side runs; each written from its paper."""

from typing import Any, TypeVar

from torch import nn

from pmvit.methods.base import METHODS, Method, apply, make_method, method_called, method_from, method_of, remove
from pmvit.methods.dynamic_vit import DynamicVit
from pmvit.methods.evit import Evit
from pmvit.methods.evo_vit import EvoVit
from pmvit.methods.expedite import Expedite
from pmvit.methods.floors import RandomMerging, TopK
from pmvit.methods.tofu import Tofu
from pmvit.methods.tome import Tome, tome
from pmvit.methods.tps import Tps
from pmvit.methods.uniform import Uniform
from pmvit.methods.zero_tprune import ZeroTPrune

__all__ = [
    "METHODS",
    "DynamicVit",
    "Evit",
    "EvoVit",
    "Expedite",
    "Method",
    "RandomMerging",
    "Tofu",
    "Tome",
    "TopK",
    "Tps",
    "Uniform",
    "ZeroTPrune",
    "apply",
    "compress",
    "make_method",
    "method_called",
    "method_from",
    "method_of",
    "remove",
    "tome",
]

Model = TypeVar("Model", bound=nn.Module)


def compress(model: Model, method: str, **options: Any) -> Model:
    """A copy of a model that a method has made faster, as `compress(model, "tome", r=13)`."""
    return apply(model, make_method(method, **options))
