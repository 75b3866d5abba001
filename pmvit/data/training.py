"""Batches for training: augmented, shuffled, shared among processes, and the same again from any point of a run.

Every random choice is drawn from a seed of its own: the order of an epoch from (seed, epoch), the augmentation of an
image from (seed, epoch, image). So a run that is resumed sees what it would have seen, whatever the number of workers.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, interp_mode_to_str
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from pmvit.data.batches import unpack
from pmvit.data.folder import (
    Broken,
    Prepared,
    Transform,
    begin_worker,
    check_parts,
    color_mode,
    every,
    plain_errors,
    prepare,
    stack_labels,
)
from pmvit.data.seeding import seed_all, seed_for, seeded
from pmvit.data.sources import Source, Stream, endless, open_source, reader_part
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
        """Batches an epoch."""
        ...

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        """The batches of an epoch without the first `skip` ones."""
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...


def training_transform(
    data_config: dict[str, Any],
    *,
    crop_scale: tuple[float, float],
    hflip: float,
    color_jitter: float,
    auto_augment: str | None,
) -> Transform:
    """timm's augmentation of one image, as bytes; a `crop_scale` of (1, 1) shows the middle square of every image."""
    whole = tuple(crop_scale) == (1.0, 1.0)
    transform: Any = create_transform(
        input_size=tuple(data_config["input_size"]),
        is_training=True,
        scale=crop_scale,
        ratio=(1.0, 1.0) if whole else None,
        hflip=hflip,
        color_jitter=color_jitter or None,  # type: ignore[arg-type]  # None is the way to have none
        auto_augment=auto_augment,
        interpolation=data_config["interpolation"],
        mean=tuple(data_config["mean"]),
        normalize=False,
    )
    if not auto_augment:  # that works on Pillow's images
        transform.transforms = [_TensorCrop.like(step) for step in transform.transforms]
    prepared: Transform = transform
    return prepared


class _TensorCrop(RandomResizedCropAndInterpolation):
    """timm's random crop, resized by PyTorch as bytes: the same to one level of 255, in half the time."""

    @staticmethod
    def like(step: Any) -> Any:
        """This in place of timm's crop, anything else as it is."""
        if type(step) is not RandomResizedCropAndInterpolation or isinstance(step.interpolation, tuple):
            return step
        return _TensorCrop(step.size, step.scale, step.ratio, interp_mode_to_str(step.interpolation))

    def __call__(self, image: Image.Image) -> Image.Image | Tensor:
        mode = interp_mode_to_str(self.interpolation)
        if image.mode != "RGB" or mode not in ("bilinear", "bicubic"):
            return super().__call__(image)  # type: ignore[no-any-return, no-untyped-call]
        top, left, height, width = self.get_params(image, self.scale, self.ratio)  # type: ignore[no-untyped-call]
        pixels = np.array(image.crop((left, top, left + width, top + height)))
        batch = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        return functional.interpolate(batch, self.size, mode=mode, antialias=True)[0]


class BatchTransform:
    """What is left to do to a batch of bytes, on the device that trains: scale, normalise, erase.

    Images travel as bytes from the workers, a quarter of the size; loaders of others bring theirs ready.
    """

    def __init__(self, data_config: dict[str, Any], random_erasing: float, device: torch.device) -> None:
        self._mean = torch.tensor(data_config["mean"], device=device).view(-1, 1, 1) * 255
        self._scale = 1 / (torch.tensor(data_config["std"], device=device).view(-1, 1, 1) * 255)
        erase = RandomErasing(random_erasing, mode="pixel", device=str(device))
        self._erase = erase if random_erasing else None

    def __call__(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images
        images = (images - self._mean).mul_(self._scale)
        return self._erase(images) if self._erase is not None else images


def collate(items: list[Prepared]) -> tuple[Tensor, Tensor | None, list[str], dict[str, str]]:
    """Stack a batch. In place of a broken image stands another one of the batch, so that all batches are alike."""
    broken = {item.name: item.image for item in items if isinstance(item.image, str)}
    good = [item for item in items if isinstance(item.image, Tensor)]
    if not good:
        raise PmvitError(f"expected images, got a whole batch that cannot be read: {', '.join(list(broken)[:3])}, ...")
    chosen = [item if isinstance(item.image, Tensor) else good[i % len(good)] for i, item in enumerate(items)]
    images = torch.stack([item.image for item in chosen if isinstance(item.image, Tensor)])
    labels = [item.label for item in chosen if item.label is not None]
    return images, stack_labels(labels), [item.name for item in chosen], broken


class Augmented(Dataset[Prepared]):
    """Images by (epoch, number), each augmented from a seed of its own."""

    def __init__(self, name: str, count: int, prepare_one: Callable[[int], Prepared], seed: int) -> None:
        self.name = name
        self.count = count
        self.prepare_one = prepare_one
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> Prepared:
        epoch, index = key
        with seeded(seed_for(self.seed, epoch, index), restore=get_worker_info() is None):
            return self.prepare_one(index)


def _prepare_one(source: Source, transform: Transform, mode: str, index: int) -> Prepared:
    return prepare(source[index], transform, mode)


class _EpochBatches:
    """The batches of image numbers of this process in the epoch that was asked for last, `length` of `count` images."""

    def __init__(self, count: int, length: int, batch: int, seed: int, process: int, processes: int) -> None:
        self.count = count
        self.length = length
        self.batch = batch
        self.seed = seed
        self.process = process
        self.processes = processes
        self.start = (0, 0)

    def __len__(self) -> int:
        return self.length // (self.batch * self.processes)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, skip = self.start
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch))
        order = torch.randperm(self.count, generator=generator).tolist()
        for number in range(skip, len(self)):
            first = (number * self.processes + self.process) * self.batch
            yield [(epoch, index) for index in order[first : first + self.batch]]


class SourceData:
    """Training batches of a source: any point of any epoch is reached without reading what comes before."""

    def __init__(
        self,
        images: Augmented,
        *,
        batch: int,
        workers: int,
        seed: int,
        process: tuple[int, int],
        epoch_images: int | None = None,
    ) -> None:
        self.name = images.name
        self.broken = Broken()
        length = len(images) if epoch_images is None else min(epoch_images, len(images))
        self._batches = _EpochBatches(len(images), length, batch, seed, *process)
        if not len(self._batches):
            raise PmvitError(
                f"expected at least {batch * process[1]} images, one batch; got {images.name}: lower the batch size"
            )
        self._loader = DataLoader(
            images,
            batch_sampler=self._batches,
            num_workers=workers,
            collate_fn=collate,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=begin_worker,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        self._batches.start = (number, skip)
        for images, labels, names, broken in plain_errors(self._loader):
            self.broken.files.update(broken)
            yield TrainingBatch(images, labels, names)

    def close(self) -> None:
        del self._loader  # its workers stop when nothing refers to it any more


class _StreamedBatches(IterableDataset[Any]):
    """Batches of a stream for one epoch. A worker makes every n-th of them; those to skip are read, not decoded."""

    def __init__(
        self,
        stream: Stream,
        transform: Transform,
        mode: str,
        *,
        batch: int,
        count: int,
        seed: int,
        process: tuple[int, int],
    ) -> None:
        self.stream = stream
        self.transform = transform
        self.mode = mode
        self.batch = batch
        self.count = count
        self.seed = seed
        self.process = process
        self.start = (0, 0)

    def __iter__(self) -> Iterator[Any]:
        epoch, skip = self.start
        part, parts = reader_part(self.process)
        workers = parts // self.process[1]
        mine = part % workers
        samples = endless(self.stream, part, parts, seed_for(self.seed, epoch))
        for number in range(mine, self.count, workers):
            batch = [next(samples) for _ in range(self.batch)]
            if number < skip:
                yield None
                continue
            prepared = []
            for place, sample in enumerate(batch):
                with seeded(seed_for(self.seed, epoch, part, number, place), restore=get_worker_info() is None):
                    prepared.append(prepare(sample, self.transform, self.mode))
            yield collate(prepared)


class StreamData:
    """Training batches of a stream. Workers and processes share its parts, so their number belongs to the run."""

    def __init__(
        self,
        stream: Stream,
        transform: Transform,
        mode: str,
        *,
        epoch_images: int,
        batch: int,
        workers: int,
        seed: int,
        process: tuple[int, int],
    ) -> None:
        self.name = stream.name
        self.broken = Broken()
        self._workers = check_parts(stream, workers, process[1])
        count = epoch_images // (batch * process[1])
        if not count:
            raise PmvitError(f"expected at least {batch * process[1]} images an epoch, one batch; got {epoch_images}")
        self._images = _StreamedBatches(stream, transform, mode, batch=batch, count=count, seed=seed, process=process)

    def __len__(self) -> int:
        return self._images.count

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        self._images.start = (number, skip)
        loader: DataLoader[Any] = DataLoader(
            self._images, batch_size=None, num_workers=self._workers, worker_init_fn=begin_worker
        )
        for item in plain_errors(loader):
            if item is not None:
                images, labels, names, broken = item
                self.broken.files.update(broken)
                yield TrainingBatch(images, labels, names)

    def close(self) -> None:
        """Nothing to do: the workers of an epoch stop with it."""


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
            raise PmvitError(f"expected at least {process[1]} batches, one a process; got {len(loader)}")

    def __len__(self) -> int:
        return len(self.loader) // self._process[1]

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        seed_all(seed_for(self._seed, number))
        batches = every(self.loader, *self._process)
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


def open_training_data(
    data: str | Path,
    transform: Transform,
    data_config: dict[str, Any],
    *,
    num_classes: int | None,
    batch: int,
    workers: int,
    seed: int,
    process: tuple[int, int],
    epoch_images: int | None = None,
) -> TrainingData:
    """Make training batches of what a user names: a folder, a Hugging Face dataset, or shards (see `open_source`).

    Args:
        data: The images.
        transform: Augmentation; see `training_transform`.
        data_config: timm's data configuration of the model.
        num_classes: The classes of the model, `None` if labels are not used.
        batch: Images a forward pass.
        workers: Processes that read images.
        seed: Of order and augmentation.
        process: Which of how many training processes this is.
        epoch_images: How many images make an epoch, others in each where there are more; if not given, all of them,
            which a stream can count where its shards are local.
    """
    source = open_source(data, num_classes)
    options: dict[str, Any] = {"batch": batch, "workers": workers, "seed": seed, "process": process}
    mode = color_mode(data_config)
    if not isinstance(source, Stream):
        images = Augmented(source.name, len(source), partial(_prepare_one, source, transform, mode), seed)
        return SourceData(images, **options, epoch_images=epoch_images)
    if epoch_images is None:
        epoch_images = source.count()
    if epoch_images is None:
        raise PmvitError(f"expected epoch_images, the images that make an epoch: {source.name} cannot be counted")
    return StreamData(source, transform, mode, epoch_images=epoch_images, **options)
