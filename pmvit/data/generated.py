"""Images that are made up, to measure on where there are none: leaves that lie on each other, as in photographs.

Photographs show opaque things of all sizes, which hide each other: that alone gives edges, flat parts, texture and a
spectrum that falls as theirs does (the *dead leaves* model). Of such images much is learned that holds for photographs
(Baradad et al., Learning to See by Looking at Noise).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from pmvit.data.samples import Sample
from pmvit.data.seeding import seed_for

COUNT = 256  # images: of photographs, as many made as good a metric as 1,000
LEAVES = 150
CORNERS = 10
RADII = (0.01, 0.5)  # of a leaf, as parts of the longer side of the image


@dataclass(frozen=True)
class GeneratedImages:
    """Images for a model with this data configuration, prepared; each depends on the seed and its number alone."""

    data_config: dict[str, Any]
    count: int = COUNT
    seed: int = 0

    has_labels = False
    name = "generated images"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        channels, height, width = self.data_config["input_size"]
        generator = torch.Generator().manual_seed(seed_for(self.seed, index))
        mean, std = (torch.tensor(self.data_config[key]).view(-1, 1, 1) for key in ("mean", "std"))
        pixels = generated_image(channels, height, width, generator)
        return Sample((pixels - mean) / std, None, f"generated image {index}")


def generated_image(channels: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """An image with values from 0 to 1: leaves of all colours and textures, more or less colourful as a whole."""
    leaf = _leaf_of_each_pixel(height, width, generator)
    colourful = torch.rand((), generator=generator)
    colours = torch.rand(channels, LEAVES + 1, generator=generator)
    greys = torch.rand(1, LEAVES + 1, generator=generator)
    steepness = 0.5 + torch.rand((), generator=generator)
    texture = 0.8 * _noise(1, height, width, steepness, generator)
    texture = texture + 0.4 * _noise(channels, height, width, steepness, generator)
    strength = 0.3 * torch.rand(LEAVES + 1, generator=generator)
    pixels = (greys + colourful * (colours - greys))[:, leaf] + strength[leaf] * texture
    return pixels.clamp(0, 1)


def _leaf_of_each_pixel(height: int, width: int, generator: torch.Generator) -> Tensor:
    """The number of the uppermost leaf, 0 where there is none: (height, width).

    Leaves are polygons, longer than wide, and half as many are twice as large.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    least, most = RADII
    radius = max(height, width) / (1 / least + drawn(LEAVES, 1) * (1 / most - 1 / least))
    angle = 2 * math.pi * (torch.arange(CORNERS) / CORNERS + drawn(LEAVES, 1))
    reach = radius * (1 - 0.3 * drawn(LEAVES, CORNERS))
    along, across = reach * angle.cos(), reach * angle.sin() * (0.3 + 0.7 * drawn(LEAVES, 1))
    turn = 2 * math.pi * drawn(LEAVES, 1)
    x = along * turn.cos() - across * turn.sin() + width * drawn(LEAVES, 1)
    y = along * turn.sin() + across * turn.cos() + height * drawn(LEAVES, 1)
    canvas = Image.new("I", (width, height))
    draw = ImageDraw.Draw(canvas)
    for number, corners in enumerate(torch.stack([x, y], -1).flatten(1).tolist(), 1):
        draw.polygon(corners, fill=number)
    return torch.from_numpy(np.array(canvas)).long()


def _noise(channels: int, height: int, width: int, steepness: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of mean 0 and deviation 1 whose amplitudes fall with the frequency, to the power of `steepness`."""
    frequency = (torch.fft.fftfreq(height)[:, None] ** 2 + torch.fft.rfftfreq(width) ** 2).sqrt()
    frequency[0, 0] = math.inf  # no mean
    white = torch.fft.rfft2(torch.randn(channels, height, width, generator=generator))
    noise: Tensor = torch.fft.irfft2(white * frequency**-steepness, s=(height, width))
    return noise / noise.std().clamp_min(1e-6)
