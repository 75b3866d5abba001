"""What is done to an image, and to its mask, before a model gets it: for evaluation, for scoring, for training."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, interp_mode_to_str
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision.transforms import ColorJitter
from torchvision.transforms.functional import pil_to_tensor

from pmvit.data.batches import IGNORED, resize_labels
from pmvit.errors import PmvitError

ImageTransform = Callable[[Image.Image], Tensor]
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def color_mode(data_config: dict[str, Any]) -> str:
    """The mode of Pillow's images that a model takes; `PmvitError` if it takes none."""
    check_takes_images(data_config)
    return "L" if data_config["input_size"][0] == 1 else "RGB"


def check_takes_images(data_config: dict[str, Any]) -> None:
    """Raise `PmvitError` if a model does not take images, which are all that is read and drawn here."""
    size = data_config["input_size"]
    if len(size) != 3:
        raise PmvitError(
            f"expected a model that takes images; this one takes {' x '.join(map(str, size))} numbers: give it tensors "
            "or a loader of batches that are prepared, and draw plans with plan.draw()"
        )


def evaluation_transform(data_config: dict[str, Any]) -> ImageTransform:
    """Resize, crop in the middle and normalise, as a model's data configuration says."""
    return cast("ImageTransform", create_transform(**data_config))


def training_transform(
    data_config: dict[str, Any],
    *,
    crop_scale: tuple[float, float],
    hflip: float,
    color_jitter: float,
    auto_augment: str | None,
) -> ImageTransform:
    """timm's augmentation of one image, as bytes; a `crop_scale` of (1, 1) shows the middle square of every image."""
    transform: Any = create_transform(
        **data_config,
        is_training=True,
        scale=crop_scale,
        ratio=(1.0, 1.0) if tuple(crop_scale) == (1.0, 1.0) else None,
        hflip=hflip,
        color_jitter=color_jitter or None,  # type: ignore[arg-type]  # None is the way to have none
        auto_augment=auto_augment,
        normalize=False,
    )
    mode = data_config["interpolation"]
    if not auto_augment and mode in RESAMPLING and color_mode(data_config) == "RGB":  # the others work on Pillow's
        crop = transform.transforms[0]
        transform.transforms[0] = _TensorCrop(crop.size, crop.scale, crop.ratio, mode)  # type: ignore[no-untyped-call]
    return cast("ImageTransform", transform)


class _TensorCrop(RandomResizedCropAndInterpolation):
    """timm's random crop, resized by PyTorch as bytes: the same to one level of 255, in half the time."""

    def __call__(self, image: Image.Image) -> Tensor:
        top, left, height, width = self.get_params(image, self.scale, self.ratio)  # type: ignore[no-untyped-call]
        batch = pil_to_tensor(image.crop((left, top, left + width, top + height)))[None]
        return F.interpolate(batch, self.size, mode=interp_mode_to_str(self.interpolation), antialias=True)[0]


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


class Preparation:
    """How images and their masks are prepared for a model that labels pixels, from timm's data configuration."""

    def __init__(self, data_config: dict[str, Any]) -> None:
        check_takes_images(data_config)
        _, *self.size = data_config["input_size"]
        self.mean, self.std = data_config["mean"], data_config["std"]
        self.resampling = RESAMPLING.get(data_config["interpolation"], Image.Resampling.BILINEAR)

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
        return self.normalize(pil_to_tensor(self.resize(image)))

    def whole_pair(self, image: Image.Image, mask: Tensor) -> tuple[Tensor, Tensor]:
        """For evaluation: all of the image, and its mask as it is."""
        return self.whole(image), mask

    def centre_pair(self, image: Image.Image, mask: Tensor) -> tuple[Tensor, Tensor]:
        """For scoring: the middle of image and mask at the model's size."""
        resized = self.resize(image)
        labels = resize_labels(mask[None], (resized.height, resized.width))[0]
        place = (resized.height - self.size[0]) // 2, (resized.width - self.size[1]) // 2
        return self.normalize(self.crop(pil_to_tensor(resized), place)), self.crop(labels, place)

    def crop(self, values: Tensor, place: tuple[int, int]) -> Tensor:
        """Of pixels or labels, what the model takes, from this row and column on."""
        return values[..., place[0] : place[0] + self.size[0], place[1] : place[1] + self.size[1]]

    def augmented_pair(
        self, image: Image.Image, mask: Tensor, scale: tuple[float, float], hflip: float, color_jitter: float
    ) -> tuple[Tensor, Tensor]:
        """For training, as the paper does it: resize, change colours, crop, mirror; the image stays bytes.

        Where the image ends before the crop does, its mean colour goes on, and the labels are ignored. `scale` is the
        least and the largest size, as a multiple of the one that just covers the crop.
        """
        resized = self.resize(image, scale[0] + (scale[1] - scale[0]) * torch.rand(()).item())
        labels = resize_labels(mask[None], (resized.height, resized.width))[0]
        if color_jitter and resized.mode == "RGB":
            change = ColorJitter(color_jitter / 4, color_jitter, color_jitter, min(color_jitter / 5, 0.5))
            resized = change(resized)
        height, width = self.size
        edge = (0, max(width - resized.width, 0), 0, max(height - resized.height, 0))
        labels = F.pad(labels, edge, value=IGNORED)
        channels = zip(pil_to_tensor(resized), self.mean, strict=False)
        pixels = torch.stack([F.pad(channel, edge, value=round(255 * fill)) for channel, fill in channels])
        room = labels.shape[0] - height, labels.shape[1] - width
        top, left = (int(torch.randint(0, more + 1, ())) for more in room)
        pixels, labels = self.crop(pixels, (top, left)), self.crop(labels, (top, left))
        if torch.rand(()).item() < hflip:
            pixels, labels = pixels.flip(-1), labels.flip(-1)
        return pixels.contiguous(), labels.contiguous()
