"""Before which blocks tokens merge, and how many: found by what schedules do to the output.

A schedule is a first and a last block and a number of steps between them: as many tokens merge before each of them, so
many that a share of the blocks' multiply-accumulates is left. From three steps in the middle of the model, the search
moves on to whatever neighbour of a schedule has a lower divergence on some images, until none has: it begins or ends a
block earlier or later, or has a step more or less. Every share starts from what was best for the share before it. So
few choices are all that some hundred images can tell apart.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pmvit.adaptive import rounds
from pmvit.measuring.flops import ModelCost, elementwise_macs

SHARES = (0.8, 0.7, 0.6, 0.5, 0.42)  # of the blocks' multiply-accumulates, for which schedules are searched
STEP_WORTH = 1.02  # one step more has to lower the divergence by so much: comparing tokens takes time
WORSE = 1.05  # a schedule that is so much worse for a few images is not tried on all
BETTER = 0.98  # a schedule is better if its divergence is so much lower: less is chance


class Schedule(NamedTuple):
    """How many tokens merge before each block, for a share of the work.

    Attributes:
        share: Of the blocks' multiply-accumulates, that are left.
        merges: Before each block.
        divergence: Of the output from the original's on the images that were tried, in nats; of other outputs than
            logits, half the squared distance.
    """

    share: float
    merges: tuple[int, ...]
    divergence: float


class Tokens(NamedTuple):
    """What has to be known of the tokens of a model, and how they are compared, to count multiply-accumulates."""

    patches: int
    prefix: int
    numbers: int
    isolation: int


def adaptive_macs(cost: ModelCost, tokens: Tokens, merges: Sequence[int]) -> float:
    """Multiply-accumulates of a model with these merges: what `flops` will count on it."""
    total, count, whole = float(cost.outside), tokens.patches, tokens.prefix + tokens.patches
    for block, r in zip(cost.blocks, merges, strict=True):
        total += sum(_round_macs(block.width, tokens, *each) for each in rounds(count, r))
        count -= r
        total += block.macs((tokens.prefix + count) / whole)
        if count < tokens.patches:
            total += elementwise_macs(whole, tokens.prefix + count, block.width)
    return total


def _round_macs(width: int, tokens: Tokens, count: int, r: int) -> int:
    """What comparing and merging take in one round."""
    others = count // 2
    compared = (tokens.prefix + count) * width * tokens.numbers + count**2 * tokens.isolation
    return compared + (count - others) * others * tokens.numbers + others * r * (width + 2)


def fitted(shape: Sequence[float], patches: int, fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
    """The fewest merges in these proportions that fit; `None` if none do."""
    low, high = 0.0, (patches - 1) / sum(shape)

    def scaled(factor: float) -> tuple[int, ...]:
        return tuple(int(share * factor + 0.5) for share in shape)

    found = None
    for _ in range(40):
        middle = (low + high) / 2
        merges = scaled(middle)
        if sum(merges) < patches and not fits(merges):
            low = middle
        else:
            high, found = middle, merges
    return found if found is not None and sum(found) < patches and fits(found) else None


class Shape(NamedTuple):
    """As many tokens merge before each of some blocks, evenly spaced from the first to the last."""

    first: int
    last: int
    steps: int

    def weights(self, depth: int) -> tuple[float, ...]:
        """How many merge before each block, in proportion."""
        stride = (self.last - self.first) / max(self.steps - 1, 1)
        blocks = {int(self.first + stride * step + 0.5) for step in range(self.steps)}
        return tuple(float(block in blocks) for block in range(depth))

    def neighbours(self, depth: int) -> Iterator["Shape"]:
        """Shapes that differ a little."""
        first, last, steps = self
        candidates = [(first + 1, last), (first - 1, last), (first, last + 1), (first, last - 1)]
        candidates += [(first - 1, last - 1), (first + 1, last + 1)]
        shapes = [Shape(*ends, steps) for ends in candidates] + [Shape(first, last, steps + more) for more in (1, -1)]
        for shape in shapes:
            if shape.first >= 0 and shape.last < depth and 1 <= shape.steps <= shape.last - shape.first + 1:
                yield shape


class Search:
    """Finds schedules for one budget after the other.

    Args:
        cost: What the blocks cost.
        tokens: Of the model.
        divergence: What merges before each block do to the output, for all images or for a few of them.
    """

    def __init__(self, cost: ModelCost, tokens: Tokens, divergence: Callable[[tuple[int, ...], bool], float]) -> None:
        self.cost, self.tokens, self.divergence = cost, tokens, divergence
        self.depth = len(cost.blocks)
        first, last = self.depth // 3, max(2 * self.depth // 3, self.depth // 3)
        self.best = Shape(first, last, min(3, last - first + 1))
        self.known: dict[tuple[tuple[int, ...], bool], float] = {}

    def best_for(self, share: float) -> Schedule | None:
        """The best schedule that was found for this share of the blocks' work; `None` if it cannot be reached."""
        most = self.cost.outside + share * (self.cost.macs - self.cost.outside)
        lowest, improved = self._value(self.best, most), True
        while improved:
            improved = False
            for shape in self.best.neighbours(self.depth):
                if self._value(shape, most, few=True) > WORSE * self._value(self.best, most, few=True):
                    continue
                if (found := self._value(shape, most)) < BETTER * lowest:
                    self.best, lowest, improved = shape, found, True
                    break
        merges = self._merges(self.best, most)
        return None if merges is None else Schedule(share, merges, self.known[merges, False])

    def _merges(self, shape: Shape, most: float) -> tuple[int, ...] | None:
        def fits(merges: tuple[int, ...]) -> bool:
            return adaptive_macs(self.cost, self.tokens, merges) <= most

        return fitted(shape.weights(self.depth), self.tokens.patches, fits)

    def _value(self, shape: Shape, most: float, few: bool = False) -> float:
        """The divergence of a schedule, raised by what its steps are worth."""
        merges = self._merges(shape, most)
        if merges is None:
            return float("inf")
        if (merges, few) not in self.known:
            self.known[merges, few] = self.divergence(merges, few)
        return self.known[merges, few] * STEP_WORTH ** sum(r > 0 for r in merges)
