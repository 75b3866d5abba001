"""States a model is put in for a while and taken out of again."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from pmvit.errors import PmvitError
from pmvit.wrapping import HostChange


@contextmanager
def changed(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Objects with other attributes, each given with the name of one and its value; as before afterwards."""
    with ExitStack() as undoing:
        for change in changes:
            undoing.callback(HostChange.make(*change).undo)
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and each back in its own mode afterwards."""
    with changed([(module, "training", module.training) for module in model.modules()]):
        model.eval()
        yield


def frozen_parameters(model: nn.Module) -> AbstractContextManager[None]:
    """No parameter wants a gradient: a backward pass computes none of theirs and keeps nothing for them."""
    return changed([(parameter, "requires_grad", False) for parameter in model.parameters()])


def check_trainable(model: nn.Module) -> None:
    """Raise `PmvitError` for a model that `optimize_for_inference` made."""
    if getattr(model, "inference_config", None) is not None:
        raise PmvitError(
            "expected a model as compress or load return it; this one is optimised for inference: use the model it was "
            "made of"
        )
