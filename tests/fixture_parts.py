"""What the files in `tests/fixtures` were made of and with.

They were written once, by version 0.1.0, and stay as they are when the code changes: `tests/test_fixtures.py` sees that
they are still read. A new format gets new files beside them. Everything is small: blocks of width 8 on 6 x 6 patches of
4 x 4 pixels. Paths in the files are relative to a folder that holds `saved_original`, `saved_model` and `pictures`
(`write_pictures`).
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from pmvit.planning import Plan

Batches = list[tuple[Tensor, Tensor]]


SIDE, CLASSES, OUTPUTS = 24, 3, 16


FINETUNE: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 6,
    "lr": 1e-3,
    "ema": 0.9,
    "token_alpha": 0.5,
    "token_blocks": (1,),
    "freeze_matrices_after": 1,
    "workers": 0,
    "checkpoint_every": 2,
    "keep_checkpoints": 2,
}


COMMAND: dict[str, Any] = {  # what `pmvit finetune` keeps to resume, with relative paths
    "model": "saved_model",
    "weights": None,
    "model_arg": None,
    "data_arg": None,
    "data": "pictures/train",
    "val": "pictures/val",
    "teacher": None,
    "epoch_images": None,
    "segmenter": {},
    "first_label": None,
}


TUNING = ("--epochs", "1", "--batch-size", "6", "--lr", "1e-3", "--workers", "0", "--keep-checkpoints", "1")


RUN = ("run", "saved_original", "--data", "pictures", "-o", "run", "--keep", "0.6", *TUNING)


def write_pictures(folder: Path) -> Path:
    """The images of the runs: 24 to train on and 6 to validate on, of three classes, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 24), ("val", 6)):
        for number in range(count):
            label = number % CLASSES
            pixels = torch.randint(0, 128, (SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
            pixels[..., label] += 100
            place = folder / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(place / f"{number:02d}.png")
    return folder


def batches() -> Batches:
    """What is scored and priced: three batches of noise with labels."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, SIDE, SIDE, generator=generator), torch.randint(CLASSES, (4,), generator=generator))
        for _ in range(3)
    ]


def image_for(model: nn.Module) -> Tensor:
    """The image whose output is kept."""
    return torch.randn(1, *host_of(model).input_size(), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def outputs_of(model: nn.Module) -> list[float]:
    """Some numbers of what a model, in float32, makes of its image."""
    output = predict(model.float().eval(), image_for(model)).flatten()
    return [float(value) for value in output[:: max(1, len(output) // OUTPUTS)][:OUTPUTS]]


def tensors_of(model: nn.Module) -> dict[str, list[Any]]:
    """Type, shape and SHA-256 of the bytes of every tensor."""
    return {
        name: [str(value.dtype).removeprefix("torch."), list(value.shape), _sha256(_bytes(value))]
        for name, value in model.state_dict().items()
    }


def facts_of_plan(plan: Plan) -> dict[str, Any]:
    """What a plan says, whatever it is written as."""
    layers = {str(index): asdict(layer) for index, layer in sorted(plan.layers.items())}
    facts = {name: value for name, value in asdict(plan).items() if name != "layers"}
    facts["layers"] = _sha256(json.dumps(layers, sort_keys=True).encode())
    result: dict[str, Any] = json.loads(json.dumps(facts))
    return result


def _bytes(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def measured_in(run: Path) -> dict[str, list[float]]:
    """The loss of each step, and what validation found after each epoch, of the moving average of the weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("loss", "cross_entropy")
    return {name: [line[name] for line in lines if name in line] for name in names}
