"""What is done to an image, and to its mask, before a model gets it: for evaluation, for scoring, for training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, interp_mode_to_str
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision.transforms import ColorJitter

from pmvit.data.batches import IGNORED, resize_labels

ImageTransform = Callable[[Image.Image], Tensor]
PairTransform = Callable[[Image.Image, Tensor], tuple[Tensor, Tensor]]
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def color_mode(data_config: dict[str, Any]) -> str:
    """The mode of Pillow's images that a model takes."""
    return "L" if data_config["input_size"][0] == 1 else "RGB"


# --- images alone: timm's transforms ---


def evaluation_transform(data_config: dict[str, Any]) -> ImageTransform:
    """Resize, crop in the middle and normalise, as a model's data configuration says."""
    transform: ImageTransform = create_transform(
        input_size=tuple(data_config["input_size"]),
        interpolation=data_config["interpolation"],
        mean=tuple(data_config["mean"]),
        std=tuple(data_config["std"]),
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"],
    )
    return transform


def training_transform(
    data_config: dict[str, Any],
    *,
    crop_scale: tuple[float, float],
    hflip: float,
    color_jitter: float,
    auto_augment: str | None,
) -> ImageTransform:
    """timm's augmentation of one image, as bytes; a `crop_scale` of (1, 1) shows the middle square of every image."""
    whole = tuple(crop_scale) == (1.0, 1.0)
    transform: Any = create_transform(
        input_size=tuple(data_config["input_size"]),
        is_training=True,
        scale=crop_scale,
        ratio=(1.0, 1.0) if whole else None,
        hflip=hflip,
        color_jitter=color_jitter or None,  # type: ignore[arg-type]  # None is the way to have none
        auto_augment=auto_augment,
        interpolation=data_config["interpolation"],
        mean=tuple(data_config["mean"]),
        normalize=False,
    )
    if not auto_augment:  # that works on Pillow's images
        transform.transforms = [_TensorCrop.like(step) for step in transform.transforms]
    prepared: ImageTransform = transform
    return prepared


class _TensorCrop(RandomResizedCropAndInterpolation):
    """timm's random crop, resized by PyTorch as bytes: the same to one level of 255, in half the time."""

    @staticmethod
    def like(step: Any) -> Any:
        """This in place of timm's crop, anything else as it is."""
        if type(step) is not RandomResizedCropAndInterpolation or isinstance(step.interpolation, tuple):
            return step
        return _TensorCrop(step.size, step.scale, step.ratio, interp_mode_to_str(step.interpolation))

    def __call__(self, image: Image.Image) -> Image.Image | Tensor:
        mode = interp_mode_to_str(self.interpolation)
        if image.mode != "RGB" or mode not in ("bilinear", "bicubic"):
            return super().__call__(image)  # type: ignore[no-any-return, no-untyped-call]
        top, left, height, width = self.get_params(image, self.scale, self.ratio)  # type: ignore[no-untyped-call]
        batch = _pixels(image.crop((left, top, left + width, top + height)))[None]
        return F.interpolate(batch, self.size, mode=mode, antialias=True)[0]


class BatchTransform:
    """What is left to do to a batch of bytes, on the device that trains: scale, normalise, erase.

    Images travel as bytes from the workers, a quarter of the size; loaders of others bring theirs ready.
    """

    def __init__(self, data_config: dict[str, Any], random_erasing: float, device: torch.device) -> None:
        self._mean = torch.tensor(data_config["mean"], device=device).view(-1, 1, 1) * 255
        self._scale = 1 / (torch.tensor(data_config["std"], device=device).view(-1, 1, 1) * 255)
        self._erase = RandomErasing(random_erasing, mode="pixel", device=str(device)) if random_erasing else None

    def __call__(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images
        images = (images - self._mean).mul_(self._scale)
        return self._erase(images) if self._erase is not None else images


def _pixels(image: Image.Image) -> Tensor:
    """Bytes of shape (channels, height, width)."""
    return torch.from_numpy(np.array(image)).view(image.height, image.width, -1).permute(2, 0, 1)


# --- images with masks ---


@dataclass(frozen=True)
class Preparation:
    """How images and their masks are prepared for a model that labels pixels, from timm's data configuration."""

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

    def whole_pair(self, image: Image.Image, mask: Tensor) -> tuple[Tensor, Tensor]:
        """For evaluation: all of the image, and its mask as it is."""
        return self.whole(image), mask

    def centre_pair(self, image: Image.Image, mask: Tensor) -> tuple[Tensor, Tensor]:
        """For scoring: the middle of image and mask at the model's size."""
        resized = self.resize(image)
        labels = resize_labels(mask[None], (resized.height, resized.width))[0]
        height, width = self.size
        top, left = (resized.height - height) // 2, (resized.width - width) // 2
        area = (..., slice(top, top + height), slice(left, left + width))
        return self.normalize(_pixels(resized)[area]), labels[area]


@dataclass(frozen=True)
class PairAugmentation:
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
