"""One measurement for images of many sizes: what a plan keeps at other sizes than it was measured at, nothing tuned.

    python -m experiments.any_size --images 150

A plan is measured once, on training images of 224 pixels; at every other size as large a share of the patches merges.
Beside it stands the plan that is measured on images of that size, for the same GFLOPs. Both are compared with the
uncompressed model at that size, on the same images of `imagenet/val`. Rows are kept in `any_size.json` as they are
measured, so that a stopped run goes on; the tables go to `any_size.md`.
"""

from functools import cache, cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from experiments.common import INTERVALS, Row, Rows, Settings, interval, page, percent, run
from experiments.paired import answers, numbers, with_interval
from pmvit.compression import at_size, compression_of
from pmvit.data.loaders import ImageLoader, create_loader
from pmvit.data.sources import open_source
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import TokenMetric
from pmvit.measuring.flops import ModelCost, model_cost
from pmvit.numbers.tables import format_number, markdown_table

NAME = Path(__file__).stem
CLASSIFIER, EMBEDDING = "vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"
SIZES = {  # and of how many of the images each is measured, for large ones take long
    CLASSIFIER: {160: 1.0, 224: 1.0, 288: 1.0, 384: 0.3, 512: 0.15},
    EMBEDDING: {154: 0.15, 224: 0.15, 336: 0.15},
}
MEASURED_AT, SHARE = 224, 0.6  # of the FLOPs of the blocks at that size
LIMITS = {  # training images that are measured: of large ones, and for the larger model, fewer
    CLASSIFIER: {160: 64, 224: 64, 288: 64, 384: 32, 512: 16},
    EMBEDDING: {154: 24, 224: 24, 336: 24},
}
LAST = (512, 336)  # measured when all else is
BATCH = 20
ONCE, THERE = "measured at 224", "measured at this size"


class AtSize:
    """One model, made for images of one size, and validation images."""

    def __init__(self, name: str, size: int, settings: Settings) -> None:
        weights = settings.data / "weights" / f"{name}.safetensors"
        arguments: dict[str, Any] = {"num_classes": 0} if name == EMBEDDING else {}
        made = create_model(name, weights, img_size=MEASURED_AT, dynamic_img_size=True, **arguments)
        self.model = at_size(made, size)
        self.cost: ModelCost = model_cost(self.model)
        self.settings, self.name = settings, name

    def loader(self, half: str) -> ImageLoader:
        source = open_source(self.settings.data / "imagenet" / half)
        config = host_of(self.model).data_config()
        return create_loader(source, config, batch_size=BATCH, shuffle=True, workers=0)

    @cached_property
    def metric(self) -> TokenMetric:
        limit = LIMITS[self.name][self.size]
        return pmvit.measure(self.model, self.loader("train"), method="adaptive", limit=limit)

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """In the same order at every size."""
        return list(islice(self.loader("val"), self.count // BATCH))

    @property
    def size(self) -> int:
        return host_of(self.model).input_size()[-1]

    @property
    def count(self) -> int:
        return images_at(self.name, self.size, self.settings)

    @torch.inference_mode()
    def outputs(self, model: nn.Module) -> Tensor:
        return torch.cat([model(images) for images, _ in self.batches])

    @cached_property
    def original(self) -> Tensor:
        return self.outputs(self.model)

    def row(self, small: nn.Module) -> Row:
        """What a compressed model keeps of every image, and what it costs."""
        macs, found = pmvit.flops(small).macs, self.outputs(small)
        cost = self.cost.macs - self.cost.outside
        row: Row = {"gflops": macs / 1e9, "share": (macs - self.cost.outside) / cost}
        row |= {"original_gflops": self.cost.macs / 1e9, "merges": list(merges_of(small))}
        if not host_of(self.model).outputs().gives_logits:
            lost = 1 - F.cosine_similarity(found, self.original)
            return {**row, "cosine": [float(f"{value:.3g}") for value in lost.tolist()]}
        labels = torch.cat([labels for _, labels in self.batches])
        return {**row, **answers(found, labels, self.original)}


def images_at(name: str, size: int, settings: Settings) -> int:
    """How many validation images are measured at a size: whole batches."""
    return round(settings.images * SIZES[name][size]) // BATCH * BATCH


def merges_of(small: nn.Module) -> tuple[int, ...]:
    compression = compression_of(small)
    if compression is None:
        raise TypeError("expected a compressed model")
    merges: tuple[int, ...] = compression.what.merges  # type: ignore[attr-defined]  # of an adaptive plan
    return merges


def measure(rows: Rows, settings: Settings) -> None:
    """All rows that are missing, the smallest sizes first."""
    subject = lru_cache(maxsize=2)(partial(AtSize, settings=settings))  # with their images

    @cache
    def once(name: str) -> nn.Module:
        """The plan that serves all sizes."""
        at = subject(name, MEASURED_AT)
        budget = at.cost.outside + SHARE * (at.cost.macs - at.cost.outside)
        return pmvit.compress(at.model, pmvit.plan(at.metric, gflops=budget / 1e9))

    def row(name: str, size: int, plan: str) -> Row:
        at = subject(name, size)
        return at.row(at_size(once(name), size) if plan == ONCE else there(at, once(name), size))

    everything = [(name, size) for name, sizes in SIZES.items() for size in sizes]
    for name, size in sorted(everything, key=lambda each: each[1] in LAST):
        for plan in (ONCE,) if size == MEASURED_AT else (ONCE, THERE):
            key = {"model": name, "size": size, "images": images_at(name, size, settings), "plan": plan}
            rows.add(key, partial(row, name, size, plan))


def there(subject: AtSize, once: nn.Module, size: int) -> nn.Module:
    """The model by a plan that was measured at this size, and costs as much."""
    gflops = pmvit.flops(at_size(once, size)).gflops
    return pmvit.compress(subject.model, pmvit.plan(subject.metric, gflops=gflops))


def markdown(rows: list[Row]) -> str:
    """A table for each model, from the measured rows alone."""
    text = (
        f"Plans are measured on training images of ImageNet, once at {MEASURED_AT} pixels and, beside it, at every "
        f"other size, and keep {SHARE} of the FLOPs of the blocks at {MEASURED_AT}. At another size, the first merges "
        "as large shares of the patches, and the second has its GFLOPs. Weights are the same at all sizes; position "
        "embeddings are resized by timm. Agreement, KL and cosine are with the uncompressed model at the same size, on "
        f"the same validation images. {INTERVALS}"
    )
    parts = []
    for name in SIZES:
        own = sorted((row for row in rows if row["key"]["model"] == name), key=lambda row: int(row["key"]["size"]))
        if not own:
            continue
        is_embedding = "cosine" in own[0]
        measure, form, factor = ("1 - cosine, %", ".2f", 100) if is_embedding else ("KL", ".4f", 1)
        titles = ["pixels", "images", "measured on", "plan", "GFLOPs", "of the original's", "share of the blocks"]
        titles += [] if is_embedding else ["original", "top-1", "agreement"]
        titles += [measure, f"{measure}, to the plan measured there"]
        cells = []
        for row in own:
            values = _values(row) * factor
            other = next((each for each in own if _is_beside(each, row) and each["key"]["plan"] == THERE), None)
            measured_at = MEASURED_AT if row["key"]["plan"] == ONCE else row["key"]["size"]
            cells.append([str(row["key"]["size"]), str(row["key"]["images"]), str(LIMITS[name][measured_at])])
            cells[-1].append(row["key"]["plan"])
            cells[-1] += [format_number(row["gflops"], ".3f"), format_number(row["original_gflops"], ".3f")]
            cells[-1].append(percent(row["share"]))
            if not is_embedding:
                cells[-1] += [percent(numbers(row, what).mean()) for what in ("original", "correct", "agrees")]
            cells[-1].append(with_interval(values, form))
            if row["key"]["plan"] == ONCE and other is not None:
                cells[-1].append(interval(values - _values(other) * factor).text(f"+{form}"))
            else:
                cells[-1].append("-")
        parts += [f"## {name}", markdown_table(titles, cells)]
    return page(NAME, "One measurement, images of any size", rows, text, *parts)


def _values(row: Row) -> Tensor:
    """What a row has of every image to be compared by."""
    return numbers(row, "cosine" if "cosine" in row else "kl")


def _is_beside(row: Row, other: Row) -> bool:
    return all(row["key"][name] == other["key"][name] for name in ("model", "size", "images"))


if __name__ == "__main__":
    run(NAME, measure, markdown)
