"""Batches for training: augmented, shuffled, shared among processes, and the same again from any point of a run.

Every random choice is drawn from a seed of its own: the order of an epoch from (seed, epoch), the augmentation of an
image from (seed, epoch, image). So a resumed run gets the batches it would have got, whatever the number of workers.
"""

from collections.abc import Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pmvit.data.batches import EveryNth, unpack
from pmvit.data.loaders import (
    Broken,
    Images,
    Prepared,
    Transform,
    begin_worker,
    check_parts,
    plain_errors,
    prepare,
    stack_labels,
)
from pmvit.data.seeding import seed_all, seed_for, seeded
from pmvit.data.sources import Source, Stream, endless, reader_part
from pmvit.errors import PmvitError


class TrainingBatch(NamedTuple):
    """What one forward pass trains on; `names` say which images these are."""

    images: Tensor
    labels: Tensor | None
    names: list[str]


class TrainingData(Protocol):
    """Batches of this process, epoch by epoch.

    Attributes:
        name: Which images these are.
        broken: Images that could not be read so far.
    """

    name: str
    broken: Broken

    def __len__(self) -> int:
        """Batches per epoch."""
        ...

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        """The batches of an epoch without the first `skip` ones."""
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...


def collate(items: list[Prepared]) -> tuple[TrainingBatch, dict[str, str]]:
    """A batch, and which images are broken: another one of the batch takes their place, so that all are of one size."""
    broken = {item.name: item.image for item in items if isinstance(item.image, str)}
    good = [item for item in items if isinstance(item.image, Tensor)]
    if not good:
        raise PmvitError(f"expected images, got a whole batch that cannot be read: {', '.join(list(broken)[:3])}, ...")
    chosen = [item if isinstance(item.image, Tensor) else good[i % len(good)] for i, item in enumerate(items)]
    images = torch.stack([item.image for item in chosen if isinstance(item.image, Tensor)])
    return TrainingBatch(images, stack_labels(chosen), [item.name for item in chosen]), broken


@dataclass(eq=False)
class _Augmented(Images):
    """Images by (epoch, number), each augmented from a seed of its own."""

    seed: int

    def __getitem__(self, key: tuple[int, int]) -> Prepared:
        epoch, index = key
        with seeded(seed_for(self.seed, epoch, index), restore=get_worker_info() is None):
            return super().__getitem__(index)


@dataclass
class _EpochBatches:
    """The batches of image numbers of this process: `count` of them in an epoch that begins at `start`."""

    images: int
    count: int
    batch: int
    seed: int
    process: tuple[int, int]
    start: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, skip = self.start
        process, processes = self.process
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch))
        order = torch.randperm(self.images, generator=generator).tolist()
        for number in range(skip, self.count):
            first = (number * processes + process) * self.batch
            yield [(epoch, index) for index in order[first : first + self.batch]]


@dataclass(eq=False)
class _StreamedBatches(IterableDataset[Any]):
    """The batches of a stream. A worker makes every n-th of them; those to skip are read, not decoded."""

    stream: Stream
    transform: Transform
    mode: str
    count: int
    batch: int
    seed: int
    process: tuple[int, int]
    start: tuple[int, int] = (0, 0)

    def __iter__(self) -> Iterator[Any]:
        epoch, skip = self.start
        part, parts = reader_part(self.process)
        workers = parts // self.process[1]
        samples = endless(self.stream, part, parts, seed_for(self.seed, epoch))
        for number in range(part % workers, self.count, workers):
            batch = [next(samples) for _ in range(self.batch)]
            if number < skip:
                yield None
                continue
            prepared = []
            for place, sample in enumerate(batch):
                with seeded(seed_for(self.seed, epoch, part, number, place), restore=get_worker_info() is None):
                    prepared.append(prepare(sample, self.transform, self.mode))
            yield collate(prepared)


class SourceData:
    """Training batches of a source or of a stream.

    In a source, any point of any epoch is reached without reading what comes before. Of a stream, workers and processes
    share the parts, so that their number belongs to the run.

    Args:
        source: Where the images come from.
        transform: Augmentation of an image, or of an image and its mask.
        mode: Of the images, as Pillow names it.
        batch: Images per forward pass.
        workers: Processes that read images.
        seed: Of order and augmentation.
        process: Which of how many training processes this is.
        epoch_images: How many images make an epoch, others in each where there are more; if not given, all of them,
            which a stream can count where its shards are local.
    """

    def __init__(
        self,
        source: Source | Stream,
        transform: Transform,
        mode: str,
        *,
        batch: int,
        workers: int,
        seed: int,
        process: tuple[int, int] = (0, 1),
        epoch_images: int | None = None,
    ) -> None:
        self.name = source.name
        self.broken = Broken()
        if not isinstance(source, Stream):
            epoch_images = len(source) if epoch_images is None else min(epoch_images, len(source))
        elif epoch_images is None and (epoch_images := source.count()) is None:
            raise PmvitError(f"expected epoch_images, the images that make an epoch: {source.name} cannot be counted")
        self._count = epoch_images // (batch * process[1])
        if not self._count:
            raise PmvitError(
                f"expected at least {batch * process[1]} images per epoch, one batch; got {epoch_images} of "
                f"{source.name}: lower the batch size"
            )
        options: dict[str, Any] = {"pin_memory": torch.cuda.is_available(), "worker_init_fn": begin_worker}
        if isinstance(source, Stream):
            workers = check_parts(source, workers, process[1])
            streamed = _StreamedBatches(source, transform, mode, self._count, batch, seed, process)
            self._batches: _EpochBatches | _StreamedBatches = streamed
            self._loader: DataLoader[Any] = DataLoader(streamed, batch_size=None, num_workers=workers, **options)
        else:
            self._batches = _EpochBatches(len(source), self._count, batch, seed, process)
            options |= {"collate_fn": collate, "persistent_workers": workers > 0, "num_workers": workers}
            images = _Augmented(source, transform, mode, seed)
            self._loader = DataLoader(images, batch_sampler=self._batches, **options)

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        self._batches.start = (number, skip)
        for made in plain_errors(self._loader):
            if made is not None:
                batch, broken = made
                self.broken.files.update(broken)
                yield batch

    def close(self) -> None:
        del self._loader  # its workers stop when nothing refers to it any more


class LoaderData:
    """Training batches of any loader of `(images, labels)`, as they come, once an epoch.

    With several processes each takes every n-th batch. A loader that draws from the usual random generators gives the
    same batches in a resumed run: they are seeded before every batch, also before those that are skipped.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, process: tuple[int, int]) -> None:
        if not isinstance(loader, Sized):
            raise PmvitError("expected a training loader with a length, as a list or a DataLoader has; got one without")
        self.loader = loader
        self.name = str(getattr(loader, "name", type(loader).__name__))
        self.broken = Broken()
        self._seed = seed
        self._process = process
        if not len(self):
            raise PmvitError(f"expected at least {process[1]} batches, one per process; got {len(loader)}")

    def __len__(self) -> int:
        return len(self.loader) // self._process[1]

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        seed_all(seed_for(self._seed, number))
        batches = iter(EveryNth(self.loader, *self._process))
        for place in range(len(self)):
            seed_all(seed_for(self._seed, number, place))
            batch = next(batches, None)
            if batch is None:
                raise PmvitError(f"expected {len(self)} batches in every epoch; the loader ended after {place}")
            if place >= skip:
                images, labels = unpack(batch)
                yield TrainingBatch(images, labels, [f"batch {place} of epoch {number + 1}"])

    def close(self) -> None:
        """Nothing to do: the loader is its maker's."""
