"""States a model is put in for a while and taken out of again."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pmvit.errors import PmvitError


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and each back in its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """No parameter wants a gradient: a backward pass computes none of theirs and keeps nothing for them."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def check_trainable(model: nn.Module) -> None:
    """Raise `PmvitError` for a model that `optimize_for_inference` made."""
    if getattr(model, "inference_config", None) is not None:
        raise PmvitError(
            "expected a model as compress or load return it; this one is optimised for inference: use the model it was "
            "made of"
        )
