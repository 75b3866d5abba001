"""Train the demo's ViT on Fashion-MNIST and pack it, with a subset of the images, into the package.

    python scripts/train_demo.py --epochs 6 -o pmvit/data/demo

Reads the four `*-ubyte.gz` files of Fashion-MNIST (MIT licence; Debian: `apt-get install dataset-fashion-mnist`).
Training can be stopped at any time: started again with the same `--checkpoint`, it goes on from the last whole epoch.
Half of the patches are dropped at random in every epoch but the last, which halves the time of those epochs.
Takes about an hour on two cores.
"""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pmvit.data.demo import MEAN, STD, create_demo_model  # before timm: it lets torchvision import

from timm.layers import PatchDropout  # isort: skip


def read_idx(path: Path) -> Tensor:
    """Read one file of the MNIST format: four bytes of magic, the shape, then unsigned bytes."""
    raw = gzip.decompress(path.read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">u4", count=dimensions, offset=4).astype(int)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy())


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror half of the images and shift each by up to two pixels."""
    batch = images.shape[0]
    mirrored = torch.rand(batch, generator=generator) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    padded = F.pad(images, (2, 2, 2, 2))
    shift = torch.randint(0, 5, (2, batch, 1), generator=generator)
    rows = shift[0] + torch.arange(28)
    columns = shift[1] + torch.arange(28)
    return padded[torch.arange(batch)[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None]


def normalise(images: Tensor) -> Tensor:
    return (images.float().div(255) - MEAN) / STD


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    predictions = [model(normalise(batch[:, None])).argmax(1) for batch in images.split(250)]
    return (torch.cat(predictions) == labels).float().mean().item()


def train(source: Path, checkpoint: Path, epochs: int, batch_size: int) -> nn.Module:
    images = read_idx(source / "train-images-idx3-ubyte.gz")
    labels = read_idx(source / "train-labels-idx1-ubyte.gz").long()
    torch.manual_seed(0)
    model = create_demo_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    steps_per_epoch = len(images) // batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-3, total_steps=epochs * steps_per_epoch, pct_start=0.1
    )
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"]
    for epoch in range(first, epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(images), generator=generator)
        model.train()
        model.patch_drop = PatchDropout(0.5) if epoch < epochs - 1 else nn.Identity()
        for step in track(range(steps_per_epoch), f"epoch {epoch + 1}/{epochs}"):
            chosen = order[step * batch_size : (step + 1) * batch_size]
            batch = augment(normalise(images[chosen][:, None]), generator)
            loss = F.cross_entropy(model(batch), labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").rename(checkpoint)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    return model


def pack(model: nn.Module, source: Path, output: Path, train_images: int, test_images: int) -> None:
    """Write the weights as float16 and the first images of each half, and print the accuracy of what was written."""
    output.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.half().contiguous() for name, value in model.state_dict().items()}, output / "vit.safetensors"
    )
    arrays = {}
    for half, prefix, count in (("train", "train", train_images), ("test", "t10k", test_images)):
        arrays[f"{half}_images"] = read_idx(source / f"{prefix}-images-idx3-ubyte.gz")[:count].contiguous()
        arrays[f"{half}_labels"] = read_idx(source / f"{prefix}-labels-idx1-ubyte.gz")[:count].contiguous()
    save_file(arrays, output / "images.safetensors")
    packed = create_demo_model()
    packed.load_state_dict({k: v.float() for k, v in load_file(output / "vit.safetensors").items()})
    test = read_idx(source / "t10k-images-idx3-ubyte.gz")
    test_labels = read_idx(source / "t10k-labels-idx1-ubyte.gz").long()
    print(json.dumps({"top1_10000_test_images": accuracy(packed, test, test_labels)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--checkpoint", type=Path, default=Path("demo-training.pt"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--train-images", type=int, default=1000)
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    model = train(arguments.source, arguments.checkpoint, arguments.epochs, arguments.batch_size)
    pack(model, arguments.source, arguments.output, arguments.train_images, arguments.test_images)


if __name__ == "__main__":
    main()
