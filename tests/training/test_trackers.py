"""Runs are logged to the trackers of accelerate that were named, and to those that a user registered there."""

from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import accelerate
import pytest
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    get_available_trackers,
    register_tracker_class,
)
from accelerate.utils import LoggerType

import pmvit
from pmvit.training.metrics import read_metrics
from pmvit.training.trackers import tracker_names
from tests.helpers import QUIET, Batches, compressed


class KeptHere(GeneralTracker):  # type: ignore[misc]  # accelerate has no types
    """A tracker of a user's own."""

    name, requires_logging_directory = "kept-here", False
    made: ClassVar[list["KeptHere"]] = []

    def __init__(self, project: str, **_: Any) -> None:
        super().__init__()
        self.project, self.is_finished, self.settings = project, False, dict[str, Any]()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.made.append(self)

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


def test_trackers_get_the_numbers(small_batches: Batches, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    KeptHere.made.clear()
    both = "tensorboard, kept-here,tensorboard"
    with patch.dict(LOGGER_TYPE_TO_CLASS):
        register_tracker_class(KeptHere)
        pmvit.finetune(compressed(), train=small_batches, output=tmp_path, epochs=1, lr=1e-3, log_with=both, **QUIET)
    losses = [line["loss"] for line in read_metrics(tmp_path)]
    events = EventAccumulator(str(tmp_path / "trackers" / "pmvit")).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses, rel=1e-5)
    (made,) = KeptHere.made
    assert (made.project, made.is_finished) == ("pmvit", True)
    assert (made.settings["lr"], made.settings["crop_scale"]) == (1e-3, "(0.35, 1.0)")
    assert [(step, values["loss"]) for step, values in made.logged] == list(enumerate(losses, start=1))


def test_all_trackers_are_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "kept-here", KeptHere)
    assert tracker_names("all") == [*map(str, get_available_trackers()), "kept-here"]
    assert tracker_names("kept-here") == ["kept-here"]
    assert tracker_names(None) == []
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    for name in (name for name in LoggerType.list() if name not in ("all", "tensorboard")):
        with pytest.raises(pmvit.PmvitError, match=f"log_with: {name} is not installed: pip install {name}$"):
            tracker_names(f"kept-here,{name}")
    with pytest.raises(pmvit.PmvitError, match=r"pip install 'pmvit\[tensorboard\]'"):
        tracker_names("tensorboard")
    with pytest.raises(pmvit.PmvitError, match=r"expected one of all, .*, trackio, .*, kept-here; got ''"):
        tracker_names("kept-here,")


def test_a_tracker_that_does_not_start_is_said_in_a_line(small_batches: Batches, tmp_path: Path) -> None:
    begins: dict[str, Any] = {"train": small_batches, "output": tmp_path, "epochs": 1, "log_with": "kept-here"}
    fails = patch.object(KeptHere, "start", side_effect=RuntimeError("api_key not configured\nsee ..."))
    said = r"kept-here to start \(api_key not configured\): .* logged in to it\?$"
    with patch.dict(LOGGER_TYPE_TO_CLASS, {"kept-here": KeptHere}), fails, pytest.raises(pmvit.PmvitError, match=said):
        pmvit.finetune(compressed(), **begins, **QUIET)
