"""Numbers as people read them."""

from collections.abc import Sequence

TITLES = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "miou": "mean IoU",
    "pixel_accuracy": "pixel accuracy",
    "cross_entropy": "cross-entropy",
    "agreement": "agreement with the original",
    "pixel_agreement": "pixels that agree with the original",
    "kl": "KL divergence from the original",
    "cosine": "cosine to the original's output",
}
DIGITS = {"cosine": 4}  # of numbers that are no shares; 3 for the others
IN_PERCENT = ("top1", "top5", "miou", "pixel_accuracy", "agreement", "pixel_agreement")
QUALITIES = ("top1", "miou", "agreement", "pixel_agreement", "cosine")  # the first that was measured is the headline
VARIANTS = {
    "original": "original",
    "compressed": "compressed",
    "optimized": "compressed, optimised for inference",
    "bound": "equal-token bound",
}


def number(name: str, value: float) -> str:
    """A measured number, with its unit."""
    return f"{100 * value:.1f} %" if name in IN_PERCENT else f"{value:.{_digits(name)}f}"


def interval(name: str, estimate: Sequence[float] | None) -> str:
    """The ends of an interval, in the unit of its number; nothing if it has none."""
    if estimate is None or estimate[1] is None or estimate[1] == estimate[2] == estimate[0]:
        return ""
    factor, digits = (100, 1) if name in IN_PERCENT else (1, _digits(name))
    return f"{factor * estimate[1]:.{digits}f} – {factor * estimate[2]:.{digits}f}"


def change(name: str, value: float) -> str:
    """A difference with its sign; of shares in points."""
    return signed(100 * value, 1) + " points" if name in IN_PERCENT else signed(value, _digits(name))


def change_interval(name: str, estimate: Sequence[float] | None) -> str:
    """The ends of the interval of a difference."""
    if estimate is None or estimate[1] is None:
        return ""
    factor, digits = (100, 1) if name in IN_PERCENT else (1, _digits(name))
    return f"{signed(factor * estimate[1], digits)} to {signed(factor * estimate[2], digits)}"


def _digits(name: str) -> int:
    return DIGITS.get(name, 3)


def signed(value: float, digits: int) -> str:
    """A number with its sign, minus as typesetters have it."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def times(ratio: Sequence[float]) -> str:
    return f"{ratio[0]:.2f}×"


def times_interval(ratio: Sequence[float]) -> str:
    return f"{ratio[1]:.2f} – {ratio[2]:.2f}"
