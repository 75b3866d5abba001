"""What a run keeps of itself in its folder, so that it can be resumed as itself: `finetune.json`, and checkpoints.

A checkpoint is one safetensors file, whole or not there, with nothing in it that has to be unpickled.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.compression import compression_of
from pmvit.config import FinetuneConfig
from pmvit.errors import PmvitError
from pmvit.files import check_fields, fields_from, parse_document, read_document, typed, write_document
from pmvit.tensors import dtype_called, read_tensors, read_texts, write_tensors
from pmvit.wrapping import fingerprint

FILE, CHECKPOINTS = "finetune.json", "checkpoints"
FORMAT, CHECKPOINT_FORMAT, VERSION = "pmvit-finetune", "pmvit-checkpoint", 1
Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, and numbers that go with them as JSON data
FREE = {"workers", "cpu", "checkpoint_every", "keep_checkpoints", "log_with", "compile", "accumulate"}


def has_begun(folder: Path) -> bool:
    """Whether a folder holds a run with checkpoints."""
    return (folder / CHECKPOINTS).is_dir() and any((folder / CHECKPOINTS).iterdir())


@dataclass(frozen=True)
class RunRecord:
    """Configuration and starting point of a run, and its result once it has one."""

    config: FinetuneConfig
    plan: str | None  # SHA-256 of the plan of the model, or of the method that compresses it, if there is one
    teacher: str | None  # fingerprint of the teacher, if there is one
    command: dict[str, Any]  # JSON data of the caller, as the options of the command line
    result: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, model: nn.Module, teacher: nn.Module | None, config: FinetuneConfig, command: dict[str, Any]
    ) -> "RunRecord":
        compression = compression_of(model)
        plan = hashlib.sha256(compression.what.to_json().encode()).hexdigest() if compression is not None else None
        return cls(config, plan, fingerprint(teacher) if teacher is not None else None, command)

    def write(self, folder: Path) -> None:
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_document(folder / FILE, json.dumps(document, indent=1))

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        path = folder / FILE
        if not path.exists():
            raise PmvitError(
                f"expected a fine-tuning run in {folder}, which has no {FILE}: start one there without resume"
            )
        return cls(**fields_from(cls, read_document(path, FORMAT, VERSION), str(path), beside=("format", "version")))

    def check_against(self, folder: Path, resume: bool) -> "RunRecord | None":
        """The record that is in the folder already, `None` if there is none; `PmvitError` if it is of another run."""
        if not (folder / FILE).exists() or not (has_begun(folder) or resume):
            return None
        before = RunRecord.read(folder)
        if not resume:
            raise PmvitError(f"{folder} holds a fine-tuning run already: resume it, or choose another folder")
        for name, value in asdict(self.config).items():
            there = getattr(before.config, name)
            if value != there and name not in FREE:
                raise PmvitError(f"{folder} holds a run with {name} = {there!r}, not {value!r}: resume it as it was")
        for what in ("plan", "teacher"):
            if getattr(self, what) != getattr(before, what):
                raise PmvitError(f"{folder} holds a run with another {what}: resume it with the model it began with")
        return before


def split_tensors(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """JSON data for a nested state of numbers, texts, types and tensors; the tensors go to `tensors`, by their path."""
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
        return dtype_called(content, "the state of the optimizer")
    if kind == "dict":
        return {key: join_tensors(entry, tensors) for key, entry in content}
    if kind not in ("list", "tuple"):
        raise PmvitError(f"expected a tensor, dtype, dict, list or tuple in the state of the optimizer; got {kind!r}")
    entries = [join_tensors(entry, tensors) for entry in content]
    return entries if kind == "list" else tuple(entries)


def select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run in a folder, by the number of steps done; only the last `keep` stay."""

    folder: Path
    keep: int

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        """The steps there is a checkpoint of, first to last."""
        numbers = (path.stem.removeprefix("step-") for path in self.folder.glob("step-*.safetensors"))
        return sorted(int(number) for number in numbers if number.isdecimal() and len(number) < 20)

    def read(self, path: Path) -> Checkpoint:
        """Read a checkpoint back; `PmvitError` if the file is damaged or something else."""
        tensors, text = read_tensors(path), read_texts(path).get(CHECKPOINT_FORMAT, "{}")
        document = parse_document(text, CHECKPOINT_FORMAT, VERSION, str(path))
        check_fields(document, ("format", "version", "state"), str(path))
        return tensors, typed(dict[str, Any], document["state"], f"{path}: state")

    def write(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint with a checksum, and drop the oldest ones."""
        text = json.dumps({"format": CHECKPOINT_FORMAT, "version": VERSION, "state": state})
        apart, stored = {}, set()
        for name, value in tensors.items():
            value = value.detach().cpu().contiguous()
            memory = value.untyped_storage().data_ptr()
            apart[name] = value.clone() if memory in stored and value.numel() else value  # each is stored on its own
            stored.add(memory)
        for leftover in self.folder.glob(".step-*.tmp"):  # of a run that was killed while it wrote
            leftover.unlink(missing_ok=True)
        write_tensors(self.path(step), apart, {CHECKPOINT_FORMAT: text})
        for old in self.steps()[: -self.keep]:
            self.path(old).unlink(missing_ok=True)
