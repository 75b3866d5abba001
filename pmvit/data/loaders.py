"""Loaders of `(images, labels)` for measuring and evaluation; how an image is read, and what a worker is."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pmvit.data.batches import TrainingBatch, described
from pmvit.data.generated import GeneratedImages
from pmvit.data.samples import BROKEN_IMAGE, Mask, Sample
from pmvit.data.seeding import seeded
from pmvit.data.sources import Source, Stream, has_pixel_labels, reader_part
from pmvit.data.transforms import Preparation, color_mode, evaluation_transform
from pmvit.errors import PmvitError

SECONDS_AFTER_TERM = 30.0  # that a worker stays after SIGTERM
NICENESS = 10  # of a worker: where cores are few, it reads while the main process waits

Transform = Callable[..., Any]  # of an image, or of an image and its mask
Reader = Callable[..., "Prepared"]  # `prepare` with its first arguments, for a sample and perhaps a seed


class Broken(dict[str, str]):
    """Images that could not be read: their names, and why, in the order they came up."""

    def summary(self, most: int = 5, what: str = "skipped") -> str:
        """A few lines that count and name them."""
        lines = [f"{len(self)} broken image{'s' if len(self) != 1 else ''} {what}:"]
        lines += [f"  {name} ({reason})" for name, reason in list(self.items())[:most]]
        if len(self) > most:
            lines.append(f"  and {len(self) - most} more")
        return "\n".join(lines)


class Prepared(NamedTuple):
    """A sample that is ready for a model, or the reason why it cannot be read."""

    image: Tensor | str
    label: int | Tensor | None
    name: str


def prepare(transform: Transform, mode: str, sample: Sample, seed: int | None = None) -> Prepared:
    """Decode and transform an image, with its mask if it has one; if the image is broken, say why.

    One that came prepared is left as it is.
    """
    label, name = sample.label, sample.name
    if isinstance(sample.image, Tensor) and not isinstance(label, Mask):
        return Prepared(sample.image, label, name)
    with nullcontext() if seed is None else seeded(seed):
        try:
            image = sample.open(mode)
            if not isinstance(label, (Mask, Tensor)):
                return Prepared(transform(image), label, name)
        except BROKEN_IMAGE as error:
            return Prepared(f"{type(error).__name__}: {error}", None, name)
        size = (image.height, image.width)
        mask = label.read(size) if isinstance(label, Mask) else label
        if tuple(mask.shape) != size:
            raise PmvitError(f"{name}: expected a mask of {size[0]} x {size[1]} pixels; got {described(mask)}")
        pixels, labels = transform(image, mask)
        return Prepared(pixels, labels, name)


@dataclass(eq=False)
class Images(Dataset[Prepared]):
    """The images of a source by their number and the seed of what is random in their preparation, if anything is."""

    source: Source
    read: Reader

    def __getitem__(self, key: tuple[int, int | None]) -> Prepared:
        index, seed = key
        with nullcontext() if seed is None else seeded(seed):  # for a `Dataset` that draws when it is asked
            sample = self.source[index]
        return self.read(sample, seed)


@dataclass(eq=False)
class StreamedImages(IterableDataset[Prepared]):
    """Each training process reads its own parts of a stream, each of its workers some of these."""

    stream: Stream
    read: Reader
    process: tuple[int, int]

    def __iter__(self) -> Iterator[Prepared]:
        return map(self.read, self.stream.samples(*reader_part(self.process), None))


@dataclass(eq=False)
class ImageLoader:
    """Batches of `(images, labels)`, or of images where there are no labels.

    Broken images are left out and noted in `broken`; if `strict`, the first one is an error. `name` says which images
    these are, in which batches, and `is_generated` that they show nothing; `names` are those of the batch that came
    last.
    """

    loader: DataLoader[Any]
    has_labels: bool
    strict: bool
    name: str
    is_generated: bool = False
    broken: Broken = field(default_factory=Broken)
    names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.loader)  # a stream has none: `TypeError`

    def __iter__(self) -> Iterator[Any]:
        for batch, broken in plain_errors(self.loader):
            if broken and self.strict:
                name, reason = next(iter(broken.items()))
                raise PmvitError(f"expected an image, got a file that cannot be read: {name} ({reason})")
            self.broken.update(broken)
            if batch is not None:
                self.names = batch.names
                yield (batch.images, batch.labels) if self.has_labels else batch.images


def collate(items: list[Prepared | None], replace: bool = False) -> tuple[TrainingBatch | None, dict[str, str]]:
    """A batch, `None` of no images, and those that are broken: left out, or replaced by others of the batch."""
    read = [item for item in items if item is not None]
    broken = {item.name: item.image for item in read if isinstance(item.image, str)}
    good = [item for item in read if isinstance(item.image, Tensor)]
    if not good:
        return None, broken
    if replace:
        good = [item if isinstance(item.image, Tensor) else good[i % len(good)] for i, item in enumerate(read)]
    pixels = [item.image for item in good if isinstance(item.image, Tensor)]
    if len(sizes := {tuple(image.shape) for image in pixels}) > 1:  # prepared by others
        raise PmvitError(f"expected prepared images of one size; got {' and '.join(map(str, sorted(sizes)[:2]))}")
    images = torch.stack(pixels)
    labels = [torch.as_tensor(item.label) for item in good if item.label is not None]
    return TrainingBatch(images, torch.stack(labels) if labels else None, [item.name for item in good]), broken


def plain_errors(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader; an error of ours that comes from a worker, without the traceback it comes with."""
    failure = None
    try:
        yield from loader
    except PmvitError as error:
        failure = str(error).strip().splitlines()[-1].partition("PmvitError: ")[2] or str(error)
        # The workers end with the last reference to their iterator, which are in the traceback and here. The garbage
        # collector, if it had to find them, would close their queues first and wait ten seconds for an answer.
        traceback.clear_frames(error.__traceback__)
    if failure is not None:
        loader._iterator = None
        raise PmvitError(failure)


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
    process: tuple[int, int] = (0, 1),
) -> ImageLoader:
    """Make a loader of images, prepared as the model's data configuration says.

    Args:
        source: Where the images come from: what `open_source` or, for images with masks, `open_pairs` returns.
        data_config: Size, mean, interpolation and so on, as timm has them for a model.
        whole: Images with masks whole and one at a time, with labels at the size of their file; else both are cropped
            to the size of the model.
        batch_size: Images per batch; 64 if not given, 8 with masks.
        workers: Processes that read images.
        shuffle: Take the images in an order that depends only on `seed`; not for streams.
        strict: A broken image is an error instead of being left out.
        limit: Take so many images at most.
        process: Which of how many processes this is: each batch is split among them.
    """
    has_masks = has_pixel_labels(source)
    whole = whole and has_masks
    size = batch_size or (8 if has_masks else 64)
    name = f"{source.name} whole" if whole else f"{source.name} in batches of {size}, seed {seed}"
    pairs = Preparation(data_config)
    of_pairs = pairs.whole_pair if whole else pairs.centre_pair
    transform: Transform = of_pairs if has_masks else evaluation_transform(data_config)
    read = partial(prepare, transform, color_mode(data_config))
    if isinstance(source, Stream):
        if limit is not None:
            raise PmvitError(f"limit: expected for what can be counted; {source.name} is a stream: name fewer shards")
        loader = data_loader(StreamedImages(source, read, process), workers, batch_size=size)
        return ImageLoader(loader, source.has_labels, strict, name)
    count = len(source)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist() if shuffle else range(count)
    keys = [(index, None) for index in order[:limit]]
    number, processes = process
    if whole:
        shares = [[key] for key in keys[number::processes]]
    else:
        batches = [keys[start : start + size] for start in range(0, len(keys), size)]
        shares = [batch[number::processes] for batch in batches if len(batch) >= processes]  # as many for all of them
    loader = data_loader(Images(source, read), workers, batch_sampler=shares)
    return ImageLoader(loader, source.has_labels, strict, name, isinstance(source, GeneratedImages))


def data_loader(images: Dataset[Any], workers: int, *, replace: bool = False, **options: Any) -> DataLoader[Any]:
    """Batches that workers read, each with its broken images; `PmvitError` if a stream has too few parts for that."""
    if isinstance(images, StreamedImages):
        stream, (_, processes) = images.stream, images.process
        if stream.num_parts < processes:
            raise PmvitError(
                f"expected at least {processes} shards in {stream.name}, one per process; got {stream.num_parts}: "
                "write the data in more shards"
            )
        workers = min(workers, stream.num_parts // processes)
    options |= {"num_workers": workers, "worker_init_fn": begin_worker, "collate_fn": partial(collate, replace=replace)}
    return DataLoader(images, persistent_workers=workers > 0 and not isinstance(images, StreamedImages), **options)


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
