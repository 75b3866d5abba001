"""Images with a mask each: ADE20K, Cityscapes, Pascal-Context, and folders of images and masks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pmvit.data.samples import Mask
from pmvit.data.sources import ENDINGS, FileSource, list_files
from pmvit.errors import PmvitError

Split = Literal["train", "val"]
Pairs = tuple[tuple[Path, Path], ...]
Found = tuple[Pairs, Sequence[int], str]  # files, the numbers of the classes in masks, what to call the split
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # of the 19 train ids
SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "test")}  # what they may be called


def _match(images: Path, masks: Path, image_ending: str = "", mask_ending: str = "") -> Pairs:
    """Pair the files below two folders whose paths, without these endings and the suffix, are the same."""
    sides: list[dict[str, Path]] = []
    for folder, what, suffixes, ending in (
        (images, "images", ENDINGS, image_ending),
        (masks, "masks", (".png",), mask_ending),
    ):
        if not folder.is_dir():
            raise PmvitError(f"expected a folder of {what} at {folder}; there is none")
        files = list_files(folder, suffixes, tell=what == "images")
        names = {str(path.relative_to(folder).with_suffix("")): path for path in files}
        sides.append({name.removesuffix(ending): path for name, path in names.items() if name.endswith(ending)})
    of_image, of_mask = sides
    if not of_image:
        raise PmvitError(f"expected images below {images}; found none")
    missing = ((of_image, of_mask, "a mask (.png)", masks), (of_mask, of_image, "an image", images))
    for these, those, what, where in missing:
        if lonely := [path for name, path in these.items() if name not in those]:
            more = f" and {len(lonely) - 1} others" if len(lonely) > 1 else ""
            raise PmvitError(f"expected {what} below {where} for {lonely[0]}{more}; there is none")
    return tuple((path, of_mask[name]) for name, path in of_image.items())


def ade20k(root: Path, split: str, _num_classes: int) -> Found:
    """`images/training`, `annotations/training`; 150 classes counted from 1, 0 ignored."""
    split = {"train": "training", "val": "validation"}.get(split, split)
    return _match(root / "images" / split, root / "annotations" / split), range(1, 151), split


def cityscapes(root: Path, split: str, num_classes: int) -> Found:
    """`leftImg8bit/train`, `gtFine/train`; the 19 train ids, from `labelTrainIds` masks or else from `labelIds`."""
    masks = root / "gtFine" / split
    prepared = any(path.stem.endswith("_gtFine_labelTrainIds") for path in list_files(masks, (".png",)))
    ending = "_gtFine_labelTrainIds" if prepared else "_gtFine_labelIds"
    pairs = _match(root / "leftImg8bit" / split, masks, "_leftImg8bit", ending)
    return pairs, range(num_classes) if prepared else CITYSCAPES_IDS, split


def pascal_context(root: Path, split: str, num_classes: int) -> Found:
    """`JPEGImages`, `SegmentationClassContext`, and the names of a split in `ImageSets/SegmentationContext`.

    Of 60 classes the first is background; with 59, background is ignored.
    """
    listing = root / "ImageSets" / "SegmentationContext" / f"{split}.txt"
    if not listing.is_file():
        raise PmvitError(f"expected the names of the images of {split} in {listing}; there is no such file")
    images, masks, names = root / "JPEGImages", root / "SegmentationClassContext", listing.read_text("utf-8").split()
    pairs = tuple((images / f"{name}.jpg", masks / f"{name}.png") for name in names)
    if missing := [path for pair in pairs for path in pair if not path.is_file()]:
        raise PmvitError(f"expected {missing[0]}, which {listing.name} names; there is no such file")
    if not pairs:
        raise PmvitError(f"expected names of images in {listing}; it is empty")
    return pairs, range(60 - num_classes, 60), split


def folder_pairs(root: Path, split: str, num_classes: int, first_label: int = 0) -> Found:
    """`images` and `masks`, with the folder of a split below both if there is one; classes count from `first_label`."""
    below = next((name for name in SPLITS.get(split, (split,)) if (root / "images" / name).is_dir()), "")
    if not below and split not in SPLITS:
        raise PmvitError(f"expected a folder of images at {root / 'images' / split}; there is none")
    pairs = _match(root / "images" / below, root / "masks" / below)
    return pairs, range(first_label, first_label + num_classes), below or "all"


LAYOUTS = {  # by a pair of folders: how files are found, what the dataset is called, how many classes it may have
    ("images", "annotations"): (ade20k, "ADE20K", (150,)),
    ("leftImg8bit", "gtFine"): (cityscapes, "Cityscapes", (19,)),
    ("JPEGImages", "SegmentationClassContext"): (pascal_context, "Pascal-Context", (59, 60)),
}
PLAIN = ("images", "masks")


def _root(data: str | Path) -> tuple[Path, str]:
    """The folder and the split of `FOLDER@SPLIT`; a folder that has an @ in its name is a folder."""
    if "@" not in str(data) or Path(data).exists():
        return Path(data), ""
    folder, _, named = str(data).rpartition("@")
    return Path(folder), named


def _folders(root: Path) -> tuple[str, str] | None:
    """The folders of images and of masks, of the first layout that fits."""
    return next((pair for pair in (*LAYOUTS, PLAIN) if all((root / name).is_dir() for name in pair)), None)


def has_masks(data: str | Path) -> bool:
    """Whether a folder has one of the layouts that `open_pairs` knows."""
    return _folders(_root(data)[0]) is not None


def has_validation(data: str | Path) -> bool:
    """Whether a folder with masks has images to validate on apart from those to train on."""
    root, named = _root(data)
    places = ["leftImg8bit/val", "ImageSets/SegmentationContext/val.txt", *(f"images/{name}" for name in SPLITS["val"])]
    return not named and has_masks(data) and any((root / place).exists() for place in places)


def open_pairs(
    data: str | Path, num_classes: int, split: Split = "train", first_label: int | None = None
) -> FileSource:
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
    if not root.is_dir():
        raise PmvitError(f"expected a folder of images and masks at {root}; there is none")
    root, folders = root.resolve(), _folders(root)
    if folders is None:
        layouts = "; ".join(" and ".join(pair) for pair in (*LAYOUTS, PLAIN))
        raise PmvitError(f"expected one of these pairs of folders in {root}: {layouts}; found none")
    if folders == PLAIN:
        pairs, classes, chosen = folder_pairs(root, named or split, num_classes, first_label or 0)
    else:
        layout, dataset, expected = LAYOUTS[folders]
        if first_label is not None:
            raise PmvitError(f"{root} has the layout of a dataset whose labels are known; got first_label beside it")
        if num_classes not in expected:
            counts = " or ".join(map(str, expected))
            raise PmvitError(f"expected a model of {counts} classes for {dataset}; got one of {num_classes}")
        pairs, classes, chosen = layout(root, named or split, num_classes)
    masks = [Mask(mask, classes) for _, mask in pairs]
    return FileSource([image for image, _ in pairs], masks, f"{len(pairs)} images of {root.name} ({chosen})")
