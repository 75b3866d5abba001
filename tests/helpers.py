"""What several tests start from: a small model, plans for it, a folder of pictures, the command line."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor, nn

import pmvit
from pmvit import methods
from pmvit.cli import main
from pmvit.data.demo import demo_images
from pmvit.planning import Plan
from pmvit.tensors import read_tensors
from pmvit.training.record import Checkpoints, select

import timm  # isort: skip  # after pmvit, which lets torchvision import

Batches = list[tuple[Tensor, Tensor]]
QUIET: dict[str, Any] = {"progress": False, "workers": 0, "checkpoint_every": 1, "keep_checkpoints": 100}


def small_plan(model: nn.Module, keep: float = 0.5, **options: Any) -> Plan:
    scores = pmvit.measure(model, [], method="scored", scorer="random")
    made: Plan = pmvit.plan(scores, keep=keep, prune=0.1, **options)
    return made


def compressed(**options: Any) -> nn.Module:
    model = small_vit()
    learn = options.pop("learn", "group")
    return pmvit.compress(model, small_plan(model, **options), learn=learn)


def make_pictures(folder: Path, count: int = 64) -> Path:
    images, _ = demo_images("train", count)
    for number, image in enumerate(images):
        label = number % 7
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        colours = torch.stack([image, image.roll(label, 0), 255 - image], dim=-1)
        picture = Image.fromarray(colours.numpy()).resize((110, 96))
        picture.save(folder / str(label) / f"{number}.png")
    return folder


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def small_vit(name: str = "vit_tiny_patch16_224", **arguments: Any) -> nn.Module:
    """A ViT of three narrow blocks on 6 x 6 patches, random weights, none of them zero."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"img_size": 96, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}
    model: nn.Module = timm.create_model(name, **{**defaults, **arguments})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def method_at(name: str, strength: float, model: Any) -> methods.Method:
    """A method at a strength, which has seen noise if it has to see images."""
    kind = methods.METHODS[name]
    noise = [torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(2))]
    method = kind.at(strength, model)
    return method.fit(model, noise) if kind.needs_images else method


def tome(model: nn.Module, r: int | tuple[int, ...], **options: Any) -> Any:
    """A copy of a model that merges r tokens a block."""
    return pmvit.compress(model, methods.Tome(r, **options))


def states(output: Path) -> dict[int, dict[str, Tensor]]:
    """The model's tensors after every step."""
    checkpoints = Checkpoints(output / "checkpoints", 100)
    return {step: select(read_tensors(checkpoints.path(step)), "model/") for step in checkpoints.steps()}


SCREEN = {"COLUMNS": "120", "NO_COLOR": "1"}


def pmvit_command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`pmvit` as a process of its own, which takes seconds to start."""
    command = [sys.executable, "-m", "pmvit", *map(str, arguments)]
    environment = {**os.environ, **SCREEN}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


def pmvit_here(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`pmvit` in this process: the same entry point, streams and exit codes, without the seconds."""
    words = ["pmvit", *map(str, arguments)]
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    code: Any = 0
    with patch.object(sys, "argv", words), patch.dict(os.environ, SCREEN), redirect_stdout(out), redirect_stderr(err):
        try:
            os.chdir(cwd or before)
            main()
        except SystemExit as ending:
            code = ending.code or 0
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
