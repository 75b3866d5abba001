"""Find the model that a compressed one was made of: what every comparison is with."""

import copy
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from pmvit.compression import Original, compression_of, decompress
from pmvit.data.demo import DEMO, demo_model
from pmvit.errors import PmvitError
from pmvit.fingerprint import fingerprint
from pmvit.hosts.timm.model import FORBIDDEN_ARGUMENTS
from pmvit.loading import create_model

HERE = ("torchvision", "segmenter")  # what makes an architecture of its name without asking a hub


def original_model(model: nn.Module) -> nn.Module | None:
    """The true original of a compressed model, on the same device and in evaluation mode; `None` if it is not at hand.

    That is the model itself, uncompressed, if its weights are still those that were compressed; else a model on this
    machine that has them: one that was saved on the way (`compression_of(model).original.saved`), or what was named
    when it was compressed (`source`, `weights`). Nothing is fetched. Weights are told by their fingerprint; of a model
    that version 0.1 saved there is none, and what is found where the original used to be is taken for it.

    Raises:
        PmvitError: If the model is not compressed.
    """
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model to find the original of; this one is not compressed")
    device, wanted = next(model.parameters()).device, compression.original.fingerprint
    if wanted is not None:
        same = decompress(copy.deepcopy(model))
        if fingerprint(same) == wanted:
            return same.eval()
    for found in _candidates(compression.original):
        plain = found if compression_of(found) is None else decompress(found)
        if wanted is None or fingerprint(plain) == wanted:
            return plain.to(device).eval()
    return None


def _candidates(original: Original) -> Iterator[nn.Module]:
    """Models on this machine that may be the original, each made when it is asked for.

    What is opened is written in a file, perhaps somebody else's: it may not have code run, or anything fetched.
    """
    if original.source == DEMO:
        yield demo_model()
    named = [(original.source, original.weights)] if original.source is not None else []
    for name, weights in [*((saved, None) for saved in original.saved), *named]:
        library, colon, _ = name.partition(":")
        is_here = Path(name).exists() if weights is None else Path(weights).exists() and (not colon or library in HERE)
        arguments = original.arguments if name == original.source else {}
        if not is_here or FORBIDDEN_ARGUMENTS & set(arguments):
            continue
        try:
            yield create_model(name, weights, **arguments)
        except PmvitError:  # it is another model now, or none
            continue
