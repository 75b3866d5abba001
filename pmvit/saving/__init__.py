"""Models on disk: safetensors and JSON, never pickle; with a model card and the commands that made them."""

from pmvit.saving.models import (
    CONFIG_FILE,
    check_output,
    check_savable,
    load,
    load_tensors,
    read_metadata,
    read_tensors,
    save,
)

__all__ = [
    "CONFIG_FILE",
    "check_output",
    "check_savable",
    "load",
    "load_tensors",
    "read_metadata",
    "read_tensors",
    "save",
]
