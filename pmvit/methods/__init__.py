"""Other ways to run a vision transformer on fewer tokens, for honest side-by-side runs; each written from its paper."""

from collections.abc import Callable
from typing import Any

from torch import nn

from pmvit.errors import PmvitError
from pmvit.methods.tome import tome

METHODS: dict[str, Callable[..., nn.Module]] = {"tome": tome}


def compress(model: nn.Module, method: str, **options: Any) -> nn.Module:
    """A copy of a model that a method has made faster, as `compress(model, "tome", r=13)`."""
    if method not in METHODS:
        raise PmvitError(f"expected one of the methods {', '.join(METHODS)}; got {method!r}")
    return METHODS[method](model, **options)
