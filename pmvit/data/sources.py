"""Where images come from: folders, Hugging Face datasets, WebDataset shards, a `Dataset`. All give the same `Sample`.

A *source* can be asked for any of its images by number; a *stream* only gives them one after the other, in an order
that depends on a seed, and in as many parts as there are readers.
"""

import os
import random
import tarfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from PIL import Image
from timm.data.imagenet_info import ImageNetInfo
from timm.utils.misc import natural_key
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from pmvit.data.batches import LABEL_COLUMNS, count_items, described, split_item
from pmvit.data.generated import GeneratedImages
from pmvit.data.samples import Mask, Sample
from pmvit.errors import PmvitError, PmvitWarning, first_line

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")  # of image files
SHUFFLE_BUFFER = 2000


@dataclass(frozen=True)
class FileSource:
    """Image files, and the class or the mask of each if they have some."""

    files: Sequence[Path]
    labels: Sequence[int | Mask] | None
    name: str

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    @property
    def has_masks(self) -> bool:
        return self.labels is not None and isinstance(self.labels[0], Mask)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path = self.files[index]
        return Sample(path, None if self.labels is None else self.labels[index], str(path))


def list_files(folder: Path, suffixes: Iterable[str] = ENDINGS, *, tell: bool = False) -> list[Path]:
    """All files below a folder with one of these suffixes, in natural order; links are followed.

    If there are some and `tell` is set, a warning counts and names the others, unless they are hidden.
    """
    found = [Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names]
    found.sort(key=lambda path: natural_key(str(path.relative_to(folder))))
    files = [path for path in found if path.suffix.lower() in suffixes]
    skipped = [path for path in found if path.suffix.lower() not in suffixes and not path.name.startswith(".")]
    if tell and files and skipped:
        some = ", ".join(str(path.relative_to(folder)) for path in skipped[:3])
        more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        text = f"{len(skipped)} of {len(found)} files below {folder} are skipped, as no images by their ending: "
        warnings.warn(text + some + more, PmvitWarning, stacklevel=2)
    return files


def find_images(folder: Path, num_classes: int | None = None) -> tuple[list[Path], list[int] | None]:
    """List the images below a folder, or the one that is named, and their labels if they lie in class folders.

    Class folders are numbered in natural order of their names. Where that would be wrong because some are missing,
    names that are numbers or ImageNet's synset ids are taken at their word.
    """
    if folder.is_file() and folder.suffix.lower() in ENDINGS:
        return [folder], None
    if not folder.is_dir():
        raise PmvitError(f"expected a folder of images at {folder}; there is none")
    files = list_files(folder, tell=True)
    if not files:
        raise PmvitError(f"expected images below {folder}, found none with the endings {', '.join(ENDINGS)}")
    outside = [path for path in files if path.parent == folder]
    if outside and len(outside) < len(files):
        raise PmvitError(
            f"expected images in class folders or images alone in {folder}; got both ({outside[0].name} lies outside)"
        )
    if outside:
        return files, None
    classes = [path.relative_to(folder).parts[0] for path in files]
    index = _class_index(sorted(set(classes), key=natural_key), num_classes, folder)
    return files, [index[name] for name in classes]


def _class_index(names: Sequence[str], num_classes: int | None, folder: Path) -> dict[str, int]:
    if num_classes is None or len(names) == num_classes:
        return {name: number for number, name in enumerate(names)}
    if all(name.isdecimal() and int(name) < num_classes for name in names):
        return {name: int(name) for name in names}
    synsets = {name: number for number, name in enumerate(ImageNetInfo().label_names())}
    if num_classes == len(synsets) and all(name in synsets for name in names):
        return synsets
    raise PmvitError(
        f"expected {num_classes} class folders in {folder}, as many as the model has classes; got {len(names)} "
        f"({names[0]} ... {names[-1]}): is this the data of this model? Folders named by class number also serve"
    )


def _import(module: str) -> Any:
    """A library that is an extra of the same name."""
    try:
        return import_module(module)
    except ImportError:
        raise PmvitError(f"{module} is not installed: pip install 'pmvit[{module}]'") from None


class _HuggingFace:
    """A Hugging Face dataset: a name on the hub, or a folder that `datasets` can read (`save_to_disk` or files)."""

    streaming = False

    def __init__(self, path: str, split: str) -> None:
        datasets, streaming = _import("datasets"), self.streaming
        try:
            if (Path(path) / "dataset_dict.json").exists() or (Path(path) / "state.json").exists():
                dataset = datasets.load_from_disk(path)
                dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
                dataset = dataset.to_iterable_dataset(num_shards=min(64, len(dataset))) if streaming else dataset
            else:
                dataset = datasets.load_dataset(path, split=split, streaming=streaming)
        except (OSError, ValueError, KeyError) as error:
            raise PmvitError(f"could not open the dataset {path} ({split}): {first_line(error)}") from None
        features = dataset.features
        if features is None:
            raise PmvitError(f"{path} does not say what its columns are: give it features")
        images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
        if not images:
            raise PmvitError(f"expected a column of images in {path}; it has {', '.join(features)}")
        labels = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
        labels += [column for column in LABEL_COLUMNS if column in features]
        self._image, self._label = images[0], labels[0] if labels else None
        self.dataset = dataset.cast_column(self._image, datasets.Image(decode=False))
        self.num_parts = int(dataset.num_shards) if streaming else 1
        self.split, self.has_labels = split, self._label is not None
        self.name = f"{'the stream' if streaming else f'{len(dataset)} images of'} {Path(path).name}@{split}"

    def _sample(self, row: dict[str, Any], name: str) -> Sample:
        stored = row[self._image] or {}  # a row without an image is a broken one
        path, content = stored.get("path"), stored.get("bytes")
        content = (Path(path) if path else b"") if content is None else content
        return Sample(content, None if self._label is None else int(row[self._label]), path or name)


class HuggingFaceSource(_HuggingFace):
    """A Hugging Face dataset on this machine."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(self.dataset[index], f"row {index} of {self.name}")


class HuggingFaceStream(_HuggingFace):
    """A Hugging Face dataset that is read as it comes, without being downloaded first."""

    streaming = True

    def samples(self, part: int, parts: int, seed: int | None) -> Iterator[Sample]:
        """The images of one of `parts` disjoint parts, once, shuffled if there is a seed."""
        dataset = self.dataset
        if seed is not None:
            dataset = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        worker = get_worker_info()
        workers = worker.num_workers if worker is not None else 1  # among which the dataset shares itself
        for number, row in enumerate(dataset.shard(num_shards=parts // workers, index=part // workers)):
            yield self._sample(row, f"row {number} of part {part} of {self.name}")

    def count(self) -> int | None:
        """How many rows the dataset says it has."""
        splits = self.dataset.info.splits or {}
        return splits[self.split].num_examples if self.split in splits else None


class WebDatasetStream:
    """Tar shards: local files or URLs, `{000..146}` standing for many. A sample has an image and its class in `cls`."""

    def __init__(self, urls: str) -> None:
        self.shards: list[str] = _import("webdataset").shardlists.expand_urls(urls)
        self.name = f"{len(self.shards)} shards of {Path(urls).name}"
        if missing := [shard for shard in self.shards if _is_local(shard) and not Path(shard).is_file()]:
            raise PmvitError(f"expected a tar file at {missing[0]}; there is none")
        first = next((sample for sample in self.samples(0, 1, None) if sample.image), None)
        if first is None:
            raise PmvitError(f"expected images in {self.shards[0]}; found none")
        self.has_labels = first.label is not None
        self.num_parts = len(self.shards)

    def samples(self, part: int, parts: int, seed: int | None) -> Iterator[Sample]:
        """The images of one of `parts` disjoint parts, once, shuffled if there is a seed.

        One that has no file of a known ending is a broken one.
        """
        webdataset = _import("webdataset")
        shards = list(self.shards)
        generator = random.Random(seed)  # noqa: S311  # an order, not a secret
        if seed is not None:
            generator.shuffle(shards)
        stages = [webdataset.SimpleShardList(shards[part::parts]), webdataset.tarfile_to_samples()]
        if seed is not None:
            stages.append(webdataset.shuffle(SHUFFLE_BUFFER, initial=SHUFFLE_BUFFER, rng=generator))
        for row in webdataset.DataPipeline(*stages):
            key = next(filter(_is_image, row), "")
            label = int(row["cls"].decode()) if "cls" in row else None
            yield Sample(row.get(key, b""), label, f"{row['__url__']}:{row['__key__']}.{key}".rstrip("."))

    def count(self) -> int | None:
        """How many images there are, where all shards are local files."""
        if not all(map(_is_local, self.shards)):
            return None
        total = 0
        for shard in self.shards:
            with tarfile.open(shard) as archive:
                total += sum(member.isfile() and _is_image(member.name) for member in archive)
        return total


class _Wrapped:
    """A `Dataset` of PyTorch's or Hugging Face's kind: images as `split_item` knows them, with a class or mask each.

    Images are Pillow's, or prepared ones, tensors of shape (channels, height, width).
    """

    num_parts = 1

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.name = f"the {type(dataset).__name__}"
        first = next(self.samples(0, 1, None), None)
        if first is None:
            raise PmvitError(f"expected images in {self.name}; it is empty")
        self.has_labels, self.has_masks = first.label is not None, isinstance(first.label, Tensor)

    def samples(self, part: int, parts: int, seed: int | None) -> Iterator[Sample]:
        """The images one after the other, once; their order is the dataset's."""
        return (self._sample(item, number) for number, item in enumerate(self.dataset))

    def _sample(self, item: Any, number: int) -> Sample:
        (image, label), name = split_item(item), f"item {number} of {self.name}"
        if not isinstance(image, Image.Image) and not (
            isinstance(image, Tensor) and image.dim() == 3 and image.is_floating_point()
        ):
            raise PmvitError(
                f"{name}: expected an image of Pillow's, or one that is prepared, (channels, height, width) of floats, "
                f"alone or with a label; got {described(item if image is None else image)}"
            )
        if isinstance(label, Image.Image):
            label = torch.from_numpy(np.array(label)).long()
        if label is None or (isinstance(label, Tensor) and label.dim() == 2):
            return Sample(image, label, name)
        try:
            return Sample(image, int(label), name)
        except (TypeError, ValueError, RuntimeError):
            raise PmvitError(f"{name}: expected a class or a mask as label; got {described(label)}") from None


class DatasetSource(_Wrapped):
    """One whose items are found by their number."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(self.dataset[index], index)

    def samples(self, part: int, parts: int, seed: int | None) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


class DatasetStream(_Wrapped):
    """One that gives its items one after the other."""

    def count(self) -> int | None:
        """How many items it says it has."""
        return count_items(self.dataset)


Source = FileSource | HuggingFaceSource | DatasetSource | GeneratedImages
Stream = HuggingFaceStream | WebDatasetStream | DatasetStream


def _is_local(url: str) -> bool:
    return "://" not in url and not url.startswith("pipe:")


def _is_image(name: str) -> bool:
    """Whether a file is an image, by its name or its ending alone."""
    return f".{name.rpartition('.')[2].lower()}" in ENDINGS


def open_source(data: str | Path, num_classes: int | None = None) -> Source | Stream:
    """Make a source or a stream of what a user names.

    Args:
        data: A folder of images, or one image; `hf:NAME@SPLIT` for a Hugging Face dataset (a name on the hub or a
            folder, `train` if no split is named), `hf-stream:NAME@SPLIT` to stream it; or WebDataset shards, whose name
            ends in `.tar`.
        num_classes: The classes of the model, to number class folders right.
    """
    text = str(data)
    if text.startswith(("hf:", "hf-stream:")):
        kind, _, named = text.partition(":")
        path, _, split = named.partition("@")
        return (HuggingFaceSource if kind == "hf" else HuggingFaceStream)(path, split or "train")
    if text.endswith((".tar", ".tar.gz", ".tgz")) or text.startswith("pipe:"):
        return WebDatasetStream(text)
    files, labels = find_images(Path(data), num_classes)
    return FileSource(files, labels, f"{len(files)} images of {Path(data).resolve().name}")


def is_dataset(data: Any) -> TypeGuard[Dataset[Any]]:
    """Whether something is a `Dataset`, of PyTorch's or Hugging Face's kind."""
    return isinstance(data, Dataset) or (type(data).__module__.startswith("datasets.") and hasattr(data, "features"))


def open_dataset(dataset: Any) -> DatasetSource | DatasetStream:
    """Make a source, or a stream of a dataset that has no numbers, of what `is_dataset` knows."""
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    return DatasetStream(dataset) if is_stream else DatasetSource(dataset)


def has_pixel_labels(source: Source | Stream) -> bool:
    """Whether the images of a source have masks."""
    return getattr(source, "has_masks", False)


def choose_samples(source: Source | Stream, most: int) -> list[Sample]:
    """So many images, evenly spread over a source, or the first ones of a stream; all of them if there are fewer."""
    if isinstance(source, Stream):
        return list(islice(source.samples(0, 1, None), most))
    chosen = min(most, len(source))
    return [source[number * len(source) // chosen] for number in range(chosen)]


def reader_part(process: tuple[int, int]) -> tuple[int, int]:
    """Which part of a stream this worker reads, and how many parts there are: one a worker of a training process.

    Args:
        process: Rank and world size of training.
    """
    worker = get_worker_info()
    number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
    return process[0] * workers + number, process[1] * workers


def endless(stream: Stream, part: int, parts: int, seed: int) -> Iterator[Sample]:
    """The images of a part again and again, in another order each time."""
    for turn in count():
        sample = None
        for sample in stream.samples(part, parts, seed + 1_000_003 * turn):
            yield sample
        if sample is None:
            raise PmvitError(f"expected images in part {part} of {parts} of {stream.name}; found none")
