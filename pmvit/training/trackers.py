"""Where a run is logged beside `metrics.jsonl`: whatever accelerate has a tracker for, or was told of one."""

from dataclasses import asdict

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from pmvit.config import FinetuneConfig
from pmvit.errors import PmvitError
from pmvit.hosts.making import one_line

ALL, PROJECT, FOLDER = "all", "pmvit", "trackers"


def tracker_names(log_with: str | None) -> list[str]:
    """The trackers that are asked for, each once; `all` stands for those that are installed or were registered.

    Raises:
        PmvitError: If one is not known, or its package is not installed: accelerate would log nothing. Asked before the
            work begins, of which measuring may be hours.
    """
    if log_with is None:
        return []
    known, there = LoggerType.list(), [str(tracker) for tracker in get_available_trackers()]
    there += [name for name in LOGGER_TYPE_TO_CLASS if name not in known]  # of users
    asked = [name.strip() for name in log_with.split(",")]
    for name in asked:
        if name in there or (name == ALL and there):
            continue
        if name not in known:
            raise PmvitError(f"log_with: expected one of {', '.join(dict.fromkeys([*known, *there]))}; got {name!r}")
        package = {"tensorboard": "'pmvit[tensorboard]'", ALL: "one of accelerate's trackers"}.get(name, name)
        raise PmvitError(f"log_with: {name} is not installed: pip install {package}")
    return list(dict.fromkeys(there if ALL in asked else asked))


def start_trackers(accelerator: Accelerator, config: FinetuneConfig) -> None:
    """Begin to log a run, with the settings that it has; trackers know numbers, texts and yes or no."""
    if not accelerator.log_with:
        return
    settings = {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in asdict(config).items()
        if value is not None
    }
    with one_line(f"log_with: expected {config.log_with} to start", ": is it set up, and are you logged in to it?"):
        accelerator.init_trackers(PROJECT, config=settings)
