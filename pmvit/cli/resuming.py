"""Go on with a run as it was started, of which a file tells, perhaps somebody else's: it may not have anything run, and
has nothing fetched that the user has not named, too."""

import re
from pathlib import Path
from typing import Any

from pmvit.cli.common import pairs
from pmvit.config import FinetuneConfig
from pmvit.errors import PmvitError

CONFIRMED = ("model", "data", "val", "teacher", "model_arg")  # what may be given beside --resume, as it was
OPTIONS = {"model": "", "model_arg": "--model-arg "} | {name: f"--{name} " for name in ("data", "val", "teacher")}
# A path, perhaps with a drive; and what is fetched when it is opened: any other scheme runs a command.
LOCAL = re.compile(r"([A-Za-z]:[\\/])?[^:]*")
FETCHED = re.compile(r"(hf|hf-stream):[^:]+|https?://[^:/]+(:\d+)?(/[^:]*)?")
MADE_HERE = re.compile(r"(torchvision|segmenter):[^:]+")


def resumed(folder: Path, given: dict[str, Any]) -> tuple[dict[str, Any], FinetuneConfig]:
    """How the run in a folder was started.

    Args:
        folder: That of the run.
        given: What the user says of `CONFIRMED`, as the command would be written down; `None` where nothing.

    Raises:
        PmvitError: If the user says something else, or the file names what it may not.
    """
    from pmvit.training.record import RunRecord

    record = RunRecord.read(folder)
    if not record.command:
        raise PmvitError(f"the run in {folder} was started from Python: resume it there, with resume=True")
    for name in CONFIRMED:
        there, here = record.command.get(name), given.get(name)
        there, here = (list(value) if isinstance(value, tuple) else value for value in (there, here))
        if here not in (None, there):
            raise PmvitError(f"{name}: the run in {folder} was started with {there}, not {here}: resume it as it was")
        if there and _reaches_out(folder, name, there) and here is None:
            again = " ".join(f"{OPTIONS[name]}{one!r}" for one in (there if isinstance(there, list) else [there]))
            raise PmvitError(
                f"{folder}: its {name} is not on this machine: {there}. If it may be fetched, say so: pmvit finetune "
                f"{again} --resume {folder}"
            )
    return record.command, record.config


def _reaches_out(folder: Path, name: str, value: Any) -> bool:
    """Whether opening what a file names would fetch anything; `PmvitError` if it would run a command."""
    if name == "model_arg":
        from pmvit.loading import FROM_FILES

        return bool(set(pairs("--model-arg", value)) - FROM_FILES)
    if LOCAL.fullmatch(str(value)):
        return False  # a path, or the name of an architecture
    if name in ("model", "teacher"):
        return not MADE_HERE.fullmatch(str(value))
    if not FETCHED.fullmatch(str(value)):
        raise PmvitError(
            f"{folder}: its {name} is a command to run ({value}), which a file may not name: resume it from Python, "
            "with resume=True"
        )
    return True
