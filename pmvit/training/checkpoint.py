"""Checkpoints of a run: one safetensors file each, whole or not there, and nothing in it that has to be unpickled."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.files import check_fields, parse_document, write_atomically
from pmvit.tensors import read_tensors, read_texts

FORMAT, VERSION = "pmvit-checkpoint", 1


class Checkpoint(NamedTuple):
    """A moment between two steps: the tensors by name, and numbers that go with them as JSON data."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def split_tensors(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """JSON data for a nested state, as optimizers have it; its tensors go to `tensors`, by their path.

    Raises:
        PmvitError: If the state holds something else than numbers, texts, types and tensors.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, split_tensors(entry, tensors, f"{path}.{key}")] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [split_tensors(entry, tensors, f"{path}.{place}") for place, entry in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise PmvitError(
        f"this optimizer keeps a {type(value).__name__} ({path}), which no checkpoint can hold: take another"
    )


def join_tensors(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `split_tensors` split."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "dict":
        return {key: join_tensors(entry, tensors) for key, entry in content}
    entries = [join_tensors(entry, tensors) for entry in content]
    return entries if kind == "list" else tuple(entries)


class Checkpoints:
    """The checkpoints of a run in a folder, by the number of steps done; only the last `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        """The steps there is a checkpoint of, first to last."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.safetensors"))

    def latest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def read_latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; `None` if there is none at all.

        Raises:
            PmvitError: If there are some, but none that can be read.
        """
        failure = None
        for step in reversed(self.steps()):
            try:
                return self.read(self.path(step))
            except PmvitError as error:  # damaged after it was written: the one before will do
                failure = failure or error
        if failure is not None:
            raise failure
        return None

    def write(self, step: int, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and drop the oldest ones.

        Raises:
            PmvitError: If it cannot be written, as on a full disk; those before it are whole.
        """
        metadata = {FORMAT: json.dumps({"format": FORMAT, "version": VERSION, "state": checkpoint.state})}
        tensors = _apart(checkpoint.tensors)
        try:
            for leftover in self.folder.glob(".step-*.tmp"):  # of a run that was killed while it wrote
                leftover.unlink(missing_ok=True)
            write_atomically(self.path(step), lambda temporary: save_file(tensors, temporary, metadata))
        except (OSError, SafetensorError) as error:
            raise self._failure(step, error) from None
        for old in self.steps()[: -self.keep]:
            self.path(old).unlink(missing_ok=True)

    def _failure(self, step: int, error: Exception) -> PmvitError:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        latest = self.latest()
        what = "the disk is full" if full else str(error)
        safe = f"the one before, {latest}, is whole" if latest is not None else "there is none before it"
        return PmvitError(f"could not write the checkpoint of step {step} ({what}); {safe}. Make room, then resume")

    def read(self, path: Path) -> Checkpoint:
        """Read a checkpoint back.

        Raises:
            PmvitError: If the file is cut short or something else.
        """
        text = read_texts(path).get(FORMAT)
        if text is None:
            raise PmvitError(f"expected a checkpoint written by pmvit at {path}; it is another safetensors file")
        document = parse_document(text, FORMAT, VERSION, str(path))
        check_fields(document, ("format", "version", "state"), str(path))
        return Checkpoint(read_tensors(path), document["state"])


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, those that share memory copied: safetensors stores each on its own."""
    stored: set[int] = set()
    result = {}
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        memory = value.untyped_storage().data_ptr()
        result[name] = value.clone() if memory in stored and value.numel() else value
        stored.add(memory)
    return result


def select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def prefixed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}
