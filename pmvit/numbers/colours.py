"""Colours of lines and classes that people tell apart, colour-blind or not.

The first seven are those of Okabe and Ito (jfly.uni-koeln.de/color, 2008). More are added one by one, each as far as
can be from all before it: in Oklab (Ottosson, 2020), for people who see all colours and for those without red or green
cones (Machado et al., 2009), whichever find them nearest.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Colour = tuple[int, ...]  # red, green and blue, from 0 to 255
Array = npt.NDArray[np.float64]

ORANGE, SKY_BLUE, GREEN, YELLOW = (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66)
BLUE, VERMILLION, PURPLE = (0, 114, 178), (213, 94, 0), (204, 121, 167)
OKABE_ITO: tuple[Colour, ...] = (ORANGE, BLUE, GREEN, YELLOW, PURPLE, SKY_BLUE, VERMILLION)
GREY: Colour = (85, 85, 85)
NEUTRAL: Colour = (225, 225, 225)  # of pixels that count for nothing; a darker grey is green to some eyes

_LEVELS = 16  # of each channel, among which colours are looked for
_LEAST_LIGHTNESS, _LEAST_CHROMA = 0.45, 0.06  # darker ones are lost on a photograph, greyer ones look like NEUTRAL
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
_WITHOUT_RED = np.array(
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
)
_WITHOUT_GREEN = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)


def to_hex(colour: Colour) -> str:
    """A colour as matplotlib and style sheets write it."""
    return f"#{bytes(colour).hex()}"


LINES = tuple(
    map(to_hex, (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, VERMILLION, YELLOW, GREY))
)  # of charts, in this order


def to_oklab(colours: Array) -> Array:
    """Bytes of shape (colours, 3) in Oklab, as three kinds of eyes perceive them: (3, colours, 3)."""
    share = colours / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    eyes = np.stack([linear, linear @ _WITHOUT_RED.T, linear @ _WITHOUT_GREEN.T]).clip(0, 1)
    oklab: Array = np.cbrt(eyes @ _TO_CONES.T) @ _TO_OKLAB.T
    return oklab


def distances(colours: Array, colour: Array) -> Array:
    """How far each colour is from one, for the eyes that find them most alike; both from `to_oklab`."""
    apart: Array = np.linalg.norm(colours - colour[:, None], axis=-1).min(0)
    return apart


@lru_cache
def palette(classes: int) -> tuple[Colour, ...]:
    """One colour a class; the first ones are the same for any number of classes."""
    levels = np.linspace(0, 255, _LEVELS).round()
    candidates = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
    lightness, *chroma = to_oklab(candidates)[0].T
    candidates = candidates[(lightness >= _LEAST_LIGHTNESS) & (np.hypot(*chroma) >= _LEAST_CHROMA)]
    perceived = to_oklab(candidates)
    nearest = np.full(len(candidates), np.inf)
    for colour in ((0, 0, 0), (255, 255, 255), NEUTRAL, *OKABE_ITO):
        nearest = np.minimum(nearest, distances(perceived, to_oklab(np.array([colour], dtype=np.float64))[:, 0]))
    chosen = list(OKABE_ITO)
    while len(chosen) < classes:
        farthest = int(nearest.argmax())
        chosen.append(tuple(int(value) for value in candidates[farthest]))
        nearest = np.minimum(nearest, distances(perceived, perceived[:, farthest]))
    return tuple(chosen[:classes])
