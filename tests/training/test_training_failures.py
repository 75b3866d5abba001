"""Fine-tuning that goes wrong, its checkpoints, and what it says."""

import json
import math
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pmvit
from pmvit.training.record import Checkpoints, join_tensors, split_tensors
from tests.helpers import QUIET, Batches, compressed, same, small_vit, states


def test_divergence_names_step_images_and_checkpoint(pictures: Path, tmp_path: Path) -> None:
    model = compressed()
    options: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 1e30, "clip": 0.0, "output": tmp_path / "out"}
    with pytest.raises(pmvit.PmvitError, match=r"diverged at step 2 \(epoch 1\)") as error:
        pmvit.finetune(model, train=pictures, **QUIET, **options)
    message = str(error.value)
    assert message.count(".png") == 8
    assert "and 8 more" in message
    assert "step-00000001.safetensors" in message
    assert "Lower lr" in message


def test_a_broken_batch_never_reaches_the_weights(small_batches: Batches, tmp_path: Path) -> None:
    images, labels = small_batches[1]
    poisoned = [small_batches[0], (images * math.nan, labels), small_batches[2]]
    with pytest.raises(pmvit.PmvitError, match=r"step 2 .* on batch 1 of epoch 1; the last checkpoint, "):
        pmvit.finetune(compressed(), train=poisoned, epochs=1, output=tmp_path, **QUIET)
    (state,) = states(tmp_path).values()
    assert all(torch.isfinite(value).all() for value in state.values())


class _Filling:
    """Batches of two epochs; before the second one, files may not grow any more."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        if self.epochs == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        return iter(self.batches)


def test_a_full_disk_leaves_the_checkpoint_before(small_batches: Batches, tmp_path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    options = {**QUIET, "checkpoint_every": 100}
    try:
        with pytest.raises(pmvit.PmvitError, match=r"checkpoint of step 6 .*/step-00000003.safetensors, is whole"):
            pmvit.finetune(compressed(), train=_Filling(small_batches), epochs=3, output=tmp_path, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003.safetensors"]
    resumed, alone = compressed(), compressed()
    pmvit.finetune(resumed, train=small_batches, epochs=3, output=tmp_path, resume=True, **options)
    pmvit.finetune(alone, train=small_batches, epochs=3, progress=False)
    assert same(resumed.state_dict(), alone.state_dict())


def test_a_run_is_only_resumed_as_itself(small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": small_batches, "output": tmp_path, "epochs": 1, **QUIET}
    first = pmvit.finetune(compressed(), **options)
    with pytest.raises(pmvit.PmvitError, match="holds a fine-tuning run already"):
        pmvit.finetune(compressed(), **options)
    with pytest.raises(pmvit.PmvitError, match=r"lr = 0.0001, not 0.5"):
        pmvit.finetune(compressed(), **options, resume=True, lr=0.5)
    with pytest.raises(pmvit.PmvitError, match="another plan"):
        pmvit.finetune(compressed(keep=0.4), **options, resume=True)
    with pytest.raises(pmvit.PmvitError, match="another teacher"):
        pmvit.finetune(compressed(), teacher=small_vit(depth=4), **options, resume=True)
    again = compressed()
    assert pmvit.finetune(again, **options, resume=True) == first  # it had come to its end
    assert same(again.state_dict(), pmvit.load(tmp_path / "last").state_dict())


def test_wrong_input_is_said_before_anything_is_written(pictures: Path, small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {"output": tmp_path / "out", "progress": False}
    for wrong, message in (
        ({"batch_size": 65}, "expected at least 65 images"),
        ({"batch_size": 16, "teacher": small_vit(num_classes=5)}, "teacher with outputs of shape"),
        ({"token_alpha": 1.0, "token_blocks": (9,), "batch_size": 16}, r"blocks of 0 \.\.\. 2, got 9"),
        ({"train": iter(small_batches)}, "loader with a length"),
        ({"train": small_batches, "accumulate": 4, "batch_size": 4}, "expected 4 batches or more"),
        ({"log_with": "nothing", "batch_size": 16}, "log_with: expected one of all, .*wandb.*; got 'nothing'"),
        ({"log_with": "aim", "batch_size": 16}, "log_with: aim is not installed: pip install aim"),
    ):
        with pytest.raises(pmvit.PmvitError, match=message):
            pmvit.finetune(compressed(), **{"train": pictures, **options, **wrong})
        assert not list(tmp_path.rglob("*.safetensors"))


class Ends:
    """Validation images that are there for one epoch, and then fail."""

    def __init__(self, batches: Batches) -> None:
        self.batches: list[Batches] = [batches]

    def __iter__(self) -> Iterator[Any]:
        if not self.batches:
            raise FileNotFoundError("no more")
        return iter(self.batches.pop())


@pytest.mark.parametrize("optimizer", ["lamb", "adafactorbv", "sgd", "lookahead_adamw"])
def test_any_optimizer_of_timm_is_resumed(optimizer: str, small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train": small_batches, "epochs": 2, "lr": 1e-3, "optimizer": optimizer}
    stopped, resumed, alone = compressed(), compressed(), compressed()
    with pytest.raises(FileNotFoundError):
        pmvit.finetune(stopped, val=Ends(small_batches), output=tmp_path, **QUIET, **options)
    assert Checkpoints(tmp_path / "checkpoints", 1).steps() == [1, 2, 3, 4, 5]
    (tmp_path / "checkpoints" / "step-00000005.safetensors").write_bytes(b"damaged")
    pmvit.finetune(resumed, output=tmp_path, resume=True, **QUIET, **options)
    pmvit.finetune(alone, progress=False, **options)
    assert same(resumed.state_dict(), alone.state_dict())


def test_any_nested_state_survives() -> None:
    state: dict[str, Any] = {
        "state": {0: {"Q": [torch.ones(2), torch.zeros(1)], "step": 3, "dtype": torch.bfloat16, "none": None}},
        "param_groups": [{"step": torch.tensor(2.0), "betas": (0.9, 0.99), "name": "x", "on": True}],
    }
    tensors: dict[str, Tensor] = {}
    data = json.loads(json.dumps(split_tensors(state, tensors)))
    assert len(tensors) == 3
    again = join_tensors(data, tensors)
    assert again["state"][0]["dtype"] is torch.bfloat16
    assert again["param_groups"][0]["betas"] == (0.9, 0.99)
    assert all(torch.equal(a, b) for a, b in zip(again["state"][0]["Q"], state["state"][0]["Q"], strict=True))
    assert again["param_groups"][0]["step"] == 2
    with pytest.raises(pmvit.PmvitError, match="keeps a set"):
        split_tensors({"a": {1, 2}}, {})


def test_a_run_is_not_resumed_with_other_steps(small_batches: Batches, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "output": tmp_path, **QUIET}
    with pytest.raises(FileNotFoundError):
        pmvit.finetune(compressed(), train=small_batches, val=Ends(small_batches), **options)
    with pytest.raises(pmvit.PmvitError, match="had 3 steps per epoch, and would now have 2"):
        pmvit.finetune(compressed(), train=small_batches[:2], resume=True, **options)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda images, labels: (images, labels - 9), {}, "got -"),
        (lambda images, labels: (images, labels + 9), {"mixup": 0.5}, "expected labels below 7"),
        (lambda images, labels: (images[:3], labels[:3]), {"cutmix": 0.5}, "got 3, an odd number"),
    ],
)
def test_batches_that_do_not_fit(
    change: Callable[..., Any], options: dict[str, Any], message: str, small_batches: Batches
) -> None:
    with pytest.raises(pmvit.PmvitError, match=message):
        pmvit.finetune(compressed(), train=[change(*batch) for batch in small_batches], progress=False, **options)


def test_checkpoints_round_trip_and_only_the_last_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    shared = torch.arange(4.0)
    for step in (5, 10, 100):
        checkpoints.write(step, {"a": shared, "b": shared, "c": shared[:2]}, {"step": step, "x": None})
    assert checkpoints.steps() == [10, 100]
    tensors, state = checkpoints.read(tmp_path / "step-00000100.safetensors")
    assert state == {"step": 100, "x": None}
    assert torch.equal(tensors["b"], shared)
    assert torch.equal(tensors["c"], shared[:2])
    broken = tmp_path / "step-00000200.safetensors"
    broken.write_bytes((tmp_path / "step-00000100.safetensors").read_bytes()[:-8])
    with pytest.raises(pmvit.PmvitError, match="whole safetensors file"):
        checkpoints.read(broken)
