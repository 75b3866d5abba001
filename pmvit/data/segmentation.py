"""Images with a mask each: ADE20K, Cityscapes, Pascal-Context, and folders of images and masks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from timm.data.readers.img_extensions import get_img_extensions

from pmvit.data.masks import LabelMap, Mask
from pmvit.data.sources import Sample, list_files
from pmvit.errors import PmvitError

Split = Literal["train", "val"]
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # of the 19 train ids
CITYSCAPES_LAST_ID = 33
PASCAL_CLASSES = 59


@dataclass
class PairSource:
    """A source of images with masks.

    Attributes:
        pairs: Files of an image and of its mask.
        labels: What the numbers in the masks stand for.
        name: Which these are.
    """

    pairs: tuple[tuple[Path, Path], ...]
    labels: LabelMap
    name: str
    has_labels = True

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        image, mask = self.pairs[index]
        return Sample(image, Mask(mask, self.labels), str(image))


def _match(images: Path, masks: Path, image_ending: str = "", mask_ending: str = "") -> tuple[tuple[Path, Path], ...]:
    """Pair the files below two folders whose paths, without these endings and the suffix, are the same."""
    sides: list[dict[str, Path]] = []
    for folder, what, suffixes, ending in (
        (images, "images", set(get_img_extensions()), image_ending),
        (masks, "masks", {".png"}, mask_ending),
    ):
        if not folder.is_dir():
            raise PmvitError(f"expected a folder of {what} at {folder}; there is none")
        names = {str(path.relative_to(folder).with_suffix("")): path for path in list_files(folder, suffixes)}
        sides.append({name.removesuffix(ending): path for name, path in names.items() if name.endswith(ending)})
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


def ade20k(root: Path, split: str, num_classes: int) -> PairSource:
    """`images/training`, `annotations/training`; 150 classes counted from 1, 0 ignored."""
    split = {"train": "training", "val": "validation"}.get(split, split)
    pairs = _match(root / "images" / split, root / "annotations" / split)
    _check_classes("ADE20K", num_classes, (150,))
    return PairSource(pairs, LabelMap.counted(150, first=1), f"{len(pairs)} images of {root.name} ({split})")


def cityscapes(root: Path, split: str, num_classes: int) -> PairSource:
    """`leftImg8bit/train`, `gtFine/train`; the 19 train ids, from `labelTrainIds` masks or else from `labelIds`."""
    _check_classes("Cityscapes", num_classes, (len(CITYSCAPES_IDS),))
    masks = root / "gtFine" / split
    prepared = any(path.stem.endswith("_gtFine_labelTrainIds") for path in list_files(masks, {".png"}))
    ending = "_gtFine_labelTrainIds" if prepared else "_gtFine_labelIds"
    pairs = _match(root / "leftImg8bit" / split, masks, "_leftImg8bit", ending)
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
    pairs = _match(images, masks)
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
