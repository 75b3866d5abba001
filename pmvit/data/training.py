"""Batches for training: augmented, shuffled, shared among processes, and the same again from any point of a run.

Every random choice is drawn from a seed of its own: the order of an epoch from (seed, epoch), the augmentation of an
image from (seed, epoch, image). So a resumed run gets the batches it would have got, whatever the number of workers.
"""

from collections.abc import Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from timm.utils.random import random_seed

from pmvit.data.batches import EveryNth, TrainingBatch, count_items, unpack
from pmvit.data.loaders import Broken, Images, Reader, StreamedImages, data_loader, plain_errors
from pmvit.data.seeding import seed_for
from pmvit.data.sources import Source, Stream, endless, reader_part
from pmvit.errors import PmvitError


@dataclass
class _EpochBatches:
    """A batch sampler: the image numbers of each batch of this process, with a seed for each image's augmentation.

    An epoch has `count` batches; `start` says which epoch it is and how many of its batches are done already.
    """

    images: int
    process: tuple[int, int]
    count: int
    batch: int
    seed: int
    start: tuple[int, int] = (0, 0)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, skip = self.start
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch))
        order = torch.randperm(self.images, generator=generator).tolist()
        for number in range(skip, self.count):
            first = (number * self.process[1] + self.process[0]) * self.batch
            yield [(index, seed_for(self.seed, epoch, index)) for index in order[first : first + self.batch]]


@dataclass(eq=False)
class _EpochStream(StreamedImages):
    """The same for a stream. A worker reads every n-th batch; images of batches that are done are not decoded."""

    count: int
    batch: int
    seed: int
    start: tuple[int, int] = (0, 0)

    def __iter__(self) -> Iterator[Any]:
        epoch, skip = self.start
        part, parts = reader_part(self.process)
        workers = parts // self.process[1]
        samples = endless(self.stream, part, parts, seed_for(self.seed, epoch))
        for number in range(part % workers, self.count, workers):
            for place in range(self.batch):
                sample, seed = next(samples), seed_for(self.seed, epoch, part, number, place)
                yield self.read(sample, seed) if number >= skip else None


class SourceData:
    """Training batches of a source or of a stream.

    In a source, any point of any epoch is reached without reading what comes before. Of a stream, workers and processes
    share the parts, so that their number belongs to the run.

    An epoch has `epoch_images` images, others in each where there are more; if not given, all of them, which a stream
    can count where its shards are local. `batch` is what one forward pass takes.
    """

    def __init__(
        self,
        source: Source | Stream,
        read: Reader,
        process: tuple[int, int] = (0, 1),
        epoch_images: int | None = None,
        *,
        batch: int,
        workers: int,
        seed: int,
    ) -> None:
        self.broken = Broken()
        if not isinstance(source, Stream):
            epoch_images = len(source) if epoch_images is None else min(epoch_images, len(source))
        elif epoch_images is None and (epoch_images := source.count()) is None:
            raise PmvitError(f"expected epoch_images, the images that make an epoch: {source.name} cannot be counted")
        count = epoch_images // (batch * process[1])
        if not count:
            raise PmvitError(
                f"expected at least {batch * process[1]} images per epoch, one batch; got {epoch_images} of "
                f"{source.name}: lower the batch size"
            )
        self._batches: _EpochBatches | _EpochStream
        options: dict[str, Any] = {"replace": True, "pin_memory": torch.cuda.is_available()}
        if isinstance(source, Stream):
            self._batches = streamed = _EpochStream(source, read, process, count, batch, seed)
            self._loader = data_loader(streamed, workers, batch_size=batch, **options)
        else:
            self._batches = _EpochBatches(len(source), process, count, batch, seed)
            self._loader = data_loader(Images(source, read), workers, batch_sampler=self._batches, **options)

    def __len__(self) -> int:
        return self._batches.count

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        """The batches of this process in an epoch, without the first `skip` ones."""
        self._batches.start = (number, skip)
        for batch, broken in plain_errors(self._loader):
            self.broken.update(broken)
            if batch is not None:
                yield batch
            elif broken:
                some = ", ".join(list(broken)[:3])
                raise PmvitError(f"expected images, got a whole batch that cannot be read: {some}, ...")

    def close(self) -> None:
        """Let the workers go."""
        del self._loader  # they stop when nothing refers to it any more


class LoaderData:
    """Training batches of any loader of `(images, labels)`, as they come, once an epoch.

    With several processes each takes every n-th batch. A loader that draws from the usual random generators gives the
    same batches in a resumed run: they are seeded before every batch, also before those that are skipped.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, process: tuple[int, int]) -> None:
        count = count_items(loader) if isinstance(loader, Sized) else None  # an iterator ends after one epoch
        if count is None:
            raise PmvitError("expected a training loader with a length, as a list or a DataLoader has; got one without")
        self.broken = Broken()
        self._batches = EveryNth(loader, process)
        self._count = count // process[1]
        self._seed = seed
        if not self._count:
            raise PmvitError(f"expected at least {process[1]} batches, one per process; got {count}")

    def __len__(self) -> int:
        return self._count

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        random_seed(seed_for(self._seed, number))
        batches = iter(self._batches)
        for place in range(self._count):
            random_seed(seed_for(self._seed, number, place))
            batch = next(batches, None)
            if batch is None:
                raise PmvitError(f"expected {self._count} batches in every epoch; the loader ended after {place}")
            if place >= skip:
                yield TrainingBatch(*unpack(batch, bytes_too=True), [f"batch {place} of epoch {number + 1}"])

    def close(self) -> None:
        """Nothing to do: the loader is its maker's."""


TrainingData = SourceData | LoaderData
