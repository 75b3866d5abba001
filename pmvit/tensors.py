"""Tensors in safetensors files, with texts in their header: whole or not there, and never unpickled."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.files import write_atomically


def write_tensors(path: Path, tensors: dict[str, Tensor], texts: dict[str, str] | None = None) -> None:
    """Write tensors and texts, atomically."""
    write_atomically(path, lambda temporary: save_file(tensors, temporary, texts))


def read_texts(path: Path) -> dict[str, str]:
    """The texts in the header of a file."""
    with _opened(path) as file:
        return file.metadata() or {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, copied to where PyTorch puts its own.

    In the file they begin anywhere, and products with numbers that are not aligned are rounded in another order.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # it is no mapping


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise PmvitError(f"expected a whole safetensors file at {path}; it cannot be read ({error})") from None
