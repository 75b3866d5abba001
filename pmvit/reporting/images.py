"""Images prepared for a model, made visible again, and put into pages."""

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from pmvit.data.loaders import Broken
from pmvit.data.samples import BROKEN_IMAGE, Sample
from pmvit.data.transforms import Preparation, color_mode, evaluation_transform
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.reporting.class_names import name_of

Bytes = npt.NDArray[np.uint8]

LARGEST_SIDE = 336  # of a picture in a page
SMALL_SIDE = 64  # up to here pictures are stored without loss
QUALITY = 90


class InputImages:
    """How a model's images are prepared: in its `mode` of Pillow's, at its size, cropped in the middle, normalised."""

    def __init__(self, model: nn.Module) -> None:
        host = host_of(model)
        config = host.data_config()
        self.mode = color_mode(config)
        self._mean, self._std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
        self._pixels = Preparation(config) if host.outputs().pixel_classes is not None else None
        self._transform = evaluation_transform(config)

    def prepare(self, picture: Image.Image) -> Tensor:
        """The pixels that the model gets, (channels, height, width)."""
        picture = picture if picture.mode == self.mode else picture.convert(self.mode)  # which would make a copy
        if self._pixels is not None:
            return self._pixels.centre_pair(picture, torch.zeros(picture.height, picture.width, dtype=torch.long))[0]
        return self._transform(picture)

    def visible(self, prepared: Tensor) -> Tensor:
        """Prepared pixels from 0 to 1 again."""
        return (prepared.cpu() * self._std + self._mean).clamp(0, 1)

    def picture(self, prepared: Tensor) -> Image.Image:
        """Prepared pixels as a picture again."""
        return Image.fromarray(photograph(self.visible(prepared)))


def photograph(image: Tensor) -> Bytes:
    """An image (channels, height, width; 0 to 1) as bytes (height, width, 3), grey ones in three channels."""
    return np.ascontiguousarray((image * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0).numpy())


def readable(samples: Sequence[Sample], mode: str, broken: Broken) -> Iterator[tuple[int, Sample, Image.Image]]:
    """Decode images, each with its number; broken ones are noted and left out. If all are, raise `PmvitError`."""
    for number, sample in enumerate(samples):
        try:
            picture = sample.open(mode)
        except BROKEN_IMAGE as error:
            broken[sample.name] = f"{type(error).__name__}: {error}"
        else:
            yield number, sample, picture
    if samples and len(broken) == len(samples):
        name, reason = next(iter(broken.items()))
        raise PmvitError(f"expected an image that can be read, got none: {name} ({reason})")


def fitted(picture: Image.Image, side: int) -> Image.Image:
    """A picture with its longer side this long; enlarged ones keep their pixels sharp."""
    factor = side / max(picture.size)
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    return picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)


def page_picture(picture: Image.Image, side: int = LARGEST_SIDE) -> str:
    """A picture for a page, at most this long at its longer side; a very small one without loss."""
    smaller = fitted(picture, side) if max(picture.size) > side else picture
    return data_uri(smaller, lossless=max(picture.size) <= SMALL_SIDE)


def data_uri(picture: Image.Image, *, lossless: bool) -> str:
    """A picture inside a file: as PNG without loss, else as JPEG."""
    stream, kind = io.BytesIO(), "png" if lossless else "jpeg"
    picture.save(stream, kind, optimize=lossless, quality=QUALITY, subsampling=0)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def likeliest(logits: Tensor, names: tuple[str, ...], count: int = 5) -> list[dict[str, Any]]:
    """The first predictions of one image: names and probabilities, the likeliest first."""
    shares, classes = logits.float().softmax(-1).topk(min(count, logits.shape[-1]))
    return [
        {"name": name_of(number, names), "share": round(share, 4)}
        for number, share in zip(classes.tolist(), shares.tolist(), strict=True)
    ]
