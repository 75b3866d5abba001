"""Several processes on gloo do what one does."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

import pmvit
from pmvit.compression import compression_of
from pmvit.data.demo import demo_images, demo_model
from pmvit.measuring import Scores, TokenMetric
from pmvit.tensors import read_tensors
from pmvit.training.metrics import read_metrics
from tests.helpers import make_pictures, small_plan, small_vit

OPTIONS = ["--epochs", "3", "--batch-size", "8", "--lr", "1e-3", "--freeze-matrices-after", "1", "--ema", "0.9"]
OPTIONS += ["--workers", "1", "--device", "cpu", "--checkpoint-every", "5"]


TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node"]
ACCELERATE = ["accelerate-launch", "--cpu", "--num_machines", "1", "--mixed_precision", "no"]
ACCELERATE += ["--dynamo_backend", "no", "--main_process_port", "0", "--num_processes"]
DOCUMENT = Path(__file__).parents[2] / "docs" / "many_machines.md"
SCRIPTS = Path(sys.executable).parent  # where launchers are
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}


def launched(processes: int, *arguments: object, launcher: list[str]) -> subprocess.CompletedProcess[str]:
    command = [*launcher, str(processes), "-m", "pmvit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=120)


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
    one, two = (Scores.load(tmp_path / f"{processes}.json") for processes in (1, 2))
    assert torch.allclose(one.values, two.values, rtol=1e-4)
    assert (one.images, one.iterations) == (two.images, two.iterations) == (64, 4)
    plans = [pmvit.plan(scores, keep=0.5, prune=0.1) for scores in (one, two)]
    assert [layer.groups for layer in plans[0].layers.values()] == [layer.groups for layer in plans[1].layers.values()]


def test_two_processes_measure_a_metric(start: tuple[Path, Path], tmp_path: Path) -> None:
    folder, pictures = start
    arguments = ["--method", "adaptive", "--rank", 8, "--data", pictures, "--batch-size", 16, "--workers", 0]
    output = tmp_path / "metric.safetensors"
    result = launched(2, "measure", folder / "model", *arguments, "-o", output, launcher=TORCHRUN)
    assert result.returncode == 0, result.stderr
    assert TokenMetric.load(output).images == 64


def test_checkpoints_of_two_processes_are_whole(start: tuple[Path, Path], tmp_path: Path) -> None:
    folder, pictures = start
    options = ["--data", pictures, "-o", tmp_path, *OPTIONS[2:], "--epochs", 1]
    result = launched(2, "finetune", folder / "small", *options, launcher=TORCHRUN)
    assert result.returncode == 0, result.stderr
    (last,) = [path for path in (tmp_path / "checkpoints").iterdir() if "00000008" in path.name]
    prefixes = {name.split("/")[0] for name in read_tensors(last)}
    assert prefixes == {"model", "ema", "optimizer"}


def test_the_documented_command_runs_to_the_letter(tmp_path: Path) -> None:
    """Beside a torchvision that was built for another PyTorch, too, as where these tests were written."""
    (command,) = re.findall(r"^\$ (.+)$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    model = demo_model()
    pmvit.save(pmvit.compress(model, small_plan(model)), tmp_path / "out")
    for half in ("train", "test"):
        for number, (image, label) in enumerate(zip(*demo_images(half, 100), strict=True)):
            folder = tmp_path / "fashion" / half / str(int(label))
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.numpy()).save(folder / f"{number}.png")
    words = shlex.split(command)
    assert words[0] == "accelerate-launch"
    assert words[words.index("--num_processes") + 1] == "2"
    result = subprocess.run(
        words, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=180, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"best after epoch 1 of 1: top-1 .* on 100 images\ntuned model: two$", result.stdout.strip())
    made = compression_of(pmvit.load(tmp_path / "two"))
    assert made is not None
    assert made.tuned == ("fine-tuned",)


def test_a_process_that_dies_is_named(start: tuple[Path, Path], tmp_path: Path) -> None:
    folder, pictures = start
    options = ["--data", pictures, "-o", tmp_path / "out", *OPTIONS[2:], "--epochs", 500]
    command = [*TORCHRUN, "2", "-m", "pmvit", "finetune", folder / "small", *options]
    launcher = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    checkpoints, deadline = tmp_path / "out" / "checkpoints", time.monotonic() + 120
    while not (checkpoints.is_dir() and any(checkpoints.glob("step-*.safetensors"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    (victim,) = [child for child in psutil.Process(launcher.pid).children() if child.environ().get("RANK") == "1"]
    victim.kill()
    said = launcher.communicate(timeout=90)[1]
    assert launcher.returncode != 0
    (told,) = [line for line in said.splitlines() if line.startswith("pmvit: ")]
    assert told.startswith("pmvit: rank 1 of 2 ended before the work was done")
    last = max(checkpoints.glob("step-*.safetensors"))
    assert f"{last}, is whole" in told
    assert f"--resume {tmp_path / 'out'}" in told
    assert "gloo" not in told
