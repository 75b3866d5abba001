"""Images as a model sees them, and the names of what it sees."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.imagenet_info import ImageNetInfo
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn

from pmvit.data import demo
from pmvit.data.folder import color_mode
from pmvit.data.pixels import CentreCrop, Preparation
from pmvit.hosts import host_of
from pmvit.loading import num_classes_of
from pmvit.reporting.segmentation import read_names

LARGEST_SIDE = 336  # of a picture in a page
SMALL_SIDE = 64  # up to here pictures are stored without loss
QUALITY = 86


class Sight:
    """How a model sees an image: at its size, cropped in the middle.

    Attributes:
        mode: Of the images, as Pillow names it.
    """

    def __init__(self, model: nn.Module) -> None:
        config = host_of(model).data_config()
        self.mode = color_mode(config)
        self._mean, self._std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
        self._crop = CentreCrop(Preparation.of(config)) if host_of(model).outputs().pixel_classes is not None else None
        self._transform: Any = create_transform(
            input_size=tuple(config["input_size"]),
            interpolation=config["interpolation"],
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            crop_pct=config["crop_pct"],
            crop_mode=config["crop_mode"],
        )

    def prepare(self, picture: Image.Image) -> Tensor:
        """The pixels that the model gets, (channels, height, width)."""
        picture = picture.convert(self.mode)
        if self._crop is not None:
            return self._crop(picture, torch.zeros(picture.height, picture.width, dtype=torch.long))[0]
        prepared: Tensor = self._transform(picture)
        return prepared

    def picture(self, prepared: Tensor) -> Image.Image:
        """Prepared pixels as a picture again."""
        pixels = (prepared.cpu() * self._std + self._mean).clamp(0, 1).mul(255).round().to(torch.uint8)
        return Image.fromarray(np.ascontiguousarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()))


def data_uri(picture: Image.Image, side: int = LARGEST_SIDE) -> str:
    """A picture inside a page: JPEG, at most this long at its longer side; a very small one as PNG."""
    is_small = max(picture.size) <= SMALL_SIDE
    if max(picture.size) > side:
        factor = side / max(picture.size)
        size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    if is_small:
        picture.save(stream, "PNG", optimize=True)
    else:
        picture.convert("RGB").save(stream, "JPEG", quality=QUALITY, optimize=True)
    kind = "png" if is_small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def is_demo(model: nn.Module) -> bool:
    """Whether a model is the demo's ViT, compressed or not."""
    size, patches = (1, demo.ARGUMENTS["img_size"], demo.ARGUMENTS["img_size"]), demo.ARGUMENTS["patch_size"]
    host = host_of(model)
    grid = (size[1] // patches, size[2] // patches)
    same = host.input_size() == size and host.layout.grid == grid
    return same and len(host.block_names()) == demo.ARGUMENTS["depth"] and num_classes_of(model) == 10


def class_names(model: nn.Module, names: str | Path | None = None) -> tuple[str, ...]:
    """The names of the classes: of a text file, or as far as the model or its number of classes says; else numbers.

    Raises:
        PmvitError: If the file does not have one name for each class.
    """
    classes = host_of(model).outputs().pixel_classes or num_classes_of(model) or 0
    if names is not None:
        return read_names(Path(names), classes)
    known = getattr(getattr(model, "config", None), "id2label", None)
    if isinstance(known, dict) and len(known) == classes:
        return tuple(str(known.get(number, number)) for number in range(classes))
    if is_demo(model):
        return demo.CLASSES
    imagenet = ImageNetInfo()
    if classes == imagenet.num_classes():
        return tuple(imagenet.index_to_description(number) for number in range(classes))
    return tuple(f"class {number}" for number in range(classes))


def likeliest(logits: Tensor, names: tuple[str, ...], count: int = 5) -> list[dict[str, Any]]:
    """The first predictions of one image: names and probabilities, the likeliest first."""
    shares, classes = logits.float().softmax(-1).topk(min(count, logits.shape[-1]))
    return [
        {"name": names[number] if number < len(names) else f"class {number}", "share": round(share, 4)}
        for number, share in zip(classes.tolist(), shares.tolist(), strict=True)
    ]
