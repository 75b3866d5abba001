"""What is measured of models: its titles in tables and charts, its unit, and which of it says how good a model is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pmvit.numbers.tables import format_number


@dataclass(frozen=True)
class Measure:
    """One thing that is measured.

    Attributes:
        title: In tables.
        full_title: Where there is room.
        is_share: Whether it goes from 0 to 1 and is shown in percent.
        counts_images: Whether it is a share of images that are each right or wrong, so that Wilson's interval holds.
    """

    title: str
    full_title: str
    is_share: bool = True
    counts_images: bool = False

    def against(self, reference: str) -> str:
        """The full title where a model is compared with something else than its original, perhaps."""
        return self.full_title.replace(REFERENCES["original"], reference)

    def text(self, value: float | None) -> str:
        """A measured value in a table."""
        return format_number(value, ".2%" if self.is_share else ".4f")

    @property
    def factor(self) -> int:
        """What values are multiplied with on an axis."""
        return 100 if self.is_share else 1

    @property
    def axis_title(self) -> str:
        """Beside an axis."""
        return f"{self.title} (%)" if self.is_share else self.title


# What a model is compared with: its original; its own weights, changed since it was compressed; something else.
REFERENCES = {"original": "the original", "uncompressed": "the same weights uncompressed", "other": "another model"}
MEASURES = {
    "top1": Measure("top-1", "top-1 accuracy", counts_images=True),
    "top5": Measure("top-5", "top-5 accuracy", counts_images=True),
    "miou": Measure("mIoU", "mean IoU"),
    "pixel_accuracy": Measure("pixel accuracy", "pixel accuracy"),
    "cross_entropy": Measure("cross-entropy", "cross-entropy", is_share=False),
    "agreement": Measure("agreement", "agreement with the original", counts_images=True),
    "pixel_agreement": Measure("pixel agreement", "pixels that agree with the original"),
    "kl": Measure("KL", "KL divergence from the original", is_share=False),
    "cosine": Measure("cosine", "cosine to the output of the original", is_share=False),
}
QUALITIES = ("top1", "miou", "cosine", "kl", "agreement", "pixel_agreement")  # the first that was measured decides

IN_POINTS = ("top1", "miou", "agreement", "pixel_agreement", "cosine")  # the same for what a loss in points is of


def main_measure(measured: Mapping[str, Any]) -> str | None:
    """The measure that says how good a model is: accuracy where there are labels, else nearness to the original."""
    return next((name for name in QUALITIES if measured.get(name) is not None), None)


class WithQuality:
    """What evaluations of all kinds have in common: the measure that says how good the model is."""

    @property
    def quality(self) -> float | None:
        """How good the model is by its main measure; more is better, so that a divergence counts as negative."""
        name = main_measure(vars(self))
        return None if name is None else float(vars(self)[name]) * (-1 if name == "kl" else 1)

    @property
    def headline(self) -> str:
        """The main measure and its value, as `top-1 72.15%`."""
        name = main_measure(vars(self))
        return "nothing measured" if name is None else f"{MEASURES[name].title} {MEASURES[name].text(vars(self)[name])}"
