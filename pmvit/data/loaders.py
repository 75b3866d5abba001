"""Loaders of `(images, labels)` for measuring and evaluation; how an image is read, and what a worker is."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pmvit.data.masks import Mask
from pmvit.data.segmentation import PairSource
from pmvit.data.sources import BROKEN_IMAGE, Sample, Source, Stream, reader_part
from pmvit.data.transforms import Preparation, color_mode, evaluation_transform
from pmvit.errors import PmvitError

SECONDS_AFTER_TERM = 30.0  # that a worker stays after SIGTERM
NICENESS = 10  # of a worker: where cores are few, it reads while the main process waits

Transform = Callable[..., Any]  # an `ImageTransform`, or a `PairTransform` where there are masks


@dataclass
class Broken:
    """Images that could not be read: their names, and why, in the order they came up."""

    files: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.files)

    def summary(self, most: int = 5, what: str = "skipped") -> str:
        """A few lines that count and name them."""
        lines = [f"{len(self)} broken image{'s' if len(self) != 1 else ''} {what}:"]
        lines += [f"  {name} ({reason})" for name, reason in list(self.files.items())[:most]]
        if len(self) > most:
            lines.append(f"  and {len(self) - most} more")
        return "\n".join(lines)


class Prepared(NamedTuple):
    """A sample that is ready for a model, or the reason why it cannot be read."""

    image: Tensor | str
    label: int | Tensor | None
    name: str


def prepare(sample: Sample, transform: Transform, mode: str) -> Prepared:
    """Decode and transform an image, with its mask if it has one; if the image is broken, say why."""
    try:
        image = sample.open(mode)
        if not isinstance(sample.label, Mask):
            return Prepared(transform(image), sample.label, sample.name)
    except BROKEN_IMAGE as error:
        return Prepared(f"{type(error).__name__}: {error}", None, sample.name)
    pixels, labels = transform(image, sample.label.read((image.height, image.width)))
    return Prepared(pixels, labels, sample.name)


@dataclass(eq=False)
class Images(Dataset[Prepared]):
    """The images of a source by number, prepared."""

    source: Source
    transform: Transform
    mode: str

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Prepared:
        return prepare(self.source[index], self.transform, self.mode)


@dataclass(eq=False)
class _StreamedImages(IterableDataset[Prepared]):
    """Each training process reads its own parts of a stream, each of its workers some of these."""

    stream: Stream
    transform: Transform
    mode: str
    process: tuple[int, int]

    def __iter__(self) -> Iterator[Prepared]:
        for sample in self.stream.samples(*reader_part(self.process), None):
            yield prepare(sample, self.transform, self.mode)


class ImageLoader:
    """Batches of `(images, labels)`, or of images where there are no labels. Broken images are left out.

    Attributes:
        name: Which images these are, in which batches.
        has_labels: Whether there are labels.
        broken: What was left out so far.
    """

    def __init__(self, loader: DataLoader[Any], has_labels: bool, strict: bool, name: str) -> None:
        self.strict = strict
        self.name = name
        self.has_labels = has_labels
        self.broken = Broken()
        self._loader = loader

    def __len__(self) -> int:
        if isinstance(self._loader.dataset, IterableDataset):
            raise TypeError("a stream has no length")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for items in plain_errors(self._loader):
            good = [item for item in items if isinstance(item.image, Tensor)]
            broken = {item.name: item.image for item in items if isinstance(item.image, str)}
            if broken and self.strict:
                name, reason = next(iter(broken.items()))
                raise PmvitError(f"expected an image, got a file that cannot be read: {name} ({reason})")
            self.broken.files.update(broken)
            if good:
                images = torch.stack([item.image for item in good])
                yield (images, stack_labels(good)) if self.has_labels else images


def stack_labels(items: Iterable[Prepared]) -> Tensor | None:
    """The labels of a batch, of images or of their pixels; `None` if there are none."""
    known = [torch.as_tensor(item.label) for item in items if item.label is not None]
    return torch.stack(known) if known else None


def plain_errors(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader; an error of ours that comes from a worker, without the traceback it comes with."""
    try:
        yield from loader
    except PmvitError as error:
        raise PmvitError(str(error).strip().splitlines()[-1].partition("PmvitError: ")[2] or str(error)) from None


def create_loader(
    source: Source | Stream,
    data_config: dict[str, Any],
    *,
    whole: bool = False,
    batch_size: int | None = None,
    workers: int = 2,
    shuffle: bool = False,
    seed: int = 0,
    strict: bool = False,
    limit: int | None = None,
    process: int = 0,
    processes: int = 1,
) -> ImageLoader:
    """Make a loader of images, prepared as the model's data configuration says.

    Args:
        source: Where the images come from: what `open_source` or, for images with masks, `open_pairs` returns.
        data_config: Size, mean, interpolation and so on, as timm has them for a model.
        whole: Images with masks whole and one at a time, with labels at the size of their file; else both are cropped
            to the size of the model.
        batch_size: Images per batch; 64 if not given, 8 with masks.
        workers: Processes that read images.
        shuffle: Take the images in an order that depends only on the seed; not for streams.
        seed: For `shuffle`.
        strict: A broken image is an error instead of being left out.
        limit: Take so many images at most.
        process: Which of `processes` this is: each batch is split among them.
        processes: How many processes share the images.
    """
    mode, has_masks = color_mode(data_config), isinstance(source, PairSource)
    whole = whole and has_masks
    size = batch_size or (8 if has_masks else 64)
    name = f"{source.name} whole" if whole else f"{source.name} in batches of {size}, seed {seed}"
    if has_masks:
        preparation = Preparation.of(data_config)
        transform: Transform = preparation.whole_pair if whole else preparation.centre_pair
    else:
        transform = evaluation_transform(data_config)
    options: dict[str, Any] = {"collate_fn": list, "worker_init_fn": begin_worker}
    if isinstance(source, Stream):
        if limit is not None:
            raise PmvitError(f"limit: expected for what can be counted; {source.name} is a stream: name fewer shards")
        images = _StreamedImages(source, transform, mode, (process, processes))
        options["num_workers"] = check_parts(source, workers, processes)
        return ImageLoader(DataLoader(images, size, **options), source.has_labels, strict, name)
    order = list(range(len(source)))
    if shuffle:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).tolist()
    order = order[:limit]
    if whole:
        shares = [[index] for index in order[process::processes]]
    else:
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        shares = [batch[process::processes] for batch in batches if len(batch) >= processes]  # as many for all of them
    options |= {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(Images(source, transform, mode), batch_sampler=shares, **options)
    return ImageLoader(loader, source.has_labels, strict, name)


def check_parts(stream: Stream, workers: int, processes: int) -> int:
    """How many workers of each process a stream can serve.

    Raises:
        PmvitError: If it has fewer parts than there are processes.
    """
    if stream.num_parts < processes:
        raise PmvitError(
            f"expected at least {processes} shards in {stream.name}, one per process; got {stream.num_parts}: "
            "write the data in more shards"
        )
    return min(workers, stream.num_parts // processes)


def begin_worker(_worker: int) -> None:
    """In a worker: give way to the main process, and let a signal that all processes get stop that one first.

    Ctrl-C is left to the main process; after SIGTERM the worker stays for as long as a checkpoint may take.
    """
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    timer = threading.Timer(SECONDS_AFTER_TERM, os._exit, (0,))
    timer.daemon = True
    signal.signal(signal.SIGTERM, lambda _number, _frame: None if timer.is_alive() else timer.start())
