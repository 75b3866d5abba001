"""Tensors in safetensors files, with texts in their header: whole or not there, and never unpickled."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.files import MOST_TEXT, check_regular, write_atomically

SEAL = "pmvit-sha256"  # what the checksum is called in a header
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DTYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def write_tensors(
    path: Path, tensors: dict[str, Tensor], texts: dict[str, str] | None = None, *, sealed: bool = True
) -> None:
    """Write tensors and texts, atomically; `sealed` with a checksum of all, if something else has none."""
    header = {**(texts or {}), SEAL: checksum(tensors, texts)} if sealed else texts
    write_atomically(path, lambda temporary: save_file(tensors, temporary, header))


def checksum(tensors: Mapping[str, Tensor], texts: Mapping[str, str] | None = None) -> str:
    """SHA-256 of the names, types, shapes and numbers of tensors, and of texts if there are any."""
    digest = hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode() if texts else b"")
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_texts(path: Path) -> dict[str, str]:
    """The texts in the header of a file."""
    with _opened(path) as file:
        texts: dict[str, str] = file.metadata() or {}
    if any(len(text) > MOST_TEXT for text in texts.values()):
        raise PmvitError(f"expected texts of at most {MOST_TEXT:,} characters in {path}; one is longer")
    return texts


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a file, by their names, as its header has them: no tensor is read."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, copied to where PyTorch puts its own, after a look at the checksum if the file has one.

    In the file they begin anywhere, and products with numbers that are not aligned are rounded in another order.
    """
    with _opened(path) as file:
        texts = file.metadata() or {}
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # it is no mapping
    seal = texts.pop(SEAL, None)
    if seal is not None and seal != checksum(tensors, texts):
        raise PmvitError(f"{path} is not what was written (its SHA-256 differs): it is damaged, make it again")
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, AttributeError, RuntimeError, ValueError) as error:  # the last of PyTorch
        raise PmvitError(f"expected a whole safetensors file at {path}; it cannot be read ({error})") from None


def dtype_called(name: Any, where: str, among: tuple[torch.dtype, ...] = DTYPES) -> torch.dtype:
    """The type of numbers that a file names."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in among}
    if not isinstance(name, str) or name not in known:
        raise PmvitError(f"{where}: expected one of the types {', '.join(known)}; got {name!r}")
    return known[name]
