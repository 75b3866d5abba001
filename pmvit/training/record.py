"""`finetune.json`: what a run is, so that it can be resumed as itself and made again."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pmvit.compression import compression_of
from pmvit.config import FinetuneConfig
from pmvit.errors import PmvitError
from pmvit.files import check_fields, config_from, read_document, write_text
from pmvit.wrapping import fingerprint

FILE, CHECKPOINTS = "finetune.json", "checkpoints"
FORMAT, VERSION = "pmvit-finetune", 1
FREE = {"workers", "cpu", "checkpoint_every", "keep_checkpoints", "log_with", "compile", "accumulate"}


def has_begun(folder: Path) -> bool:
    """Whether a folder holds a run with checkpoints."""
    return (folder / CHECKPOINTS).is_dir() and any((folder / CHECKPOINTS).iterdir())


@dataclass(frozen=True)
class RunRecord:
    """Configuration and starting point of a run, and its result once it has one.

    Attributes:
        config: How it fine-tunes.
        plan: SHA-256 of the plan of the model, or of the method that compresses it, if there is one.
        teacher: Fingerprint of the teacher, if there is one.
        command: What the one who started it wants to remember.
        result: What came of it.
    """

    config: FinetuneConfig
    plan: str | None
    teacher: str | None
    command: dict[str, Any]
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
        write_text(folder / FILE, json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        if not (folder / FILE).exists():
            raise PmvitError(
                f"expected a fine-tuning run in {folder}, which has no {FILE}: start one there without resume"
            )
        document = read_document(folder / FILE, FORMAT, VERSION)
        names = ("config", "plan", "teacher", "command", "result")
        check_fields(document, ("format", "version", *names), str(folder / FILE))
        config = config_from(FinetuneConfig, document["config"], f"{folder / FILE}: config")
        return cls(config, *(document[name] for name in names[1:]))

    def check_against(self, folder: Path, resume: bool) -> "RunRecord | None":
        """The record that is in the folder already; `None` if there is none.

        Raises:
            PmvitError: If it is of another run, or there is one and it is not to be resumed.
        """
        if not (folder / FILE).exists() or not (has_begun(folder) or resume):
            return None
        before = RunRecord.read(folder)
        if not resume:
            raise PmvitError(f"{folder} holds a fine-tuning run already: resume it, or choose another folder")
        for name, value in asdict(self.config).items():
            there = getattr(before.config, name)
            if value != there and name not in FREE:
                raise PmvitError(f"{folder} holds a run with {name} = {there!r}, not {value!r}: resume it as it was")
        for name, what in (("plan", "plan"), ("teacher", "teacher")):
            if getattr(self, name) != getattr(before, name):
                raise PmvitError(f"{folder} holds a run with another {what}: resume it with the model it began with")
        return before
