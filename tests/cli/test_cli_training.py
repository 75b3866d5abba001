"""`pmvit finetune` and `pmvit run`, as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pmvit
from pmvit.saving.commands import read_commands
from pmvit.tensors import read_tensors
from tests.cli.test_cli import listen_to_interrupts
from tests.helpers import make_pictures, pmvit_command, pmvit_here, same, small_plan, small_vit

OPTIONS = ["--preset", "quick", "--epochs", "2", "--batch-size", "8", "--lr", "1e-3", "--workers", "1"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, the same compressed, and images in `data/train` and `data/val`."""
    folder = tmp_path_factory.mktemp("start")
    model = small_vit()
    pmvit.save(model, folder / "model")
    pmvit.save(pmvit.compress(model, small_plan(model)), folder / "small")
    make_pictures(folder / "data" / "train")
    make_pictures(folder / "data" / "val", 21)
    return folder


def stop_after(steps: int, number: signal.Signals, output: Path, *arguments: object) -> tuple[int, str]:
    """Start a command, send it a signal once its run has done some steps; its exit code and what it said."""
    command = [sys.executable, "-m", "pmvit", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=listen_to_interrupts
    )
    deadline = time.monotonic() + 120
    metrics = output / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= steps:
            break
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def test_finetune_stops_and_resumes(start: Path, tmp_path: Path) -> None:
    whole = pmvit_here("finetune", start / "small", "--data", start / "data", "-o", tmp_path / "whole", *OPTIONS)
    assert whole.returncode == 0, whole.stderr
    assert "best after epoch" in whole.stdout
    assert "on 21 images" in whole.stdout
    code, said = stop_after(
        3, signal.SIGTERM, tmp_path / "out",
        "finetune", start / "small", "--data", start / "data", "-o", tmp_path / "out", *OPTIONS,
    )  # fmt: skip
    assert code == 143, said
    assert "stopped after step" in said
    assert "Traceback" not in said
    again = pmvit_here("finetune", "--resume", tmp_path / "out", "--workers", 0, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["steps"] == 16
    for name in ("model.safetensors", "last/model.safetensors"):
        assert same(read_tensors(tmp_path / "whole" / name), read_tensors(tmp_path / "out" / name))
    evaluated = pmvit_here("evaluate", tmp_path / "out", "--data", start / "data" / "val", "--json")
    assert json.loads(evaluated.stdout)["top1"] == json.loads(again.stdout)["best"]["top1"]


def test_bfloat16_trains_weights_that_stay_float32(start: Path, tmp_path: Path) -> None:
    command = ["finetune", start / "small", "--data", start / "data", *OPTIONS, "--epochs", 1, "--json"]
    half = pmvit_command(*command, "-o", tmp_path / "half", "--mixed-precision", "bf16")
    assert half.returncode == 0, half.stderr
    lines = [json.loads(line) for line in (tmp_path / "half" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 8
    assert all(0 < loss < 5 for loss in losses)
    tensors = read_tensors(tmp_path / "half" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.float32}


def test_run_goes_on_at_every_stage(start: Path, tmp_path: Path) -> None:
    command = ["run", start / "model", "--data", start / "data", "--keep", 0.6, "-o", tmp_path / "out", *OPTIONS]
    code, said = stop_after(4, signal.SIGKILL, tmp_path / "out", *command)
    assert code == -signal.SIGKILL, said
    assert (tmp_path / "out" / "merge_costs.json").exists()
    priced = (tmp_path / "out" / "merge_costs.json").stat().st_mtime_ns
    done = pmvit_here(*command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "merge_costs.json").stat().st_mtime_ns == priced
    for word in ("original", "compressed", "tuned", "GFLOPs", "agreement"):
        assert word in done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["tuned"]["gflops"] == results["compressed"]["gflops"] < results["original"]["gflops"]
    assert results["tuned"]["images"] == 21
    whole = pmvit_here(*command[: -len(OPTIONS) - 1], tmp_path / "whole", *OPTIONS)
    assert whole.returncode == 0, whole.stderr
    assert same(read_tensors(tmp_path / "whole/model.safetensors"), read_tensors(tmp_path / "out/model.safetensors"))
    begun = time.monotonic()
    assert json.loads(pmvit_here(*command, "--json").stdout)["evaluations"]["tuned"]["top1"] == results["tuned"]["top1"]
    assert time.monotonic() - begun < 30
    other = pmvit_here(*[0.5 if argument == 0.6 else argument for argument in command])
    assert other.returncode == 1
    assert "holds a run with another plan" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("finetune",), "expected a model, --data and -o; or --resume"),
        (("finetune", "--resume", "nowhere"), "expected a fine-tuning run in nowhere"),
        (
            ("finetune", "{small}", "--data", "{data}", "-o", "y", "--resume", "z"),
            "output: not beside --resume",
        ),
        (("finetune", "{small}", "--data", "{data}", "-o", "y", "--batch-size", "640"), "lower the batch size"),
        (
            ("finetune", "{small}", "--data", "{data}", "-o", "y", "--batch-size", "8", "--optimizer", "adamv"),
            "one of timm's optimizers, got 'adamv'",
        ),
        (("finetune", "{small}", "--data", "{data}", "-o", "{small}"), "overwrite the model it begins with"),
        (("run", "{small}", "--data", "{data}/train", "--keep", "0.5", "-o", "y"), "expected --val"),
    ],
)
def test_mistakes_get_one_line(start: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    filled = [argument.format(small=start / "small", data=start / "data") for argument in arguments]
    result = pmvit_here(*filled, cwd=tmp_path)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "y" / "model.safetensors").exists()


def test_calibrate_goes_on_and_needs_no_labels(start: Path, tmp_path: Path) -> None:
    """Images without classes, eight of sixteen an epoch; the second call finds all done."""
    folder = tmp_path / "images"
    folder.mkdir()
    for path in sorted((start / "data" / "val").rglob("*.png"))[:16]:
        (folder / path.name).write_bytes(path.read_bytes())
    command = ["calibrate", start / "small", "--data", folder, "-o", tmp_path / "out", "--batch-size", 4, "--epochs", 2]
    command += ["--epoch-images", 8, "--workers", 0, "--json"]
    first = pmvit_here(*command)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["steps"] == 4
    assert json.loads(pmvit_here(*command).stdout) == json.loads(first.stdout)
    assert "pmvit calibrate" in read_commands(tmp_path / "out")[-1]["command"]
    assert not same(read_tensors(tmp_path / "out/model.safetensors"), read_tensors(start / "small/model.safetensors"))
    refused = pmvit_here("calibrate", start / "small", "--data", folder, "-o", start / "small")
    assert "would overwrite the one it is made of" in refused.stderr
