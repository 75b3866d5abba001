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
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from PIL import Image
from timm.data.imagenet_info import ImageNetInfo
from timm.data.readers.img_extensions import get_img_extensions
from timm.utils.misc import natural_key
from torch.utils.data import get_worker_info

from pmvit.data.masks import Mask
from pmvit.errors import PmvitError

SHUFFLE_BUFFER = 2000
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")


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


BROKEN_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class Source(Protocol):
    """Images by number."""

    name: str
    has_labels: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@runtime_checkable
class Stream(Protocol):
    """Images one after the other."""

    name: str
    has_labels: bool
    num_parts: int

    def samples(self, part: int, parts: int, seed: int | None) -> Iterator[Sample]:
        """The images of one of `parts` disjoint parts, once, shuffled if there is a seed."""
        ...

    def count(self) -> int | None:
        """How many images there are, if that can be found out."""
        ...


class FolderSource:
    """Images below a folder, in one subfolder per class or alone, or a single image file.

    Class folders are numbered in natural order of their names. Where that would be wrong because some are missing,
    names that are numbers or ImageNet's synset ids are taken at their word.
    """

    def __init__(self, folder: Path, num_classes: int | None = None) -> None:
        self.files, self.labels = find_images(folder, num_classes)
        self.name = f"{len(self.files)} images of {folder.resolve().name}"
        self.has_labels = self.labels is not None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path = self.files[index]
        return Sample(path, None if self.labels is None else self.labels[index], str(path))


def list_files(folder: Path, suffixes: set[str]) -> list[Path]:
    """All files below a folder with one of these suffixes, in natural order; links are followed."""
    found = (Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names)
    files = [path for path in found if path.suffix.lower() in suffixes]
    return sorted(files, key=lambda path: natural_key(str(path.relative_to(folder))))


def find_images(folder: Path, num_classes: int | None = None) -> tuple[list[Path], list[int] | None]:
    """List the images below a folder, or the one that is named, and their labels if they lie in class folders."""
    extensions = set(get_img_extensions())
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
    names = sorted({path.relative_to(folder).parts[0] for path in files}, key=natural_key)
    index = _class_index(names, num_classes, folder)
    return files, [index[path.relative_to(folder).parts[0]] for path in files]


def _class_index(names: Sequence[str], num_classes: int | None, folder: Path) -> dict[str, int]:
    if num_classes is None or len(names) == num_classes:
        return {name: number for number, name in enumerate(names)}
    if all(name.isdecimal() and int(name) < num_classes for name in names):
        return {name: int(name) for name in names}
    synsets = {name: number for number, name in enumerate(ImageNetInfo().label_names())}
    if num_classes == len(synsets) and all(name in synsets for name in names):
        return {name: synsets[name] for name in names}
    raise PmvitError(
        f"expected {num_classes} class folders in {folder}, as many as the model has classes; got {len(names)} "
        f"({names[0]} ... {names[-1]}): is this the data of this model? Folders named by class number also serve"
    )


def _import(module: str, extra: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise PmvitError(f"{module} is not installed: pip install 'pmvit[{extra}]'") from None


def _columns(features: Any, name: str) -> tuple[str, str | None]:
    """The image column of a Hugging Face dataset and its label column, if it has one."""
    datasets = _import("datasets", "datasets")
    if features is None:
        raise PmvitError(f"{name} does not say what its columns are: give it features")
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    if not images:
        raise PmvitError(f"expected a column of images in {name}; it has {', '.join(features)}")
    labels = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    labels += [column for column in LABEL_COLUMNS if column in features and column not in labels]
    return images[0], labels[0] if labels else None


def _load_hugging_face(path: str, split: str, streaming: bool) -> Any:
    datasets = _import("datasets", "datasets")
    try:
        if (Path(path) / "dataset_dict.json").exists() or (Path(path) / "state.json").exists():
            loaded = datasets.load_from_disk(path)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            return loaded.to_iterable_dataset(num_shards=min(64, len(loaded))) if streaming else loaded
        return datasets.load_dataset(path, split=split, streaming=streaming)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()
        raise PmvitError(f"could not open the dataset {path} ({split}): {reason[0] if reason else error!r}") from None


class _HuggingFace:
    """A Hugging Face dataset: a name on the hub, or a folder that `datasets` can read (`save_to_disk` or files)."""

    def __init__(self, path: str, split: str, streaming: bool) -> None:
        dataset = _load_hugging_face(path, split, streaming)
        self.split = split
        self._image, self._label = _columns(dataset.features, path)
        self.has_labels = self._label is not None
        self.dataset = dataset.cast_column(self._image, _import("datasets", "datasets").Image(decode=False))

    def _sample(self, row: dict[str, Any], name: str) -> Sample:
        stored = row[self._image]
        content = stored["bytes"] if stored.get("bytes") is not None else Path(stored["path"])
        return Sample(content, None if self._label is None else int(row[self._label]), stored.get("path") or name)


class HuggingFaceSource(_HuggingFace):
    """A Hugging Face dataset on this machine."""

    def __init__(self, path: str, split: str) -> None:
        super().__init__(path, split, streaming=False)
        self.name = f"{len(self)} images of {Path(path).name}@{split}"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(self.dataset[index], f"row {index} of {self.name}")


class HuggingFaceStream(_HuggingFace):
    """A Hugging Face dataset that is read as it comes, without being downloaded first."""

    def __init__(self, path: str, split: str) -> None:
        super().__init__(path, split, streaming=True)
        self.name = f"the stream {Path(path).name}@{split}"
        self.num_parts = int(self.dataset.num_shards)

    def samples(self, part: int, parts: int, seed: int | None) -> Iterator[Sample]:
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
        self.shards: list[str] = _import("webdataset", "webdataset").shardlists.expand_urls(urls)
        self.name = f"{len(self.shards)} shards of {Path(urls).name}"
        if missing := [shard for shard in self.shards if _is_local(shard) and not Path(shard).is_file()]:
            raise PmvitError(f"expected a tar file at {missing[0]}; there is none")
        first = next(self.samples(0, 1, None), None)
        if first is None:
            raise PmvitError(f"expected images in {self.shards[0]}; found none")
        self.has_labels = first.label is not None
        self.num_parts = len(self.shards)

    def samples(self, part: int, parts: int, seed: int | None) -> Iterator[Sample]:
        webdataset = _import("webdataset", "webdataset")
        shards = list(self.shards)
        generator = random.Random(seed)  # noqa: S311  # an order, not a secret
        if seed is not None:
            generator.shuffle(shards)
        stages = [webdataset.SimpleShardList(shards[part::parts]), webdataset.tarfile_to_samples()]
        if seed is not None:
            stages.append(webdataset.shuffle(SHUFFLE_BUFFER, initial=SHUFFLE_BUFFER, rng=generator))
        for row in webdataset.DataPipeline(*stages):
            if (key := _image_key(name for name in row if not name.startswith("__"))) is not None:
                label = int(row["cls"].decode()) if "cls" in row else None
                yield Sample(row[key], label, f"{row['__url__']}:{row['__key__']}.{key}")

    def count(self) -> int | None:
        """How many images there are, where all shards are local files."""
        if not all(_is_local(shard) for shard in self.shards):
            return None
        return sum(_count_images(Path(shard)) for shard in self.shards)


def _is_local(url: str) -> bool:
    return "://" not in url and not url.startswith("pipe:")


def _image_key(names: Iterable[str]) -> str | None:
    endings = {ending.lstrip(".") for ending in get_img_extensions()}
    return next((name for name in names if name.rpartition(".")[2].lower() in endings), None)


def _count_images(shard: Path) -> int:
    with tarfile.open(shard) as archive:
        return sum(1 for member in archive if member.isfile() and _image_key([member.name]) is not None)


def open_source(data: str | Path, num_classes: int | None = None) -> Source | Stream:
    """Make a source or a stream of what a user names.

    Args:
        data: A folder of images, or one image; `hf:NAME@SPLIT` for a Hugging Face dataset (a name on the hub or a
            folder, `train` if no split is named), `hf-stream:NAME@SPLIT` to stream it; or WebDataset shards, whose name
            ends in `.tar`.
        num_classes: The classes of the model, to number class folders right.
    """
    text = str(data)
    for prefix, kind in (("hf:", HuggingFaceSource), ("hf-stream:", HuggingFaceStream)):
        if text.startswith(prefix):
            path, _, split = text.removeprefix(prefix).partition("@")
            opened: Source | Stream = kind(path, split or "train")
            return opened
    if text.endswith((".tar", ".tar.gz", ".tgz")) or text.startswith("pipe:"):
        return WebDatasetStream(text)
    return FolderSource(Path(data), num_classes)


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
