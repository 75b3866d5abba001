"""`TokenMetric`: how much it matters for the output how tokens differ, which adaptive plans compare tokens by.

The gradient `g` of the output (of a random direction of it, see `probe`) at every patch token that enters block l has
the second moment `F_l = mean of g g^T`. To second order, changing a token by `d` changes the output by `d^T F_l d / 2`
nats. The largest eigenvectors of `F_l`, times the square root of their eigenvalue, are the columns of `P_l`.

Before which blocks it is best to merge is then tried out on some of the images (see `schedules`).
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.adaptive import adaptive_blocks
from pmvit.config import MetricConfig
from pmvit.data.batches import unreadable
from pmvit.errors import PmvitError
from pmvit.files import check_fields, config_from, parse_document
from pmvit.hosts import Host, HostChange, host_of
from pmvit.hosts.modes import check_trainable, evaluation_mode, frozen_parameters
from pmvit.hosts.outputs import predict
from pmvit.measuring.cost_run import first_batches, probe
from pmvit.measuring.flops import BlockCost, ModelCost, model_cost
from pmvit.measuring.listener import precise
from pmvit.measuring.schedules import SHARES, Schedule, Search, Tokens, adaptive_macs
from pmvit.progress import Bar
from pmvit.tensors import read_tensors, read_texts, write_tensors
from pmvit.wrapping import compression_of, fingerprint

FORMAT, VERSION = "pmvit-metric", 1
HEADER, PROJECTIONS = "metric", "projections"  # in the file
FIELDS = ("schedules", "grid", "num_prefix", "cost", "config", "images", "model", "data", "skip")


@dataclass(frozen=True, eq=False)
class TokenMetric:
    """What adaptive plans are made from.

    Attributes:
        projections: `P_l` of each block, (blocks, width, numbers).
        schedules: How many tokens merge best before each block, for some budgets.
        grid: Rows and columns of the patch grid.
        num_prefix: Tokens before the patch tokens; they never merge.
        cost: What each block of the model costs.
        config: How it was measured.
        images: Images that were used.
        model: Fingerprint of the measured weights.
        data: What the images were read from.
        skip: Blocks of the model before which nothing merges unless a plan is told otherwise.
    """

    projections: Tensor
    schedules: tuple[Schedule, ...]
    grid: tuple[int, int]
    num_prefix: int
    cost: ModelCost
    config: MetricConfig
    images: int
    model: str
    data: str
    skip: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return len(self.cost.blocks)

    @property
    def num_patches(self) -> int:
        """Patch tokens of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> Tokens:
        """What multiply-accumulates are counted by."""
        return Tokens(self.num_patches, self.num_prefix, self.projections.shape[-1], self.config.isolation)

    def macs(self, merges: Sequence[int]) -> float:
        """Multiply-accumulates of the model with so many merges before each block: what `flops` will count on it."""
        return adaptive_macs(self.cost, self.tokens, merges)

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
        document = parse_document(text, FORMAT, VERSION, where)
        check_fields(document, ("format", "version", *FIELDS), where)
        try:
            height, width = (int(side) for side in document["grid"])
            cost = ModelCost(document["cost"]["outside"], tuple(BlockCost(**b) for b in document["cost"]["blocks"]))
            schedules = tuple(
                Schedule(float(share), tuple(int(r) for r in merges), float(found))
                for share, merges, found in document["schedules"]
            )
            skip = tuple(int(index) for index in document["skip"])
            prefix, images = int(document["num_prefix"]), int(document["images"])
        except (TypeError, ValueError, KeyError) as error:
            raise PmvitError(f"{where}: the metric is malformed ({error}): measure the model again") from None
        metric = TokenMetric(
            projections=projections,
            schedules=schedules,
            grid=(height, width),
            num_prefix=prefix,
            cost=cost,
            config=config_from(MetricConfig, document["config"], f"{where}: config"),
            images=images,
            model=str(document["model"]),
            data=str(document["data"]),
            skip=skip,
        )
        _check(metric, where)
        return metric

    def save(self, path: str | Path) -> None:
        """Write the metric as safetensors, with what else it is made of as JSON in its header."""
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


def is_metric(path: str | Path) -> bool:
    """Whether a file is no JSON, but may hold a metric."""
    return Path(path).suffix == ".safetensors"


def _check(metric: TokenMetric, where: str) -> None:
    """See that the parts of a metric fit each other."""
    widths = {block.width for block in metric.cost.blocks}
    shape = tuple(metric.projections.shape)
    if len(shape) != 3 or shape[0] != metric.depth or {shape[1]} != widths or shape[2] < metric.config.isolation:
        raise PmvitError(
            f"{where}: expected projections for {metric.depth} blocks of width {', '.join(map(str, widths))}, got "
            f"{shape}: is it for another model?"
        )
    if not torch.isfinite(metric.projections).all():
        raise PmvitError(f"{where}: expected finite projections, got others: measure the model again")
    if metric.num_patches < 2 or metric.num_prefix < 0:
        raise PmvitError(f"{where}: expected a grid of several patches, got {metric.grid}: measure the model again")
    if not metric.schedules:
        raise PmvitError(f"{where}: expected schedules of merges, got none: measure the model again")
    for share, merges, found in metric.schedules:
        fits = len(merges) == metric.depth and min(merges) >= 0 and 0 < sum(merges) < metric.num_patches
        if not fits or not (0 < share < 1 and math.isfinite(found)):
            raise PmvitError(
                f"{where}: expected merges before {metric.depth} blocks that leave one of {metric.num_patches} tokens, "
                f"got {merges}: measure the model again"
            )


def check_attends_everywhere(host: Host) -> None:
    """Raise `PmvitError` if tokens of a model cannot merge wherever they are in the image."""
    if any(other != host.layout or other.windows is not None for other in host.layouts()):
        raise PmvitError(
            f"expected attention over the whole of one grid for an adaptive plan; a {type(host.model).__name__} "
            'attends inside windows: make a fixed plan, method="scored"'
        )


def measure_metric(
    model: nn.Module, loader: Iterable[Any], config: MetricConfig, *, progress: bool = True
) -> TokenMetric:
    """Measure how much differences of tokens matter before each block, without labels; the model is left as it was.

    Args:
        model: An uncompressed model.
        loader: Yields `(images, labels)` or images.
        config: How to measure.
        progress: Show a progress bar.

    Raises:
        PmvitError: If the model attends inside windows, what is measured is not finite, or the input does not fit.
    """
    if compression_of(model) is not None:
        raise PmvitError("expected an uncompressed model to measure; this one is compressed: measure the original")
    check_trainable(model)
    host = host_of(model)
    check_attends_everywhere(host)
    layout = host.layout
    batches = list(first_batches(loader, config.limit))
    if not batches:
        raise PmvitError(f"expected at least one batch of images; the loader is empty{unreadable(loader)}")
    with ExitStack() as states:
        states.enter_context(evaluation_mode(model))
        states.enter_context(frozen_parameters(model))
        moments = _second_moments(model, host, batches, config, progress)
        projections = torch.stack([square_root(moment, config.numbers) for moment in moments])
        cost = model_cost(model)
        schedules = _schedules(model, host, projections, _few(batches, config.trial_images), cost, config, progress)
    return TokenMetric(
        projections=projections,
        schedules=schedules,
        grid=layout.grid,
        num_prefix=layout.num_prefix,
        cost=cost,
        config=config,
        images=sum(map(len, batches)),
        model=fingerprint(model),
        data=str(getattr(loader, "name", type(loader).__name__)),
        skip=host.reading().default_skip,
    )


def square_root(moment: Tensor, numbers: int) -> Tensor:
    """The largest eigenvectors of a symmetric matrix, each times the square root of its eigenvalue, largest first."""
    values, vectors = torch.linalg.eigh(moment)
    largest: Tensor = values[-numbers:].clamp_min(0).sqrt() * vectors[:, -numbers:]
    return largest.flip(-1).float().contiguous()


def _second_moments(
    model: nn.Module, host: Host, batches: list[Tensor], config: MetricConfig, progress: bool
) -> list[Tensor]:
    """The mean of `g g^T` over patch tokens and images, at what enters each block."""
    names, layout = host.block_names(), host.layout
    is_logits = host.outputs().gives_logits
    generator = torch.Generator().manual_seed(config.seed)
    sums: list[Tensor | None] = [None] * len(names)

    def add(index: int, gradient: Tensor) -> None:
        rows = precise(gradient).flatten(1, -2)[:, layout.num_prefix :].flatten(0, 1)
        moment = (rows.T @ rows).double()
        known = sums[index]
        sums[index] = moment if known is None else known + moment

    def listen(index: int) -> Any:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens = arguments[0]
            if not tokens.requires_grad:
                tokens = tokens.detach().requires_grad_()
            tokens.register_hook(lambda gradient: add(index, gradient))
            return (tokens, *arguments[1:])

        return hook

    with ExitStack() as states:
        states.enter_context(host.observed())
        for index, name in enumerate(names):
            handle = model.get_submodule(name).register_forward_pre_hook(listen(index))
            states.callback(handle.remove)
        bar = states.enter_context(Bar("measure", len(batches), show=progress))
        for images in batches:
            with torch.inference_mode(False), torch.enable_grad():
                output = predict(model, images.to(next(model.parameters()).device))
                (probe(output, is_logits, generator) * output).sum().backward()
            bar.advance()
    count = sum(map(len, batches)) * layout.num_patches
    result = []
    for index, moment in enumerate(sums):
        if moment is None or not torch.isfinite(moment).all():
            reason = "no gradient arrives" if moment is None else "what is measured is not finite"
            raise PmvitError(f"block {index}: {reason}: does the output depend on it, and is it finite?")
        result.append(moment.cpu() / count)
    return result


def _few(batches: list[Tensor], count: int) -> list[Tensor]:
    """The first images of batches."""
    result = []
    for images in batches:
        result.append(images[:count])
        count -= len(images)
        if count <= 0:
            break
    return result


@contextmanager
def merging(
    model: nn.Module, merges: Sequence[int], projections: Tensor, isolation: int, size_weight: float
) -> Iterator[None]:
    """Let tokens merge before the blocks of a model for a while."""
    host = host_of(model)
    names, layout = host.block_names(), host.layout
    blocks = [model.get_submodule(name) for name in names]
    wrappers = adaptive_blocks(
        blocks,
        merges,
        projections,
        layout.num_patches,
        layout.num_prefix,
        isolation=isolation,
        size_weight=size_weight if host.takes_attention_bias else 0.0,
        arguments_at_centres=host.arguments_at_centres,
    )
    changes: list[HostChange] = []
    try:
        for index, wrapper in wrappers.items():
            changes += host.fit(wrapper, layout)
            host.answer_like(wrapper, blocks[index])
            model.set_submodule(names[index], wrapper)
        yield
    finally:
        for change in reversed(changes):
            change.undo()
        for index in wrappers:
            model.set_submodule(names[index], blocks[index])


def divergences(output: Tensor, original: Tensor, is_logits: bool) -> Tensor:
    """The divergence of the predictions for each image, in nats; of other outputs, half their squared distance."""
    output, original = precise(output), precise(original)
    if not is_logits:
        return (output - original).square().flatten(1).sum(1) / 2
    log, expected = output.log_softmax(-1), original.log_softmax(-1)
    of_places = (expected.exp() * (expected - log)).sum(-1)
    return of_places if of_places.dim() == 1 else of_places.flatten(1).mean(1)


@torch.no_grad()
def _schedules(
    model: nn.Module,
    host: Host,
    projections: Tensor,
    batches: list[Tensor],
    cost: ModelCost,
    config: MetricConfig,
    progress: bool,
) -> tuple[Schedule, ...]:
    """Search for schedules by what they do to the output for these images."""
    is_logits, device = host.outputs().gives_logits, next(model.parameters()).device
    expected = [predict(model, batch.to(device)) for batch in batches]

    def tried(merges: tuple[int, ...], few: bool) -> float:
        used = batches[: max(len(batches) // 4, 1)] if few else batches
        with merging(model, merges, projections, config.isolation, config.size_weight):
            found = [
                divergences(predict(model, batch.to(device)), original, is_logits)
                for batch, original in zip(used, expected, strict=False)
            ]
        return float(torch.cat(found).mean())

    layout = host.layout
    search = Search(cost, Tokens(layout.num_patches, layout.num_prefix, projections.shape[-1], config.isolation), tried)
    schedules = []
    with Bar("try schedules", len(SHARES), show=progress) as bar:
        for share in SHARES:
            schedules.append(search.best_for(share))
            bar.advance()
    found = tuple(schedule for schedule in schedules if schedule is not None)
    if not found or not all(math.isfinite(schedule.divergence) for schedule in found):
        raise PmvitError(
            f"expected several blocks on several patches, and finite outputs; got {layout.num_patches} patches"
        )
    return found
