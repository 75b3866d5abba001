"""Images and their masks, prepared together: whole for evaluation, cropped for scoring, augmented for training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import ColorJitter

from pmvit.data.batches import IGNORED, resize_labels
from pmvit.data.folder import FolderLoader, Prepared, begin_worker, color_mode
from pmvit.data.segmentation import PairSource
from pmvit.data.sources import BROKEN_IMAGE
from pmvit.data.training import Augmented, SourceData

PixelTransform = Callable[[Image.Image, Tensor], tuple[Tensor, Tensor]]
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def _pixels(image: Image.Image) -> Tensor:
    """Bytes of shape (channels, height, width)."""
    return torch.from_numpy(np.array(image)).view(image.height, image.width, -1).permute(2, 0, 1)


@dataclass(frozen=True)
class Preparation:
    """How images are prepared for a model, from timm's data configuration."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resampling: Image.Resampling

    @staticmethod
    def of(data_config: dict[str, Any]) -> "Preparation":
        _, height, width = data_config["input_size"]
        resampling = RESAMPLING.get(data_config["interpolation"], Image.Resampling.BILINEAR)
        return Preparation((height, width), tuple(data_config["mean"]), tuple(data_config["std"]), resampling)

    def resize(self, image: Image.Image, factor: float = 1.0) -> Image.Image:
        """The image, just large enough to cover the model's size times `factor`."""
        scale = factor * max(self.size[0] / image.height, self.size[1] / image.width)
        sides = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        return image if sides == image.size else image.resize(sides, self.resampling)

    def normalize(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std

    def whole(self, image: Image.Image) -> Tensor:
        """All of the image, just large enough to cover the model's size."""
        return self.normalize(_pixels(self.resize(image)))


@dataclass(frozen=True)
class WholeImage:
    """For evaluation: the image resized to cover a window of the model, its mask as it is."""

    preparation: Preparation

    def __call__(self, image: Image.Image, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.preparation.whole(image), mask


@dataclass(frozen=True)
class CentreCrop:
    """For scoring: the middle of image and mask at the model's size."""

    preparation: Preparation

    def __call__(self, image: Image.Image, mask: Tensor) -> tuple[Tensor, Tensor]:
        resized = self.preparation.resize(image)
        labels = resize_labels(mask[None], (resized.height, resized.width))[0]
        height, width = self.preparation.size
        top, left = (resized.height - height) // 2, (resized.width - width) // 2
        area = (..., slice(top, top + height), slice(left, left + width))
        return self.preparation.normalize(_pixels(resized)[area]), labels[area]


@dataclass(frozen=True)
class Augmentation:
    """For training, as the paper does it: resize, crop, mirror, change colours; the image stays bytes.

    Where the image ends before the crop does, its mean colour goes on, and the labels are ignored.

    Attributes:
        preparation: What the model takes.
        scale: Least and largest size, as a multiple of the one that just covers the crop.
        hflip: Probability that image and mask are mirrored.
        color_jitter: Strength of the changes of brightness, contrast, saturation and hue.
    """

    preparation: Preparation
    scale: tuple[float, float] = (0.5, 2.0)
    hflip: float = 0.5
    color_jitter: float = 0.5

    def __call__(self, image: Image.Image, mask: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.scale
        resized = self.preparation.resize(image, low + (high - low) * torch.rand(()).item())
        labels = resize_labels(mask[None], (resized.height, resized.width))[0]
        if self.color_jitter and resized.mode == "RGB":
            strength = self.color_jitter
            resized = ColorJitter(strength / 4, strength, strength, min(strength / 5, 0.5))(resized)
        pixels, labels = self._crop(_pixels(resized), labels)
        if torch.rand(()).item() < self.hflip:
            pixels, labels = pixels.flip(-1), labels.flip(-1)
        return pixels.contiguous(), labels.contiguous()

    def _crop(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        height, width = self.preparation.size
        below, beside = max(height - labels.shape[0], 0), max(width - labels.shape[1], 0)
        if below or beside:
            labels = F.pad(labels, (0, beside, 0, below), value=IGNORED)
            channels = [round(255 * mean) for mean in self.preparation.mean]
            filled = torch.tensor(channels, dtype=torch.uint8).view(-1, 1, 1).repeat(1, *labels.shape)
            filled[:, : pixels.shape[1], : pixels.shape[2]] = pixels
            pixels = filled
        top, left = (
            int(torch.randint(0, has - takes + 1, ()).item())
            for has, takes in zip(labels.shape, (height, width), strict=True)
        )
        area = (..., slice(top, top + height), slice(left, left + width))
        return pixels[area], labels[area]


def prepare_pair(source: PairSource, transform: PixelTransform, mode: str, index: int) -> Prepared:
    """Decode and transform an image and its mask; if the image is broken, say why instead of raising."""
    sample = source.sample(index)
    try:
        image = sample.open(mode)
    except BROKEN_IMAGE as error:
        return Prepared(f"{type(error).__name__}: {error}", None, sample.name)
    pixels, labels = transform(image, source.mask(index, (image.height, image.width)))
    return Prepared(pixels, labels, sample.name)


class _Pairs(Dataset[Prepared]):
    def __init__(self, source: PairSource, transform: PixelTransform, mode: str) -> None:
        self.source = source
        self.transform = transform
        self.mode = mode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prepared:
        return prepare_pair(self.source, self.transform, self.mode, index)


def pixel_loader(
    source: PairSource,
    data_config: dict[str, Any],
    *,
    whole: bool = False,
    batch_size: int = 8,
    workers: int = 2,
    shuffle: bool = False,
    seed: int = 0,
    strict: bool = False,
    limit: int | None = None,
    process: int = 0,
    processes: int = 1,
) -> FolderLoader:
    """Make a loader of images and the labels of their pixels.

    Args:
        source: The images and masks.
        data_config: Size, mean, interpolation and so on, as timm has them for a model.
        whole: Images whole and one at a time, with labels at the size of their file; else both cropped to the size of
            the model, in batches.
        batch_size: Images a batch, unless they are whole.
        workers: Processes that read images.
        shuffle: Take the images in an order that depends only on the seed.
        seed: For `shuffle`.
        strict: A broken image is an error instead of being left out.
        limit: Take so many images at most.
        process: Which of `processes` this is: each batch is split among them.
        processes: How many processes share the images.
    """
    preparation = Preparation.of(data_config)
    transform: PixelTransform = WholeImage(preparation) if whole else CentreCrop(preparation)
    order = list(range(len(source)))
    if shuffle:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).tolist()
    order = order[:limit]
    size = processes if whole else batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    mine = [batch[process::processes] for batch in batches if whole or len(batch) >= processes]
    loader: DataLoader[Any] = DataLoader(
        _Pairs(source, transform, color_mode(data_config)),
        batch_sampler=[batch for batch in mine if batch],
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=list,
        worker_init_fn=begin_worker,
    )
    form = "whole" if whole else f"in batches of {batch_size}, seed {seed}"
    return FolderLoader(loader, True, strict, f"{source.name} {form}")


def pixel_training_data(
    source: PairSource,
    augmentation: Augmentation,
    data_config: dict[str, Any],
    *,
    batch: int,
    workers: int,
    seed: int,
    process: tuple[int, int] = (0, 1),
    epoch_images: int | None = None,
) -> SourceData:
    """Training batches of images as bytes and the labels of their pixels, the same again from any point of a run."""
    prepare_one = partial(prepare_pair, source, augmentation, color_mode(data_config))
    images = Augmented(source.name, len(source), prepare_one, seed)
    return SourceData(images, batch=batch, workers=workers, seed=seed, process=process, epoch_images=epoch_images)
