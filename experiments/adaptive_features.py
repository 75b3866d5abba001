"""What adaptive plans keep of embeddings and of all tokens, beside ToMe and fixed plans, at equal FLOPs, nothing tuned.

    python -m experiments.adaptive_features [--images 500]

Embeddings are those of a DINOv2-like ViT-S/14 on Oxford Pets: their cosine to the original's, and whether the nearest
of the other images is the same one. All tokens are the patch tokens behind the last norm of two tiny models, on
`imagenet/val`: the squared distance to the original's as a share of their squared length. Everything is measured for
what is read: the embedding, or all tokens. Tokens of a group come back as copies of it with ToMe; adaptive plans are
measured both ways. Rows go to `adaptive_features.json`, tables to `adaptive_features.md`.
"""

from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from experiments.common import Row, Rows, Settings, interval, run
from experiments.without_tuning import MODELS
from pmvit.adaptive import AdaptiveBlock, take
from pmvit.data.loaders import ImageLoader, create_loader
from pmvit.data.sources import open_source
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import MergeCosts, TokenMetric
from pmvit.measuring.flops import ModelCost, model_cost
from pmvit.methods import Tome
from pmvit.numbers.tables import format_number, markdown_table

NAME = Path(__file__).stem
EMBEDDING = "vit_small_patch14_reg4_dinov2"
SHARES = (0.79, 0.68, 0.58, 0.5)  # of the FLOPs of the blocks
BATCH = 50
ADAPTIVE, COPIED, TOME, FIXED = "adaptive", "adaptive, copied back", "ToMe", "measured"


class Subject:
    """One model without a classifier, and images of it."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.is_dense = name in MODELS
        weights = settings.data / "weights" / f"{name}.safetensors"
        arguments: dict[str, Any] = {} if self.is_dense else {"num_classes": 0, "img_size": 224}
        self.model = create_model(name, weights, **arguments)
        if self.is_dense:
            timm_model: Any = self.model
            timm_model.reset_classifier(0, "")
        self.cost: ModelCost = model_cost(self.model)
        folder = settings.data / ("imagenet" if self.is_dense else "pets/images")
        self.measured_on, tested_on = folder / "train", folder / ("val" if self.is_dense else "test")
        batches = islice(self._loader(tested_on), -(-settings.images // BATCH))
        self.images = torch.cat([images for images, _ in batches])[: settings.images]
        self.expected = self.outputs(self.model)
        self.known: dict[str, TokenMetric | MergeCosts] = {}

    def _loader(self, folder: Path) -> ImageLoader:
        config = host_of(self.model).data_config()
        return create_loader(open_source(folder), config, batch_size=BATCH, shuffle=True)

    @torch.inference_mode()
    def outputs(self, model: nn.Module) -> Tensor:
        """The embedding of each image, or its patch tokens."""
        found = torch.cat([model(images) for images in self.images.split(BATCH)])
        return found[:, host_of(self.model).layout.num_prefix :] if self.is_dense else found

    def make(self, method: str, share: float) -> nn.Module:
        """The model at this share of the FLOPs of its blocks."""
        budget = self.cost.outside + share * (self.cost.macs - self.cost.outside)
        if method == TOME:
            merged = (pmvit.compress(self.model, Tome(r, unmerge=self.is_dense)) for r in range(1, 120))
            return next(small for small in merged if pmvit.flops(small).macs <= budget)
        kind = "measured" if method == FIXED else "adaptive"
        if kind not in self.known:
            images = self._loader(self.measured_on)
            self.known[kind] = pmvit.measure(self.model, images, method=kind, limit=512)  # type: ignore[call-overload]
        return pmvit.compress(self.model, pmvit.plan(self.known[kind], gflops=budget / 1e9))

    def row(self, method: str, share: float) -> Row:
        """What a method keeps of each image."""
        small = self.make(method, share)
        macs = pmvit.flops(small).macs
        if method == COPIED:
            copied_back(small)
        found = self.outputs(small)
        row = {"gflops": macs / 1e9, "share": (macs - self.cost.outside) / (self.cost.macs - self.cost.outside)}
        if self.is_dense:
            errors = (found - self.expected).square().flatten(1).sum(1) / self.expected.square().flatten(1).sum(1)
            return {**row, "error": [float(f"{value:.3g}") for value in errors.tolist()]}
        cosine = 1 - F.cosine_similarity(found, self.expected)
        same = nearest(found) == nearest(self.expected)
        return {**row, "cosine": [float(f"{value:.3g}") for value in cosine.tolist()], "same": same.int().tolist()}


def nearest(embeddings: Tensor) -> Tensor:
    """The place of the most similar of the other images."""
    points = F.normalize(embeddings)
    return (points @ points.T).fill_diagonal_(-torch.inf).argmax(1)


def copied_back(small: nn.Module) -> None:
    """Let tokens come back as copies of their group behind the last block, in the place of what sets them apart."""
    last = [module for module in small.modules() if isinstance(module, AdaptiveBlock)][-1]

    def copy(block: AdaptiveBlock, _: object, output: Tensor) -> Tensor:
        flow = block.channel.get(block.number, output)
        return take(flow.merged, flow.groups)

    last.register_forward_hook(copy)


def measure(rows: Rows, settings: Settings) -> None:
    """All rows that are missing; fixed plans, whose measuring takes longest, at the end."""
    subjects = {name: cache(partial(Subject, name, settings)) for name in (EMBEDDING, *MODELS)}
    for method in (ADAPTIVE, TOME, COPIED, FIXED):
        for name in MODELS if method == COPIED else subjects:
            for share in SHARES:
                key = {"model": name, "method": method, "share": share, "images": settings.images}
                rows.add(key, partial(lambda subject, *what: subject().row(*what), subjects[name], method, share))


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    lines = [
        "# Embeddings and all tokens, without fine-tuning",
        "",
        "`python -m experiments.adaptive_features` made this page. Shares are of the FLOPs of the blocks, comparing "
        "and merging included; in brackets 95 % intervals, from 2,000 resamplings of the images. *Measured* are fixed "
        "plans of the cheapest merges. Rows of adaptive plans are of before each token looked for its partner in one "
        "round, by 32 directions instead of 48.",
    ]
    for name in (EMBEDDING, *MODELS):
        own = [row for row in rows if row["key"]["model"] == name]
        if not own:
            continue
        is_dense = name in MODELS
        names = ["error of all tokens, %"] if is_dense else ["1 - cosine, %", "nearest image stays"]
        images = f"{own[0]['key']['images']:,} images of {'ImageNet' if is_dense else 'Oxford Pets'}"
        cells = []
        for share in SHARES:
            for row in (row for row in own if row["key"]["share"] == share):
                of_row = [str(share), row["key"]["method"], format_number(row["gflops"], ".3f")]
                of_row.append(format_number(row["share"], ".3f"))
                of_row.append(interval(100 * torch.tensor(row["error" if is_dense else "cosine"])).text(".2f"))
                if not is_dense:
                    of_row.append(interval(100 * torch.tensor(row["same"]).double()).text(".1f") + " %")
                cells.append(of_row)
        lines += ["", f"## {name}, {images}", ""]
        lines.append(markdown_table(["budget", "plan", "GFLOPs", "share", *names], cells))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    run(NAME, measure, markdown)
