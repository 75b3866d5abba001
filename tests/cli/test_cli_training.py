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
from pmvit.locks import FILE
from pmvit.saving.commands import read_commands
from pmvit.tensors import read_tensors
from pmvit.tradeoff import search
from tests.cli.test_cli import listen_to_interrupts
from tests.helpers import make_pictures, pmvit_command, pmvit_here, same, small_plan, small_vit
from tests.test_locks import held_elsewhere

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
    assert (tmp_path / "out" / "metric.safetensors").exists()
    measured = (tmp_path / "out" / "metric.safetensors").stat().st_mtime_ns
    done = pmvit_here(*command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "metric.safetensors").stat().st_mtime_ns == measured
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


def test_a_run_for_a_speed_goes_on(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AT_A_TIME", "TIMES"):
        monkeypatch.setattr(search, name, 1)
    command = ["run", start / "model", "--data", start / "data", "-o", tmp_path / "out", *OPTIONS, "--epochs", 1]
    command += ["--epoch-images", 8, "--workers", 0, "--method", "scored", "--scorer", "random"]
    fast = ["--speedup", 0.2, "--rounds", 3]
    for _ in range(2):
        done = pmvit_here(*command, *fast)
        assert done.returncode == 0, done.stderr
    for words, name in (((*fast, "--batch", 2), "speed"), (("--keep", 0.5), "plan")):
        other = pmvit_here(*command, *words)
        assert f"holds a run with another {name}" in other.stderr


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


def test_compress_does_not_overwrite_what_was_trained(start: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress = ("compress", start / "model", "--method", "tome", "--r", "4", "-o", out)
    for _ in range(2):  # what compress wrote, it writes again
        assert pmvit_here(*compress).returncode == 0
    tuned = pmvit_here("finetune", start / "small", "--data", start / "data", "-o", out, *OPTIONS)
    assert tuned.returncode == 0, tuned.stderr
    before = read_tensors(out / "model.safetensors")
    refused = pmvit_here(*compress)
    assert refused.returncode == 1
    assert "holds a trained model and its run: choose another folder, or --force" in " ".join(refused.stderr.split())
    assert same(read_tensors(out / "model.safetensors"), before)
    assert pmvit_here(*compress, "--force").returncode == 0
    assert not same(read_tensors(out / "model.safetensors"), before)
    assert not {"finetune.json", "checkpoints", "metrics.jsonl", "curves.png", "last"} & {p.name for p in out.iterdir()}


def test_compress_waits_for_nobody(start: Path, tmp_path: Path) -> None:
    """Another process writes to the folder: one line says so."""
    with held_elsewhere(tmp_path) as other:
        result = pmvit_here("compress", start / "model", "--method", "tome", "--r", "4", "-o", tmp_path)
        assert result.returncode == 1
        assert f"another process ({other.pid}) is writing to" in " ".join(result.stderr.split())
        assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_warning_is_one_line(start: Path, tmp_path: Path) -> None:
    other = small_vit(num_classes=5)
    small_plan(other).save(tmp_path / "plan.json")
    result = pmvit_here("compress", start / "model", "--plan", tmp_path / "plan.json", "-o", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "the plan was measured on weights" in result.stdout
    assert "Warning" not in result.stdout + result.stderr


def test_every_command_that_saves_a_model_is_on_record(start: Path, tmp_path: Path) -> None:
    """In every folder that it saves one to, after the commands before it, and before it has come to its end."""
    data, few = ["--data", start / "data"], ["--epochs", 1, "--batch-size", 16, "--workers", 0]
    plan = start / "small" / "plan.json"
    verbs = {
        "small": ["compress", start / "model", "--plan", plan],
        "biases": ["calibrate", tmp_path / "small", "--data", start / "data/val", "--biases-only"],
        "calibrated": ["calibrate", tmp_path / "small", "--data", start / "data/train", *few],
        "tuned": ["finetune", tmp_path / "calibrated", *data, *few],
        "run": ["run", start / "model", *data, *few, "--method", "scored", "--scorer", "random", "--keep", 0.5],
    }
    for name, words in verbs.items():
        made = pmvit_here(*words, "-o", tmp_path / name)
        assert made.returncode == 0, made.stderr
    made_by = {
        "small": ["compress"],
        "biases": ["compress", "calibrate"],
        "calibrated": ["compress", "calibrate"],
        "calibrated/last": ["compress", "calibrate"],
        "tuned": ["compress", "calibrate", "finetune"],
        "tuned/last": ["compress", "calibrate", "finetune"],
        "run": ["run"],
        "run/compressed": ["run"],
    }
    for name, expected in made_by.items():
        assert [one["command"].split()[1] for one in read_commands(tmp_path / name)] == expected, name
    for name, tuned in (("biases", ["calibrated"]), ("tuned", ["calibrated", "fine-tuned"])):
        assert json.loads((tmp_path / name / "config.json").read_text())["compression"]["tuned"] == tuned
    code, _ = stop_after(
        1, signal.SIGKILL, tmp_path / "cut", "finetune", tmp_path / "small", *data, *OPTIONS, "-o", tmp_path / "cut"
    )
    assert code == -signal.SIGKILL
    assert [one["command"].split()[1] for one in read_commands(tmp_path / "cut")] == ["compress", "finetune"]


def test_a_tracker_that_is_not_there_is_said_before_anything_is_measured(start: Path, tmp_path: Path) -> None:
    words = ["run", start / "model", "--data", start / "data", "--keep", 0.5, "--log-with", "aim", "-o", tmp_path / "x"]
    refused = pmvit_here(*words)
    assert refused.returncode == 1
    assert refused.stderr == "pmvit: log_with: aim is not installed: pip install aim\n"
    assert not (tmp_path / "x").exists()


def test_an_uncompressed_model_is_evaluated_by_its_name(start: Path, tmp_path: Path) -> None:
    weights = start / "model" / "model.safetensors"
    sizes = ["img_size=96", "embed_dim=48", "depth=3", "num_heads=3"]
    arguments = [word for size in sizes for word in ("--model-arg", size)]
    words = ["--data", start / "data" / "val", "--workers", 0, "--json"]
    named = pmvit_here("evaluate", "vit_tiny_patch16_224", "--weights", weights, *arguments, *words)
    assert named.returncode == 0, named.stderr
    saved = pmvit_here("evaluate", start / "model", *words)
    assert json.loads(named.stdout) == json.loads(saved.stdout)
    assert json.loads(named.stdout)["images"] == 21
