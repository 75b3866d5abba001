"""Images as loaders of `(images, labels)` for scoring and evaluation: paths become loaders here and in `training`."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pmvit.data.sources import BROKEN_IMAGE, Sample, Source, Stream, open_source, reader_part
from pmvit.errors import PmvitError

SECONDS_TO_LIVE = 30.0  # of a worker after SIGTERM
NICENESS = 10  # of a worker: where cores are few, it reads while the main process waits

Transform = Callable[[Image.Image], Tensor]


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


@dataclass(frozen=True)
class Prepared:
    """A sample that is ready for a model, or the reason why it cannot be read."""

    image: Tensor | str
    label: int | Tensor | None
    name: str


def prepare(sample: Sample, transform: Transform, mode: str) -> Prepared:
    """Decode and transform a sample; if it is broken, say why instead of raising."""
    try:
        image: Tensor | str = transform(sample.open(mode))
    except BROKEN_IMAGE as error:
        image = f"{type(error).__name__}: {error}"
    return Prepared(image, sample.label, sample.name)


def stack_labels(labels: Iterable[int | Tensor | None]) -> Tensor | None:
    """The labels of a batch, of images or of their pixels; `None` if there are none."""
    known = [torch.as_tensor(label) for label in labels if label is not None]
    return torch.stack(known) if known else None


def plain_errors(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader; an error of ours that comes from a worker, without the traceback it comes with."""
    try:
        yield from loader
    except PmvitError as error:
        raise PmvitError(str(error).strip().splitlines()[-1].partition("PmvitError: ")[2] or str(error)) from None


def color_mode(data_config: dict[str, Any]) -> str:
    return "L" if data_config["input_size"][0] == 1 else "RGB"


def evaluation_transform(data_config: dict[str, Any]) -> Transform:
    """Resize, crop in the middle and normalise, as a model's data configuration says."""
    transform: Transform = create_transform(
        input_size=tuple(data_config["input_size"]),
        interpolation=data_config["interpolation"],
        mean=tuple(data_config["mean"]),
        std=tuple(data_config["std"]),
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"],
    )
    return transform


class _Images(Dataset[Prepared]):
    def __init__(self, source: Source, transform: Transform, mode: str) -> None:
        self.source = source
        self.transform = transform
        self.mode = mode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prepared:
        return prepare(self.source[index], self.transform, self.mode)


class _StreamedImages(IterableDataset[Prepared]):
    """Each training process reads its own parts of a stream, each of its workers some of these."""

    def __init__(self, stream: Stream, transform: Transform, mode: str, process: tuple[int, int]) -> None:
        self.stream = stream
        self.transform = transform
        self.mode = mode
        self.process = process

    def __iter__(self) -> Iterator[Prepared]:
        for sample in self.stream.samples(*reader_part(self.process), None):
            yield prepare(sample, self.transform, self.mode)


class FolderLoader:
    """Batches of `(images, labels)`, or of images where there are no classes. Broken images are left out.

    Attributes:
        name: Which images these are, in which batches.
        broken: What was left out so far.
    """

    def __init__(self, loader: DataLoader[Any], has_labels: bool, strict: bool, name: str) -> None:
        self.strict = strict
        self.name = name
        self.has_labels = has_labels
        self.broken = Broken()
        self._loader = loader
        self._length = None if isinstance(loader.dataset, IterableDataset) else len(loader)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a stream has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for items in plain_errors(self._loader):
            good = [item for item in items if isinstance(item.image, Tensor)]
            for item in items:
                if not isinstance(item.image, Tensor):
                    if self.strict:
                        raise PmvitError(
                            f"expected an image, got a file that cannot be read: {item.name} ({item.image})"
                        )
                    self.broken.files[item.name] = item.image
            if not good:
                continue
            images = torch.stack([item.image for item in good])
            yield (images, stack_labels([item.label for item in good])) if self.has_labels else images


def image_folder(
    folder: str | Path,
    data_config: dict[str, Any],
    *,
    num_classes: int | None = None,
    batch_size: int = 64,
    workers: int = 2,
    shuffle: bool = False,
    seed: int = 0,
    strict: bool = False,
    limit: int | None = None,
    process: int = 0,
    processes: int = 1,
) -> FolderLoader:
    """Make a loader of images, prepared as the model's data configuration says.

    Args:
        folder: Images in one subfolder a class, or images alone; or another source that `open_source` knows.
        data_config: Size, mean, interpolation and so on, as timm has them for a model.
        num_classes: The classes of the model, to number the folders right.
        batch_size: Images a batch.
        workers: Processes that read images.
        shuffle: Take the images in an order that depends only on the seed.
        seed: For `shuffle`.
        strict: A broken image is an error instead of being left out.
        limit: Take so many images at most.
        process: Which of `processes` this is: each batch is split among them.
        processes: How many processes share the images.
    """
    source = open_source(folder, num_classes)
    transform = evaluation_transform(data_config)
    mode = color_mode(data_config)
    name = f"{source.name} in batches of {batch_size}, seed {seed}"
    options: dict[str, Any] = {"collate_fn": list, "worker_init_fn": begin_worker}
    if isinstance(source, Stream):
        if limit is not None:
            raise PmvitError(f"limit: expected for images that can be counted; {folder} is a stream: name fewer shards")
        images = _StreamedImages(source, transform, mode, (process, processes))
        workers = check_parts(source, workers, processes)
        loader: DataLoader[Any] = DataLoader(images, batch_size, num_workers=workers, **options)
        return FolderLoader(loader, source.has_labels, strict, name)
    order = list(range(len(source)))
    if shuffle:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed)).tolist()
    order = order[:limit]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    shares = [batch[process::processes] for batch in batches if len(batch) >= processes]  # all have as many batches
    loader = DataLoader(
        _Images(source, transform, mode),
        batch_sampler=shares,
        num_workers=workers,
        persistent_workers=workers > 0,
        **options,
    )
    return FolderLoader(loader, source.has_labels, strict, name)


def check_parts(stream: Stream, workers: int, processes: int) -> int:
    """How many workers of each process a stream can serve.

    Raises:
        PmvitError: If it has fewer parts than there are processes.
    """
    if stream.num_parts < processes:
        raise PmvitError(
            f"expected at least {processes} shards in {stream.name}, one a process; got {stream.num_parts}: "
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
    timer = threading.Timer(SECONDS_TO_LIVE, os._exit, (0,))
    timer.daemon = True
    signal.signal(signal.SIGTERM, lambda _number, _frame: None if timer.is_alive() else timer.start())


def every(loader: Any, process: int, processes: int) -> Iterator[Any]:
    """Every `processes`-th batch of a loader that knows nothing of processes."""
    return islice(loader, process, None, processes)
