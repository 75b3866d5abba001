"""What `save` costs beside what it cannot do without: writing the tensors and hashing them.

`python -m benchmarks.saving` saves a compressed DeiT-Small (random weights) in turns with writing and hashing alone.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import pmvit
from pmvit.files import write_atomically

import timm  # isort: skip  # after pmvit, which lets torchvision import

ROUNDS = 15


def write_and_hash(model: nn.Module, path: Path) -> None:
    """The tensors in a safe file, and their SHA-256."""
    tensors = model.state_dict()
    write_atomically(path, lambda temporary: save_file(tensors, temporary))
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    digest.hexdigest()


def seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Print seconds and ratios."""
    model = timm.create_model("deit_small_patch16_224").eval()
    small = pmvit.compress(model, pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.6))
    with tempfile.TemporaryDirectory() as folder:
        first = seconds(lambda: pmvit.save(small, Path(folder) / "model"))
        turns = [
            (
                seconds(lambda: pmvit.save(small, Path(folder) / "model")),
                seconds(lambda: write_and_hash(small, Path(folder) / "tensors.safetensors")),
            )
            for _ in range(ROUNDS)
        ]
    saved, needed = (min(times) for times in zip(*turns, strict=True))  # the least disturbed turn, as timeit has it
    print(f"write and hash    {needed:.3f} s")
    print(f"save              {saved:.3f} s, {saved / needed:.2f}x")
    print(f"save, first time  {first:.3f} s, {first / needed:.2f}x: it sees that the model can be built again")


if __name__ == "__main__":
    main()
