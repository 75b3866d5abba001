"""`TokenMetric`: how much it matters for the output how tokens differ, which adaptive plans compare tokens by."""

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pmvit.config import MetricConfig
from pmvit.errors import PmvitError, PmvitWarning
from pmvit.files import check_fields, config_from, parse_document
from pmvit.measuring.flops import BlockCost, ModelCost, elementwise_macs
from pmvit.tensors import read_tensors, read_texts, write_tensors

FORMAT, VERSION = "pmvit-metric", 4
HEADER, PROJECTIONS = "metric", "projections"  # in the file
FIELDS = ("grid", "num_prefix", "cost", "spares_last_mlp", "config", "images", "model", "data")


@dataclass(frozen=True, eq=False)
class TokenMetric:
    """What adaptive plans are made from.

    Attributes:
        projections: `P_l` of each block, (blocks, width, rank).
        grid: Patches along each axis of their grid.
        num_prefix: Tokens before the patch tokens; they never merge.
        cost: What each block of the model costs.
        spares_last_mlp: Nobody reads patch tokens behind the last block, whose MLP then runs on one in their place.
        config: How it was measured.
        images: Images that were used.
        model: Fingerprint of the measured weights.
        data: What the images were read from.
    """

    projections: Tensor
    grid: tuple[int, ...]
    num_prefix: int
    cost: ModelCost
    spares_last_mlp: bool
    config: MetricConfig
    images: int
    model: str
    data: str

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return len(self.cost.blocks)

    @property
    def num_patches(self) -> int:
        """Patch tokens of an image."""
        return math.prod(self.grid)

    def left(self, merges: Sequence[int]) -> tuple[int, ...]:
        """Patch tokens, or groups of them, that each block runs on with so many merges before it."""
        return tuple(self.num_patches - merged for merged in accumulate(merges))

    def macs(self, merges: Sequence[int]) -> float:
        """Multiply-accumulates of the model with so many merges before each block: what `flops` will count on it."""
        whole, before = self.num_prefix + self.num_patches, self.num_patches
        total = float(self.cost.outside)
        for index, (block, r, left) in enumerate(zip(self.cost.blocks, merges, self.left(merges), strict=True)):
            total += self._step_macs(block.width, before, r) if r else 0
            before, share = left, (self.num_prefix + left) / whole
            attention, mlp = block.halves()
            spared = self.spares_last_mlp and index == self.depth - 1 and left < self.num_patches
            total += attention.macs(share) + mlp.macs((self.num_prefix + 1) / whole if spared else share)
            if left < self.num_patches:
                total += elementwise_macs(whole, self.num_prefix + left, block.width)
        return total

    def _step_macs(self, width: int, count: int, r: int) -> int:
        """What projecting, comparing and merging take in a step."""
        rank, whole = self.projections.shape[-1], self.num_prefix + count
        return whole * width * rank + whole**2 * rank + (whole - r) * r * (width + 2)

    def to_json(self) -> str:
        """All but the projections."""
        data = {name: getattr(self, name) for name in FIELDS}
        described = {**data, "cost": asdict(self.cost), "config": asdict(self.config)}
        return json.dumps({"format": FORMAT, "version": VERSION, **described})

    @staticmethod
    def from_json(text: str, projections: Tensor, where: str = "metric") -> "TokenMetric":
        """The metric that `to_json` described, with its projections.

        Raises:
            PmvitError: If it is not a whole and consistent metric.
        """
        document = _upgrade(parse_document(text, FORMAT, VERSION, where), where)
        check_fields(document, ("format", "version", *FIELDS), where)
        try:
            grid = tuple(int(side) for side in document["grid"])
            cost = ModelCost(document["cost"]["outside"], tuple(BlockCost(**b) for b in document["cost"]["blocks"]))
            prefix, images = int(document["num_prefix"]), int(document["images"])
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise PmvitError(f"{where}: the metric is malformed ({error}): measure the model again") from None
        metric = TokenMetric(
            projections=projections,
            grid=grid,
            num_prefix=prefix,
            cost=cost,
            spares_last_mlp=bool(document["spares_last_mlp"]),
            config=config_from(MetricConfig, document["config"], f"{where}: config"),
            images=images,
            model=str(document["model"]),
            data=str(document["data"]),
        )
        _check(metric, where)
        return metric

    def save(self, path: str | Path) -> None:
        """Write the metric as safetensors, with what else it is made of as JSON in its header."""
        expect_safetensors(path)
        write_tensors(Path(path), {PROJECTIONS: self.projections}, {HEADER: self.to_json()})

    @staticmethod
    def load(path: str | Path) -> "TokenMetric":
        """Read what `save` wrote.

        Raises:
            PmvitError: If the file is not a whole and consistent metric.
        """
        tensors, texts = read_tensors(Path(path)), read_texts(Path(path))
        if HEADER not in texts or PROJECTIONS not in tensors:
            raise PmvitError(f"expected a metric that pmvit measured at {path}; got another safetensors file")
        return TokenMetric.from_json(texts[HEADER], tensors[PROJECTIONS], str(path))


def expect_safetensors(path: str | Path) -> None:
    """Raise `PmvitError` unless a file is called what it will be: by their ends, files of both kinds are told apart."""
    if Path(path).suffix != ".safetensors":
        raise PmvitError(
            f"expected a name that ends in .safetensors for there are tensors in it; got {Path(path).name}"
        )


def is_metric(path: str | Path) -> bool:
    """Whether a file is no JSON, but may hold a metric."""
    return Path(path).suffix == ".safetensors"


def _upgrade(document: dict[str, Any], where: str) -> dict[str, Any]:
    """A document as today's version has it, with a warning that tokens merge otherwise than when it was written."""
    if document["version"] > 3 or not isinstance(document.get("config"), dict):
        return document
    warnings.warn(
        f"{where} is of a version that chose in rounds which tokens merge; now each joins the cheapest of all that "
        "stay, which keeps more, but other tokens merge than when it was saved",
        PmvitWarning,
        stacklevel=2,
    )
    config = {name: value for name, value in document["config"].items() if name != "matchings"}
    document = {**document, "config": config}
    if document["version"] > 1:
        return document
    config = {"rank" if name == "numbers" else name: value for name, value in document["config"].items()}
    config.pop("trial_images", None)
    if config.pop("isolation", 0):
        raise PmvitError(f"{where}: tokens are no longer split by isolation, as this metric asks for: measure it again")
    kept = {name: value for name, value in document.items() if name not in ("skip", "schedules")}
    return {**kept, "config": config, "spares_last_mlp": False}


def _check(metric: TokenMetric, where: str) -> None:
    """See that the parts of a metric fit each other."""
    widths = {block.width for block in metric.cost.blocks}
    shape = tuple(metric.projections.shape)
    if len(shape) != 3 or shape[0] != metric.depth or {shape[1]} != widths:
        raise PmvitError(
            f"{where}: expected projections for {metric.depth} blocks of width {', '.join(map(str, widths))}, got "
            f"{shape}: is it for another model?"
        )
    if not torch.isfinite(metric.projections).all():
        raise PmvitError(f"{where}: expected finite projections, got others: measure the model again")
    if metric.num_patches < 2 or min(metric.grid) < 1 or metric.num_prefix < 0:
        raise PmvitError(f"{where}: expected a grid of several patches, got {metric.grid}: measure the model again")
