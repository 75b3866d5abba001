"""Runs that are killed and resumed until they end, for `test_resume`; prints what came of them as JSON.

    python -m tests.training.killed_runs FOLDER

All is imported once; each run is a forked process of its own, which is killed at a random moment.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import pmvit
from pmvit.tensors import read_tensors
from pmvit.training.signals import StoppedError
from tests.helpers import make_pictures, small_plan, small_vit

KILLS = 3
OPTIONS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 8,
    "accumulate": 2,
    "lr": 1e-3,
    "ema": 0.9,
    "mixup": 0.4,
    "cutmix": 0.4,
    "label_smoothing": 0.1,
    "auto_augment": "rand-m5-inc1",
    "random_erasing": 0.3,
    "token_alpha": 0.5,
    "freeze_matrices_after": 1,
    "checkpoint_every": 3,
    "progress": False,
}
STOPPED = 3  # exit code of a run that wrote its checkpoint and went


def tune(pictures: Path, output: Path, workers: int) -> None:
    """What a user's script does: make the model, tune it, resume if there is something to resume."""
    torch.set_num_threads(2)
    model = small_vit(drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.1)
    small = pmvit.compress(model, small_plan(model))
    pmvit.finetune(
        small, teacher=model, train=pictures, val=pictures, output=output, resume=True, workers=workers, **OPTIONS
    )


def start(pictures: Path, output: Path, workers: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        tune(pictures, output, workers)
        code = 0
    except StoppedError:
        code = STOPPED
    finally:
        os._exit(code)


def steps(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_text().count("gradient_norm") if path.exists() else 0


def wait_until(child: int, output: Path, step: int, extra: float) -> bool:
    """Wait until the run is past a step and a little longer; whether it is still running then."""
    while steps(output) < step:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    time.sleep(extra)
    return True


def interrupted_run(pictures: Path, output: Path, seed: int, number: int) -> dict[str, Any]:
    """Start a run again and again, each time with another number of workers, and stop it `KILLS` times on its way."""
    chance = random.Random(seed)  # noqa: S311
    marks = sorted(chance.sample(range(1, 10), KILLS))  # of 16 steps: a late signal still finds the run at work
    codes = []
    for attempt, mark in enumerate(marks):
        if number != signal.SIGKILL:
            mark = max(mark, steps(output) + 1)  # a run that has not begun its first step has nothing to write yet
        child = start(pictures, output, workers=attempt % 3)
        if not wait_until(child, output, mark, chance.random() * 0.05):
            break
        os.kill(child, number)
        status = os.waitpid(child, 0)[1]
        codes.append(os.waitstatus_to_exitcode(status))
    child = start(pictures, output, workers=1)
    final = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"marks": marks, "codes": codes, "final": final}


def compare(first: Path, second: Path) -> dict[str, bool]:
    """Whether the files of two runs hold the same numbers."""
    result = {}
    for name in ("model.safetensors", "last/model.safetensors", "checkpoints/step-00000016.safetensors"):
        one, other = read_tensors(first / name), read_tensors(second / name)
        result[name] = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    lines = [
        [
            {k: v for k, v in json.loads(line).items() if k != "images_per_second"}
            for line in (run / "metrics.jsonl").open()
        ]
        for run in (first, second)
    ]
    result["metrics.jsonl"] = lines[0] == lines[1]
    return result


def main() -> None:
    torch.set_num_threads(1)  # a process that has started threads of OpenMP must not fork
    folder = Path(sys.argv[1])
    pictures = make_pictures(folder / "pictures")
    child = start(pictures, folder / "whole", workers=0)
    report: dict[str, Any] = {"whole": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}
    for name, number in (("SIGKILL", signal.SIGKILL), ("SIGTERM", signal.SIGTERM), ("SIGINT", signal.SIGINT)):
        for turn in range(2 if name == "SIGKILL" else 1):
            output = folder / f"{name}-{turn}"
            run = interrupted_run(pictures, output, seed=turn, number=number)
            report[f"{name} {turn}"] = {**run, "steps": steps(output)}
    for key, run in report.items():
        if key != "whole":
            run["same"] = compare(folder / "whole", folder / key.replace(" ", "-"))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
