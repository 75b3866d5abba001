"""How much of its feature maps a vision transformer keeps, and which blocks are best left alone for them.

    python -m experiments.feature_maps

Maps after blocks 2, 5, 8 and 11, as DPT reads them, of two models with their ImageNet weights. No decoder is trained:
what is measured is the cosine of the maps to the original's, on images that were not scored. Writes `feature_maps.md`.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from pmvit.data.loaders import create_loader
from pmvit.data.sources import open_source
from pmvit.files import write_text
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.numbers.tables import format_number

DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
MODELS = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
READ = (2, 5, 8, 11)
SKIPS: tuple[tuple[int, ...], ...] = ((), (0, 1), (-2, -1), (0, 1, -2, -1))
SHARE = 0.8
BATCH, SCORED, COMPARED = 16, 6, 4  # images a batch, batches
PREAMBLE = f"""# Feature maps after compression

`python -m experiments.feature_maps` made this page. `features_only` models with ImageNet weights, scored by Eq. 9 with
`loss="embedding"` on {BATCH * SCORED} training images, compressed to {SHARE:.0%} of the original's FLOPs with different
blocks left alone, nothing tuned. Each column is the mean cosine of one map to the original's over {BATCH * COMPARED}
validation images.

"""


def batches(model: nn.Module, split: str, count: int) -> Iterator[Tensor]:
    config = host_of(model).data_config()
    loader = create_loader(open_source(DATA / "imagenet" / split), config, batch_size=BATCH, workers=0, shuffle=True)
    return (images for images, _ in islice(loader, count))


def cosines(model: nn.Module, compressed: nn.Module, images: list[Tensor]) -> list[float]:
    """The mean cosine of each map."""
    with torch.inference_mode():
        pairs = [list(zip(compressed(batch), model(batch), strict=True)) for batch in images]
    maps = [[F.cosine_similarity(a.flatten(1), b.flatten(1)) for a, b in batch] for batch in pairs]
    return [float(torch.cat(of_map).mean()) for of_map in zip(*maps, strict=True)]


def main() -> None:
    lines = [f"| model | scores | skip | {' | '.join(f'block {index}' for index in READ)} |", "|---" * 7 + "|"]
    for name in MODELS:
        weights = DATA / "weights" / f"{name}.safetensors"
        model = create_model(name, weights, features_only=True, out_indices=READ)
        images = list(batches(model, "val", COMPARED))
        measured = pmvit.measure(model, batches(model, "train", SCORED), method="scored", loss="embedding")
        drawn = pmvit.measure(model, [], method="scored", scorer="random")
        for how, scores, skips in (("Eq. 9", measured, SKIPS), ("random", drawn, SKIPS[:2])):
            for skip in skips:
                small = pmvit.compress(model, pmvit.plan(scores, flops_share=SHARE, skip=skip))
                found = " | ".join(format_number(value, ".3f") for value in cosines(model, small, images))
                lines.append(f"| {name} | {how} | {', '.join(map(str, skip)) or 'none'} | {found} |")
                print(lines[-1], flush=True)
    write_text(Path(__file__).with_suffix(".md"), PREAMBLE + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
