"""Windows of a token grid, as Swin has them: inside which tokens attend to each other."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = -1  # the token at a place that only fills a window up


@dataclass(frozen=True)
class Windows:
    """How a grid of rows and columns is parted: padded to whole windows and rolled, so that two blocks' overlap.

    Rolling brings tokens of opposite borders into one window. They are of different *regions*, and attention stays
    inside a region. A place of a window without a token is padding.

    Attributes:
        size: Rows and columns of a window.
        shift: Rows and columns by which the grid is rolled up and to the left.
        pad_first: Whether the grid is padded and then rolled (transformers, torchvision), or the other way (timm).
    """

    size: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    pad_first: bool = False

    @property
    def area(self) -> int:
        """Places in a window."""
        return self.size[0] * self.size[1]

    def slots(self, grid: tuple[int, ...]) -> Tensor:
        """The token at each place, (windows, area), `PADDING` where there is none."""
        tokens = torch.arange(grid[0] * grid[1]).view(grid)
        rows, columns = (-side % size for side, size in zip(grid, self.size, strict=True))
        if self.pad_first:
            tokens = F.pad(tokens, (0, columns, 0, rows), value=PADDING)
        tokens = tokens.roll((-self.shift[0], -self.shift[1]), (0, 1))
        if not self.pad_first:
            tokens = F.pad(tokens, (0, columns, 0, rows), value=PADDING)
        return self._part(tokens)

    def regions(self, grid: tuple[int, ...]) -> Tensor:
        """The region of each place, (windows, area); no two windows have one in common."""
        bands = []
        for side, size, shift in zip(grid, self.size, self.shift, strict=True):
            place = torch.arange(side + -side % size)
            is_rolled = (place >= len(place) - size).long() + (place >= len(place) - shift).long()
            bands.append(is_rolled if shift else torch.zeros_like(place))
        parted = self._part(3 * bands[0][:, None] + bands[1])
        return parted + 9 * torch.arange(len(parted))[:, None]

    def places(self, grid: tuple[int, ...]) -> Tensor:
        """The place of each token of the grid among those of all windows."""
        slots = self.slots(grid).flatten()
        is_token = slots != PADDING
        places = torch.empty(grid[0] * grid[1], dtype=torch.long)
        places[slots[is_token]] = torch.nonzero(is_token).flatten()
        return places

    def to_grid(self, values: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Numbers for every place of the windows of a batch, (batch * windows, area), as (batch, tokens)."""
        places = self.places(grid).to(values.device)
        num_windows = len(self.slots(grid))
        return values.reshape(-1, num_windows * self.area)[:, places]

    def _part(self, places: Tensor) -> Tensor:
        (height, width), (rows, columns) = places.shape, self.size
        parted = places.view(height // rows, rows, width // columns, columns).transpose(1, 2)
        return parted.reshape(-1, self.area)


@dataclass(frozen=True)
class Budget:
    """How many tokens each window of a grid may keep. Windows run as one batch, so all keep the same number of places.

    A place holds a token or padding. A window that has padding keeps one place for it, because it is attended to.

    Attributes:
        tokens: How many tokens each window has.
        padding: How many places without a token each window has.
    """

    tokens: Tensor
    padding: Tensor

    @staticmethod
    def of(windows: Windows, grid: tuple[int, ...]) -> "Budget":
        slots = windows.slots(grid)
        tokens = (slots != PADDING).sum(1)
        return Budget(tokens, windows.area - tokens)

    @property
    def area(self) -> int:
        """Places in a window."""
        return int(self.tokens[0] + self.padding[0])

    @property
    def least(self) -> int:
        """The fewest places that every window can keep: one for a token and, if any window has padding, one for it."""
        return 2 if self.padding.any() else 1

    def kept(self, places: int) -> Tensor:
        """How many tokens each window keeps if all windows keep so many places."""
        return torch.minimum(self.tokens, places - self.padding.clamp(max=1))

    def at_most(self, num_kept: int) -> int:
        """The most places a window with which no more than `num_kept` tokens are kept in all."""
        fitting = [places for places in range(self.least, self.area + 1) if int(self.kept(places).sum()) <= num_kept]
        return fitting[-1] if fitting else self.least

    def places(self, kept: Tensor) -> int | None:
        """The places a window with which each window keeps these numbers of tokens; `None` if no number fits all."""
        asked = torch.where(self.padding > 0, kept + 1, kept)[(self.padding == 0) | (kept < self.tokens)]
        places = int(asked[0]) if len(asked) else self.area
        left = places - kept
        fits = (left >= self.padding.clamp(max=1)) & (left <= self.padding)
        return places if bool(fits.all()) else None
