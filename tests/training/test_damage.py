"""What a damaged folder of a run does to the run that goes on: nothing, and it is said."""

import json
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import pmvit
from pmvit.errors import PmvitWarning
from pmvit.locks import only_writer
from pmvit.training.metrics import read_metrics
from tests.helpers import QUIET, Batches, compressed, same
from tests.training.test_training_failures import Ends

NEWEST, BEFORE = "step-00000005.safetensors", "step-00000004.safetensors"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, small_batches: Batches) -> Path:
    """A run of six steps that was stopped after the fifth."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(FileNotFoundError):
        tune(folder, small_batches, val=Ends(small_batches))
    return folder


@pytest.fixture(scope="module")
def whole(small_batches: Batches) -> dict[str, Tensor]:
    """What the run ends with."""
    model = compressed()
    pmvit.finetune(model, train=small_batches, epochs=2, lr=1e-3, progress=False)
    return model.state_dict()


def tune(folder: Path, batches: Batches, **options: Any) -> dict[str, Tensor]:
    model = compressed()
    pmvit.finetune(model, train=batches, epochs=2, lr=1e-3, output=folder, **QUIET, **options)
    return model.state_dict()


def flip_a_mantissa(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4000] ^= 1
    path.write_bytes(bytes(data))


def change(path: Path, edit: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Edit the tensors and the state of a checkpoint as an older version wrote it, without a checksum."""
    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["pmvit-checkpoint"])
    tensors = load_file(path)
    edit(tensors, document["state"])
    save_file(tensors, path, {"pmvit-checkpoint": json.dumps(document)})


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip_a_mantissa,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "a tensor is missing": lambda path: change(path, lambda tensors, _: tensors.pop("model/head.bias")),
    "a moment is missing": lambda path: change(path, lambda tensors, _: tensors.pop("optimizer/.state.0.exp_avg")),
    "another optimizer": lambda path: change(path, lambda _, state: state.update(optimizer={"dict": []})),
    "a kind of its own": lambda path: change(path, lambda _, state: state.update(optimizer={"dtype": "load"})),
    "another step": lambda path: change(path, lambda _, state: state.update(step=3)),
    "no number": lambda path: change(path, lambda _, state: state.update(steps_per_epoch="3")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_said_and_the_one_before_taken(
    name: str, stopped: Path, whole: dict[str, Tensor], small_batches: Batches, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    DAMAGE[name](tmp_path / "run/checkpoints" / NEWEST)
    with pytest.warns(PmvitWarning, match=f"goes on from the checkpoint before {NEWEST}, which is damaged: "):
        found = tune(tmp_path / "run", small_batches, resume=True)
    assert same(found, whole)


def test_where_no_checkpoint_is_whole_the_run_does_not_go_on(
    stopped: Path, small_batches: Batches, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    for path in (tmp_path / "run/checkpoints").iterdir():
        if path.name in (NEWEST, BEFORE):
            flip_a_mantissa(path)
        else:
            path.unlink()
    with pytest.warns(PmvitWarning), pytest.raises(pmvit.PmvitError, match=f"{BEFORE} is not what was .* start anew"):
        tune(tmp_path / "run", small_batches, resume=True)


@pytest.mark.parametrize("line", [b'{"step": 2, "lo\xff', b"[]", b'{"loss": 1}', b'{"step": "2"}', b"[" * 100_000])
def test_a_damaged_line_of_metrics_does_not_block(
    line: bytes, stopped: Path, whole: dict[str, Tensor], small_batches: Batches, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    path = tmp_path / "run/metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:1], line, *lines[2:]]) + b'\n{"cut sh')
    with pytest.warns(PmvitWarning, match=r"metrics\.jsonl, line 2.* the line is left out"):
        found = tune(tmp_path / "run", small_batches, resume=True)
    assert same(found, whole)
    kept = [each["step"] for each in read_metrics(tmp_path / "run") if "kind" not in each]
    assert kept == [1, 3, 4, 5, 6]


def test_undamaged_runs_give_no_warning(
    stopped: Path, whole: dict[str, Tensor], small_batches: Batches, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PmvitWarning)
        assert same(tune(tmp_path / "run", small_batches, resume=True), whole)


@pytest.mark.parametrize(
    ("changes", "edited", "message"),
    [
        ({"teacher": None}, False, "is not what was written"),
        ({"teacher": 7}, True, "teacher: expected a text, got 7"),
        ({"config": {"epochs": "2"}}, True, "config: epochs: expected a whole number, got '2'"),
        ({"command": []}, True, "command: expected an object"),
    ],
)
def test_a_damaged_record_of_a_run_is_refused(
    changes: dict[str, Any], edited: bool, message: str, stopped: Path, small_batches: Batches, tmp_path: Path
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    path = tmp_path / "run/finetune.json"
    document = {**json.loads(path.read_text()), **changes}
    if edited:
        del document["sha256"]
    path.write_text(json.dumps(document))
    with pytest.raises(pmvit.PmvitError, match=message):
        tune(tmp_path / "run", small_batches, resume=True)


def test_two_runs_do_not_write_to_one_folder(small_batches: Batches, tmp_path: Path) -> None:
    class Second:
        """Validation images; looking at them, somebody begins a second run."""

        def __iter__(self) -> Any:
            thread = threading.Thread(target=self.begin)
            thread.start()
            thread.join()
            return iter(small_batches)

        def begin(self) -> None:
            for write in (lambda: tune(tmp_path, small_batches), lambda: pmvit.save(compressed(), tmp_path)):
                with pytest.raises(pmvit.PmvitError, match="is writing to"):
                    write()
                refused.append(True)

    refused: list[bool] = []
    tune(tmp_path, small_batches, val=Second())
    assert refused == [True] * 4
    with only_writer(tmp_path):
        pass
