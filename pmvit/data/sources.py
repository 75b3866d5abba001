"""Where images come from: folders, Hugging Face datasets, WebDataset shards. All give the same `Sample`.

A *source* can be asked for any of its images by number; a *stream* only gives them one after the other, in an order
that depends on a seed, and in as many parts as there are readers.
"""

import io
import os
import random
import tarfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data.imagenet_info import ImageNetInfo
from timm.data.readers.img_extensions import get_img_extensions, is_img_extension
from timm.utils.misc import natural_key
from torch import Tensor
from torch.utils.data import get_worker_info

from pmvit.data.batches import IGNORED
from pmvit.errors import PmvitError

BROKEN_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
SHUFFLE_BUFFER = 2000
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")
MASK_MODES = ("1", "L", "P", "I", "I;16")  # of Pillow: one number per pixel
UNKNOWN = -1


@dataclass(frozen=True)
class Mask:
    """A file with a number for each pixel of an image, not read yet.

    `classes` are the numbers of the classes, in their order; others up to the largest of them, and 255, are ignored.
    """

    path: Path
    classes: Sequence[int]

    def read(self, size: tuple[int, int]) -> Tensor:
        """The class of each pixel of an image of this size, (height, width); a `PmvitError` names a wrong file."""
        try:
            with Image.open(self.path) as image:
                mode, pixels = image.mode, np.array(image).astype(np.int64)
        except (OSError, SyntaxError, ValueError) as error:
            raise PmvitError(f"{self.path}: expected a mask, got a file that cannot be read ({error})") from None
        if mode not in MASK_MODES:
            raise PmvitError(f"{self.path}: expected a mask with one number per pixel, got an image of mode {mode}")
        if pixels.shape != size:
            raise PmvitError(
                f"{self.path}: expected a mask of {size[0]} x {size[1]} pixels, the size of its image; got "
                f"{pixels.shape[0]} x {pixels.shape[1]}"
            )
        last = max(self.classes)
        table = np.full(max(last, IGNORED) + 1, UNKNOWN)
        table[: last + 1] = IGNORED
        table[np.asarray(self.classes)] = np.arange(len(self.classes))
        table[IGNORED] = IGNORED
        labels = np.where((pixels < 0) | (pixels > IGNORED), UNKNOWN, table[pixels.clip(0, IGNORED)])
        if (unknown := pixels[labels == UNKNOWN]).size:
            raise PmvitError(
                f"{self.path}: expected labels 0 to {last}, or {IGNORED} ignored; got {unknown[0]}: are these the "
                "masks of this model's classes?"
            )
        return torch.from_numpy(labels)


class Sample(NamedTuple):
    """An image that is not decoded yet, its class or mask if it has one, and a name to find it again."""

    image: Path | bytes
    label: int | Mask | None
    name: str

    def open(self, mode: str) -> Image.Image:
        """Decode the image; raises what Pillow raises if it is broken."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's about odd metadata, once per image
            with Image.open(io.BytesIO(self.image) if isinstance(self.image, bytes) else self.image) as image:
                converted: Image.Image = image.convert(mode)
                return converted


@dataclass(frozen=True)
class FileSource:
    """Image files, and the class or the mask of each if they have some."""

    files: Sequence[Path]
    labels: Sequence[int | Mask] | None
    name: str

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path = self.files[index]
        return Sample(path, None if self.labels is None else self.labels[index], str(path))


def list_files(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """All files below a folder with one of these suffixes, in natural order; links are followed."""
    found = (Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names)
    files = [path for path in found if path.suffix.lower() in suffixes]
    return sorted(files, key=lambda path: natural_key(str(path.relative_to(folder))))


def find_images(folder: Path, num_classes: int | None = None) -> tuple[list[Path], list[int] | None]:
    """List the images below a folder, or the one that is named, and their labels if they lie in class folders.

    Class folders are numbered in natural order of their names. Where that would be wrong because some are missing,
    names that are numbers or ImageNet's synset ids are taken at their word.
    """
    extensions = get_img_extensions()
    if folder.is_file() and folder.suffix.lower() in extensions:
        return [folder], None
    if not folder.is_dir():
        raise PmvitError(f"expected a folder of images at {folder}; there is none")
    files = list_files(folder, extensions)
    if not files:
        raise PmvitError(f"expected images below {folder}, found none with the endings {', '.join(sorted(extensions))}")
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
            reason = next(iter(str(error).strip().splitlines()), repr(error))
            raise PmvitError(f"could not open the dataset {path} ({split}): {reason}") from None
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
        stored = row[self._image]
        content = stored["bytes"] if stored.get("bytes") is not None else Path(stored["path"])
        return Sample(content, None if self._label is None else int(row[self._label]), stored.get("path") or name)


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
        first = next(self.samples(0, 1, None), None)
        if first is None:
            raise PmvitError(f"expected images in {self.shards[0]}; found none")
        self.has_labels = first.label is not None
        self.num_parts = len(self.shards)

    def samples(self, part: int, parts: int, seed: int | None) -> Iterator[Sample]:
        """The images of one of `parts` disjoint parts, once, shuffled if there is a seed."""
        webdataset = _import("webdataset")
        shards = list(self.shards)
        generator = random.Random(seed)  # noqa: S311  # an order, not a secret
        if seed is not None:
            generator.shuffle(shards)
        stages = [webdataset.SimpleShardList(shards[part::parts]), webdataset.tarfile_to_samples()]
        if seed is not None:
            stages.append(webdataset.shuffle(SHUFFLE_BUFFER, initial=SHUFFLE_BUFFER, rng=generator))
        for row in webdataset.DataPipeline(*stages):
            if (key := next(filter(_is_image, row), None)) is not None:
                label = int(row["cls"].decode()) if "cls" in row else None
                yield Sample(row[key], label, f"{row['__url__']}:{row['__key__']}.{key}")

    def count(self) -> int | None:
        """How many images there are, where all shards are local files."""
        if not all(map(_is_local, self.shards)):
            return None
        total = 0
        for shard in self.shards:
            with tarfile.open(shard) as archive:
                total += sum(member.isfile() and _is_image(member.name) for member in archive)
        return total


Source = FileSource | HuggingFaceSource
Stream = HuggingFaceStream | WebDatasetStream


def _is_local(url: str) -> bool:
    return "://" not in url and not url.startswith("pipe:")


def _is_image(name: str) -> bool:
    """Whether a file is an image, by its name or its ending alone."""
    return bool(is_img_extension(f".{name.rpartition('.')[2].lower()}"))


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


def has_pixel_labels(source: Source | Stream) -> bool:
    """Whether the images of a source have masks."""
    return isinstance(source, FileSource) and source.labels is not None and isinstance(source.labels[0], Mask)


def choose_samples(source: Source | Stream, most: int) -> list[Sample]:
    """So many images, evenly spread over a source, or the first ones of a stream; all of them if there are fewer."""
    if isinstance(source, Stream):
        return list(islice(source.samples(0, 1, None), most))
    chosen = min(most, len(source))
    return [source[number * len(source) // chosen] for number in range(chosen)]


def reader_part(process: tuple[int, int]) -> tuple[int, int]:
    """Which of how many parts of a stream is for this worker of this training process."""
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
