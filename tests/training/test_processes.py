"""Several processes on gloo do what one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pmvit
from pmvit.tensors import read_tensors
from pmvit.training.metrics import read_metrics
from tests.helpers import make_pictures, small_plan, small_vit

OPTIONS = ["--epochs", "3", "--batch-size", "8", "--lr", "1e-3", "--freeze-matrices-after", "1", "--ema", "0.9"]
OPTIONS += ["--workers", "1", "--device", "cpu", "--checkpoint-every", "5"]


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
# What `accelerate launch` runs; as a module it starts where torchvision does not fit PyTorch, too.
ACCELERATE = ["accelerate.commands.launch", "--cpu", "--num_machines", "1", "--mixed_precision", "no"]
ACCELERATE += ["--dynamo_backend", "no", "--main_process_port", "0", "--num_processes"]


def launched(processes: int, *arguments: object, launcher: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *launcher, str(processes), "-m", "pmvit", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("start")
    model = small_vit()
    pmvit.save(pmvit.compress(model, small_plan(model)), folder / "small")
    pmvit.save(model, folder / "model")
    return folder, make_pictures(folder / "pictures")


def test_two_processes_tune_as_one_does(start: tuple[Path, Path], tmp_path: Path) -> None:
    folder, pictures = start
    images = ["--data", pictures, "--val", pictures]
    result = launched(2, "finetune", folder / "small", *images, "-o", tmp_path / "two", *OPTIONS, launcher=ACCELERATE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tuned model:") == 1
    one = pmvit.load(folder / "small")
    result_of_one = pmvit.finetune(
        one, train=pictures, val=pictures, output=tmp_path / "one", epochs=3, batch_size=8, lr=1e-3,
        freeze_matrices_after=1, ema=0.9, workers=0, progress=False,
    )  # fmt: skip
    two = pmvit.load(tmp_path / "two" / "last")
    worst = max((one.state_dict()[name] - value).abs().max() for name, value in two.state_dict().items())
    assert worst < 1e-3
    lines = [read_metrics(tmp_path / name) for name in ("one", "two")]
    assert len(lines[0]) == len(lines[1]) == 3 * 8 + 3
    for first, second in zip(*lines, strict=True):
        assert first["step"] == second["step"]
        if "loss" in first:
            assert first["loss"] == pytest.approx(second["loss"], rel=1e-2)
        else:
            assert first["images"] == second["images"] == 64
    assert result_of_one.steps == 24


def test_two_processes_score_and_plan_as_one_does(start: tuple[Path, Path], tmp_path: Path) -> None:
    folder, pictures = start
    arguments = ["--method", "scored", "--data", pictures, "--batch-size", 16, "--workers", 0]
    for processes in (1, 2):
        result = launched(
            processes, "measure", folder / "model", *arguments, "-o", tmp_path / f"{processes}.json", launcher=TORCHRUN
        )
        assert result.returncode == 0, result.stderr
    one, two = (pmvit.Scores.load(tmp_path / f"{processes}.json") for processes in (1, 2))
    assert torch.allclose(one.values, two.values, rtol=1e-4)
    assert (one.images, one.iterations) == (two.images, two.iterations) == (64, 4)
    plans = [pmvit.plan(scores, keep=0.5, prune=0.1) for scores in (one, two)]
    assert [layer.groups for layer in plans[0].layers.values()] == [layer.groups for layer in plans[1].layers.values()]


def test_checkpoints_of_two_processes_are_whole(start: tuple[Path, Path], tmp_path: Path) -> None:
    folder, pictures = start
    options = ["--data", pictures, "-o", tmp_path, *OPTIONS[2:], "--epochs", 1]
    result = launched(2, "finetune", folder / "small", *options, launcher=TORCHRUN)
    assert result.returncode == 0, result.stderr
    (last,) = [path for path in (tmp_path / "checkpoints").iterdir() if "00000008" in path.name]
    prefixes = {name.split("/")[0] for name in read_tensors(last)}
    assert prefixes == {"model", "ema", "optimizer"}
