"""What a compressed model is compared with: its true original, or something else that is called what it is."""

import copy
from pathlib import Path
from typing import NamedTuple

from torch import nn

from pmvit.compression import compression_of, decompress
from pmvit.errors import PmvitError
from pmvit.loading import create_model, original_model
from pmvit.numbers.measures import REFERENCES
from pmvit.wrapping import fingerprint

HEADINGS = {"original": "original", "uncompressed": "uncompressed, same weights", "other": "other model"}


class Reference(NamedTuple):
    """A model to compare with, and what it is.

    Attributes:
        model: Not compressed.
        name: `original` if the compressed model was made of it; `uncompressed` if it has the compressed model's own
            weights, which calibration or fine-tuning have changed; `other` if somebody gave another model.
    """

    model: nn.Module
    name: str

    @property
    def title(self) -> str:
        """In tables."""
        return REFERENCES[self.name]

    @property
    def heading(self) -> str:
        """Above or beside a picture."""
        return HEADINGS[self.name]


def reference_for(model: nn.Module, given: str | Path | nn.Module | None = None) -> Reference:
    """What to compare a compressed model with: its true original; its own weights if that is not at hand.

    Args:
        model: A compressed model.
        given: Where the original is, if it is known: a model, or a name or path as `create_model` takes it.

    Raises:
        PmvitError: If the model is not compressed, or there is no model where one was said to be.
    """
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model to compare with its original; this one is not compressed")
    if given is None:
        found = original_model(model)
        if found is not None:
            return Reference(found, "original")
        return Reference(decompress(copy.deepcopy(model)).eval(), "uncompressed")
    found = opened(given)
    if compression_of(found) is not None:
        found = decompress(copy.deepcopy(found))
    is_original = compression.original.fingerprint in (None, fingerprint(found))
    return Reference(found.to(next(model.parameters()).device).eval(), "original" if is_original else "other")


def opened(given: str | Path | nn.Module) -> nn.Module:
    """A model that was given, or whose name or path was, as `create_model` takes it."""
    return given if isinstance(given, nn.Module) else create_model(str(given))


def named(reference: "nn.Module | Reference | None") -> tuple[nn.Module | None, str | None]:
    """The model of a reference, and its name if it has one."""
    return (reference.model, reference.name) if isinstance(reference, Reference) else (reference, None)
