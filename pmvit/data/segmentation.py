"""Images with a label for each pixel: ADE20K, Cityscapes, Pascal-Context, and folders of images and masks."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from timm.data.readers.img_extensions import get_img_extensions
from timm.utils.misc import natural_key
from torch import Tensor

from pmvit.data.batches import IGNORED
from pmvit.data.sources import Sample
from pmvit.errors import PmvitError

Split = Literal["train", "val"]
UNKNOWN = -1
MASK_MODES = {"1", "L", "P", "I", "I;16"}  # one number a pixel
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # of the 19 train ids
CITYSCAPES_LAST_ID = 33
PASCAL_CLASSES = 59


@dataclass(frozen=True)
class LabelMap:
    """What the numbers in a mask stand for.

    Attributes:
        classes: For each number from 0 to 255 a class, 255 for pixels that are ignored, -1 for what may not occur.
        expected: The numbers that may occur, in words.
    """

    classes: tuple[int, ...]
    expected: str

    @staticmethod
    def counted(num_classes: int, first: int = 0) -> "LabelMap":
        """Classes are counted from `first`; what is below, and 255, is ignored."""
        table = [UNKNOWN] * 256
        table[:first] = [IGNORED] * first
        table[first : first + num_classes] = range(num_classes)
        table = [*table[:IGNORED], IGNORED]
        below = f", below that or {IGNORED} ignored" if first else f", or {IGNORED} ignored"
        return LabelMap(tuple(table), f"{first} to {first + num_classes - 1}{below}")

    @staticmethod
    def chosen(ids: tuple[int, ...], last: int) -> "LabelMap":
        """Classes are these numbers, in this order; others up to `last`, and 255, are ignored."""
        table = [IGNORED] * (last + 1) + [UNKNOWN] * (IGNORED - last - 1) + [IGNORED]
        for number, value in enumerate(ids):
            table[value] = number
        return LabelMap(tuple(table), f"0 to {last}, or {IGNORED} ignored")

    def __call__(self, mask: npt.NDArray[np.int64], name: str) -> Tensor:
        """The class of each pixel as int64.

        Raises:
            PmvitError: That names the file, if it has a number that stands for nothing.
        """
        if mask.size and (mask.min() < 0 or mask.max() > IGNORED):
            worst = int(mask.min()) if mask.min() < 0 else int(mask.max())
            raise PmvitError(f"{name}: expected labels {self.expected}; got {worst}")
        labels = np.asarray(self.classes, dtype=np.int64)[mask]
        if (labels == UNKNOWN).any():
            raise PmvitError(
                f"{name}: expected labels {self.expected}; got {int(mask[labels == UNKNOWN][0])}: are these the masks "
                "of this model's classes?"
            )
        return torch.from_numpy(labels)


@dataclass(frozen=True)
class PairSource:
    """Images and the masks that belong to them, by number.

    Attributes:
        pairs: Files of an image and of its mask.
        labels: What the numbers in the masks stand for.
        name: Which these are.
    """

    pairs: tuple[tuple[Path, Path], ...]
    labels: LabelMap
    name: str

    def __len__(self) -> int:
        return len(self.pairs)

    def sample(self, index: int) -> Sample:
        """The image, not decoded yet."""
        path = self.pairs[index][0]
        return Sample(path, None, str(path))

    def mask(self, index: int, size: tuple[int, int]) -> Tensor:
        """The classes of the pixels of an image, (height, width).

        Raises:
            PmvitError: That names the file, if it cannot be read or is not a mask of an image of this size.
        """
        path = self.pairs[index][1]
        try:
            with Image.open(path) as image:
                mode, pixels = image.mode, np.array(image).astype(np.int64)
        except (OSError, SyntaxError, ValueError) as error:
            raise PmvitError(f"{path}: expected a mask, got a file that cannot be read ({error})") from None
        if mode not in MASK_MODES or pixels.ndim != 2:
            raise PmvitError(f"{path}: expected a mask with one number a pixel, got an image of mode {mode}")
        if pixels.shape != size:
            raise PmvitError(
                f"{path}: expected a mask of {size[0]} x {size[1]} pixels, the size of {self.pairs[index][0].name}; "
                f"got {pixels.shape[0]} x {pixels.shape[1]}"
            )
        return self.labels(pixels, str(path))


def _files(folder: Path, endings: set[str]) -> list[Path]:
    found = (Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names)
    files = [path for path in found if path.suffix.lower() in endings]
    return sorted(files, key=lambda path: natural_key(str(path.relative_to(folder))))


def _match(
    images: Path, masks: Path, image_key: Callable[[str], str | None], mask_key: Callable[[str], str | None]
) -> tuple[tuple[Path, Path], ...]:
    """Pair the files below two folders whose paths, without ending and as the keys shorten them, are the same."""
    for folder, what in ((images, "images"), (masks, "masks")):
        if not folder.is_dir():
            raise PmvitError(f"expected a folder of {what} at {folder}; there is none")
    sides: list[dict[str, Path]] = []
    for folder, endings, key in ((images, set(get_img_extensions()), image_key), (masks, {".png"}, mask_key)):
        names = {path: key(str(path.relative_to(folder).with_suffix(""))) for path in _files(folder, endings)}
        sides.append({name: path for path, name in names.items() if name is not None})
    of_image, of_mask = sides
    if not of_image:
        raise PmvitError(f"expected images below {images}; found none")
    for these, those, what, where in (
        (of_image, of_mask, "a mask (.png)", masks),
        (of_mask, of_image, "an image", images),
    ):
        if lonely := [path for name, path in these.items() if name not in those]:
            more = f" and {len(lonely) - 1} others" if len(lonely) > 1 else ""
            raise PmvitError(f"expected {what} below {where} for {lonely[0]}{more}; there is none")
    return tuple((path, of_mask[name]) for name, path in of_image.items())


def _whole(name: str) -> str | None:
    return name


def _ending(ending: str) -> Callable[[str], str | None]:
    """A key for files whose names end so: the rest of the name; other files have none."""

    def key(name: str) -> str | None:
        return name.removesuffix(ending) if name.endswith(ending) else None

    return key


def ade20k(root: Path, split: str, num_classes: int) -> PairSource:
    """`images/training`, `annotations/training`; 150 classes counted from 1, 0 ignored."""
    split = {"train": "training", "val": "validation"}.get(split, split)
    pairs = _match(root / "images" / split, root / "annotations" / split, _whole, _whole)
    _check_classes("ADE20K", num_classes, (150,))
    return PairSource(pairs, LabelMap.counted(150, first=1), f"{len(pairs)} images of {root.name} ({split})")


def cityscapes(root: Path, split: str, num_classes: int) -> PairSource:
    """`leftImg8bit/train`, `gtFine/train`; the 19 train ids, from `labelTrainIds` masks or else from `labelIds`."""
    _check_classes("Cityscapes", num_classes, (len(CITYSCAPES_IDS),))
    masks = root / "gtFine" / split
    prepared = any(path.stem.endswith("_gtFine_labelTrainIds") for path in _files(masks, {".png"}))
    ending = "_gtFine_labelTrainIds" if prepared else "_gtFine_labelIds"
    pairs = _match(root / "leftImg8bit" / split, masks, _ending("_leftImg8bit"), _ending(ending))
    ids = LabelMap.chosen(CITYSCAPES_IDS, CITYSCAPES_LAST_ID)
    labels = LabelMap.counted(len(CITYSCAPES_IDS)) if prepared else ids
    return PairSource(pairs, labels, f"{len(pairs)} images of {root.name} ({split})")


def pascal_context(root: Path, split: str, num_classes: int) -> PairSource:
    """`JPEGImages`, `SegmentationClassContext`, and the names of a split in `ImageSets/SegmentationContext`.

    Of 60 classes the first is background; with 59, background is ignored.
    """
    _check_classes("Pascal-Context", num_classes, (PASCAL_CLASSES, PASCAL_CLASSES + 1))
    listing = root / "ImageSets" / "SegmentationContext" / f"{split}.txt"
    if not listing.is_file():
        raise PmvitError(f"expected the names of the images of {split} in {listing}; there is no such file")
    names = listing.read_text(encoding="utf-8").split()
    pairs = tuple(
        (root / "JPEGImages" / f"{name}.jpg", root / "SegmentationClassContext" / f"{name}.png") for name in names
    )
    if missing := [path for pair in pairs for path in pair if not path.is_file()]:
        raise PmvitError(f"expected {missing[0]}, which {listing.name} names; there is no such file")
    if not pairs:
        raise PmvitError(f"expected names of images in {listing}; it is empty")
    labels = LabelMap.counted(num_classes, first=1 if num_classes == PASCAL_CLASSES else 0)
    return PairSource(pairs, labels, f"{len(pairs)} images of {root.name} ({split})")


def folder_pairs(root: Path, split: str, num_classes: int, first_label: int = 0) -> PairSource:
    """`images` and `masks`, with the folder of a split below both if there is one; classes count from `first_label`."""
    names = {"train": ("train", "training"), "val": ("val", "validation", "test")}.get(split, (split,))
    below = next((name for name in names if (root / "images" / name).is_dir()), None)
    if below is None and split not in ("train", "val"):
        raise PmvitError(f"expected a folder of images at {root / 'images' / split}; there is none")
    images, masks = (root / side if below is None else root / side / below for side in ("images", "masks"))
    pairs = _match(images, masks, _whole, _whole)
    labels = LabelMap.counted(num_classes, first_label)
    return PairSource(pairs, labels, f"{len(pairs)} images of {root.name} ({below or 'all'})")


def _check_classes(dataset: str, num_classes: int, expected: tuple[int, ...]) -> None:
    if num_classes not in expected:
        classes = " or ".join(str(count) for count in expected)
        raise PmvitError(f"expected a model of {classes} classes for {dataset}; got one of {num_classes}")


LAYOUTS = {
    ("images", "annotations"): ade20k,
    ("leftImg8bit", "gtFine"): cityscapes,
    ("JPEGImages", "SegmentationClassContext"): pascal_context,
}
PLAIN = ("images", "masks")


def _root(data: str | Path) -> tuple[Path, str]:
    """The folder and the split of `FOLDER@SPLIT`; a folder that has an @ in its name is a folder."""
    if "@" not in str(data) or Path(data).exists():
        return Path(data), ""
    folder, _, named = str(data).rpartition("@")
    return Path(folder), named


def has_masks(data: str | Path) -> bool:
    """Whether a folder has one of the layouts that `open_pairs` knows."""
    root, _ = _root(data)
    return any(all((root / name).is_dir() for name in folders) for folders in (*LAYOUTS, PLAIN))


def has_validation(data: str | Path) -> bool:
    """Whether a folder with masks has images to validate on apart from those to train on."""
    root, named = _root(data)
    places = (
        "images/validation",
        "leftImg8bit/val",
        "ImageSets/SegmentationContext/val.txt",
        "images/val",
        "images/test",
    )
    return not named and has_masks(data) and any((root / place).exists() for place in places)


def open_pairs(
    data: str | Path, num_classes: int, split: Split = "train", first_label: int | None = None
) -> PairSource:
    """Find images and masks in the layout of a folder.

    Args:
        data: The folder, which has `images` and `annotations` (ADE20K), `leftImg8bit` and `gtFine` (Cityscapes),
            `JPEGImages` and `SegmentationClassContext` (Pascal-Context), or `images` and `masks`. `FOLDER@SPLIT` names
            a split by the name of its folder.
        num_classes: The classes of the model.
        split: What the images are for, where no split is named.
        first_label: The number of the first class in plain masks; what is below is ignored.
    """
    root, named = _root(data)
    chosen = named or split
    if not root.is_dir():
        raise PmvitError(f"expected a folder of images and masks at {root}; there is none")
    root = root.resolve()
    for folders, layout in LAYOUTS.items():
        if all((root / name).is_dir() for name in folders):
            if first_label is not None:
                raise PmvitError(
                    f"{root} has the layout of a dataset whose labels are known; got first_label beside it"
                )
            return layout(root, chosen, num_classes)
    if all((root / name).is_dir() for name in PLAIN):
        return folder_pairs(root, chosen, num_classes, first_label or 0)
    layouts = "; ".join(" and ".join(folders) for folders in [*LAYOUTS, PLAIN])
    raise PmvitError(f"expected one of these pairs of folders in {root}: {layouts}; found none")
