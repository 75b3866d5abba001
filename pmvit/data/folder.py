"""Folders of images as loaders of `(images, labels)`: paths become loaders here and nowhere else."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data.imagenet_info import ImageNetInfo
from timm.data.readers.img_extensions import get_img_extensions
from timm.data.transforms_factory import create_transform
from timm.utils.misc import natural_key
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pmvit.errors import PmvitError

Transform = Callable[[Image.Image], Tensor]


@dataclass
class Broken:
    """Images that could not be read: their paths, and why, in the order they came up."""

    files: dict[Path, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.files)

    def summary(self, most: int = 5) -> str:
        """A few lines that count and name them."""
        lines = [f"{len(self)} broken image{'s' if len(self) != 1 else ''} skipped:"]
        lines += [f"  {path} ({reason})" for path, reason in list(self.files.items())[:most]]
        if len(self) > most:
            lines.append(f"  and {len(self) - most} more")
        return "\n".join(lines)


def find_images(folder: Path, num_classes: int | None = None) -> tuple[list[Path], list[int] | None]:
    """List the images below a folder and, if they lie in one subfolder a class, their labels.

    Class folders are numbered in natural order of their names. Where that would be wrong because some are missing,
    names that are numbers or ImageNet's synset ids are taken at their word.
    """
    if not folder.is_dir():
        raise PmvitError(f"expected a folder of images at {folder}; there is none")
    extensions = set(get_img_extensions())
    found = (Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names)
    files = [path for path in found if path.suffix.lower() in extensions]
    files.sort(key=lambda path: natural_key(str(path.relative_to(folder))))
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


class ImageFolder(Dataset[tuple[Tensor | str, int]]):
    """Images of a folder, ready for a model. One that cannot be read comes as the reason why, not as an exception."""

    def __init__(self, files: list[Path], labels: list[int] | None, transform: Transform, mode: str = "RGB") -> None:
        self.files = files
        self.labels = labels
        self.transform = transform
        self.mode = mode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor | str, int]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's about odd metadata, once an image
                with Image.open(self.files[index]) as image:
                    tensor = self.transform(image.convert(self.mode))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return f"{type(error).__name__}: {error}", index
        return tensor, index


class FolderLoader:
    """Batches of `(images, labels)`, or of images where the folder has no classes. Broken images are left out.

    Attributes:
        name: Which images these are, in which batches.
        broken: What was left out so far.
    """

    def __init__(
        self, dataset: ImageFolder, batch_size: int, workers: int, order: list[int], strict: bool, name: str
    ) -> None:
        self.dataset = dataset
        self.strict = strict
        self.name = name
        self.broken = Broken()
        self._loader = DataLoader(
            dataset, batch_size, sampler=order, num_workers=workers, collate_fn=list, persistent_workers=workers > 0
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for items in self._loader:
            indices = []
            for image, index in items:
                if isinstance(image, Tensor):
                    indices.append(index)
                    continue
                path = self.dataset.files[index]
                if self.strict:
                    raise PmvitError(f"expected an image, got a file that cannot be read: {path} ({image})")
                self.broken.files[path] = image
            if not indices:
                continue
            images = torch.stack([image for image, _ in items if isinstance(image, Tensor)])
            labels = self.dataset.labels
            yield images if labels is None else (images, torch.tensor([labels[index] for index in indices]))


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
) -> FolderLoader:
    """Make a loader of a folder of images, prepared as the model's data configuration says.

    Args:
        folder: Images in one subfolder a class, or images alone.
        data_config: Size, mean, interpolation and so on, as timm has them for a model.
        num_classes: The classes of the model, to number the folders right.
        batch_size: Images a batch.
        workers: Processes that read images.
        shuffle: Take the images in an order that depends only on the seed.
        seed: For `shuffle`.
        strict: A broken image is an error instead of being left out.
    """
    files, labels = find_images(Path(folder), num_classes)
    channels = data_config["input_size"][0]
    transform = create_transform(
        input_size=tuple(data_config["input_size"]),
        interpolation=data_config["interpolation"],
        mean=tuple(data_config["mean"]),
        std=tuple(data_config["std"]),
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"],
    )
    order = list(range(len(files)))
    if shuffle:
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    dataset = ImageFolder(files, labels, transform, mode="L" if channels == 1 else "RGB")
    name = f"{len(files)} images of {Path(folder).resolve().name} in batches of {batch_size}, seed {seed}"
    return FolderLoader(dataset, batch_size, workers, order, strict, name)
