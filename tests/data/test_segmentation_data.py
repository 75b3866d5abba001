"""Images with masks: the layouts of the datasets, what is wrong with a file, and augmentation that can be repeated."""

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import pmvit
from pmvit.data.loaders import create_loader, prepare
from pmvit.data.samples import Mask
from pmvit.data.segmentation import has_masks, open_pairs
from pmvit.data.sources import FileSource
from pmvit.data.training import SourceData
from pmvit.data.transforms import Preparation

CONFIG = {"input_size": [3, 32, 48], "interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.25] * 3}
AUGMENTATION: dict[str, Any] = {"scale": (0.5, 2.0), "hflip": 0.5, "color_jitter": 0.5}


def write_image(path: Path, size: tuple[int, int] = (40, 60), seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_mask(path: Path, values: list[int], size: tuple[int, int] = (40, 60)) -> None:
    """Vertical stripes of these values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stripes = np.array(values, dtype=np.uint8)[np.arange(size[1]) * len(values) // size[1]]
    Image.fromarray(np.tile(stripes, (size[0], 1))).save(path)


def mask_of(source: FileSource) -> Mask:
    """The first mask."""
    mask = source[0].label
    assert isinstance(mask, Mask)
    return mask


def labels_of(source: FileSource) -> list[int]:
    """The labels of the first row of the first mask, each once."""
    row = mask_of(source).read((40, 60))[0].tolist()
    return list(dict.fromkeys(row))


def plain(folder: Path, values: list[int], count: int = 4) -> Path:
    for number in range(count):
        write_image(folder / "images" / f"{number}.png", seed=number)
        write_mask(folder / "masks" / f"{number}.png", values)
    return folder


def test_ade20k(tmp_path: Path) -> None:
    for split in ("training", "validation"):
        write_image(tmp_path / "images" / split / f"ADE_{split}.jpg")
        write_mask(tmp_path / "annotations" / split / f"ADE_{split}.png", [0, 1, 150])
    assert has_masks(tmp_path)
    source = open_pairs(tmp_path, 150)
    assert source.files[0].name == "ADE_training.jpg"
    assert labels_of(source) == [255, 0, 149]
    assert mask_of(open_pairs(tmp_path, 150, "val")).path.name == "ADE_validation.png"
    assert mask_of(open_pairs(f"{tmp_path}@validation", 150)).path.name == "ADE_validation.png"
    with pytest.raises(pmvit.PmvitError, match="expected a model of 150 classes for ADE20K; got one of 3"):
        open_pairs(tmp_path, 3)


@pytest.mark.parametrize(
    ("ending", "values", "expected"),
    [("labelIds", [0, 7, 33, 4], [255, 0, 18]), ("labelTrainIds", [0, 18, 255], [0, 18, 255])],
)
def test_cityscapes(ending: str, values: list[int], expected: list[int], tmp_path: Path) -> None:
    write_image(tmp_path / "leftImg8bit/train/ulm/ulm_000_leftImg8bit.png")
    write_mask(tmp_path / f"gtFine/train/ulm/ulm_000_gtFine_{ending}.png", values)
    write_mask(tmp_path / "gtFine/train/ulm/ulm_000_gtFine_instanceIds.png", [1])
    assert labels_of(open_pairs(tmp_path, 19)) == expected


def test_pascal_context(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_image(tmp_path / "JPEGImages" / f"{name}.jpg")
        write_mask(tmp_path / "SegmentationClassContext" / f"{name}.png", [0, 1, 59])
    lists = tmp_path / "ImageSets" / "SegmentationContext"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("b\n")
    assert labels_of(open_pairs(tmp_path, 59)) == [255, 0, 58]
    assert labels_of(open_pairs(tmp_path, 60)) == [0, 1, 59]
    assert [image.stem for image in open_pairs(tmp_path, 60).files] == ["b"]
    (lists / "train.txt").write_text("c\n")
    with pytest.raises(pmvit.PmvitError, match=r"c\.jpg, which train\.txt names"):
        open_pairs(tmp_path, 59)


def test_plain_masks_count_from_the_first_label(tmp_path: Path) -> None:
    plain(tmp_path, [1, 2, 3, 255, 0])
    assert labels_of(open_pairs(tmp_path, 3, first_label=1)) == [0, 1, 2, 255]
    assert labels_of(open_pairs(tmp_path, 4)) == [1, 2, 3, 255, 0]


def test_what_is_wrong_is_said_with_the_name_of_the_file(tmp_path: Path) -> None:
    folder = plain(tmp_path, [0, 1])
    write_mask(folder / "masks" / "2.png", [0, 7])
    loader = create_loader(open_pairs(folder, 2), CONFIG, workers=1)
    with pytest.raises(pmvit.PmvitError, match=r"2\.png: expected labels 0 to 1.*got 7") as found:
        list(loader)
    assert "\n" not in str(found.value)
    assert multiprocessing.active_children() == []  # left to the garbage collector, the worker would take ten seconds
    write_mask(folder / "masks" / "2.png", [0, 1], size=(40, 61))
    with pytest.raises(pmvit.PmvitError, match=r"2\.png: expected a mask of 40 x 60 pixels.*got 40 x 61"):
        list(create_loader(open_pairs(folder, 2), CONFIG, workers=0))
    write_image(folder / "masks" / "2.png")
    with pytest.raises(pmvit.PmvitError, match=r"2\.png: expected a mask with one number per pixel.*RGB"):
        list(create_loader(open_pairs(folder, 2), CONFIG, workers=0))
    (folder / "masks" / "2.png").unlink()
    with pytest.raises(pmvit.PmvitError, match=r"expected a mask \(\.png\) below .* for .*images/2\.png"):
        open_pairs(folder, 2)
    (folder / "images" / "2.png").unlink()
    (folder / "images" / "3.png").unlink()
    with pytest.raises(pmvit.PmvitError, match=r"expected an image below .* for .*masks/3\.png"):
        open_pairs(folder, 2)
    with pytest.raises(pmvit.PmvitError, match="expected one of these pairs of folders"):
        open_pairs(folder / "images", 2)


def test_a_broken_image_is_left_out(tmp_path: Path) -> None:
    folder = plain(tmp_path, [0, 1])
    (folder / "images" / "1.png").write_bytes(b"no image")
    loader = create_loader(open_pairs(folder, 2), CONFIG, batch_size=2, workers=0)
    assert [tuple(labels.shape) for _, labels in loader] == [(1, 32, 48), (2, 32, 48)]
    assert len(loader.broken) == 1


def test_whole_images_keep_their_masks_and_crops_keep_both_together() -> None:
    stripes = np.zeros((40, 90, 3), dtype=np.uint8)
    stripes[:, 45:] = 255
    mask = torch.zeros(40, 90, dtype=torch.int64)
    mask[:, 45:] = 1
    preparation = Preparation(CONFIG)
    image, labels = preparation.whole_pair(Image.fromarray(stripes), mask)
    assert tuple(image.shape) == (3, 32, 72)
    assert torch.equal(labels, mask)
    image, labels = preparation.centre_pair(Image.fromarray(stripes), mask)
    assert tuple(image.shape) == (3, 32, 48)
    assert torch.equal(labels, (image[0] > 0).long())
    assert image.min() == -2
    assert image.max() == 2


def test_augmentation_moves_image_and_mask_together() -> None:
    blocks = torch.randint(0, 2, (5, 7), generator=torch.Generator().manual_seed(0))
    mask = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)
    image = Image.fromarray((mask * 255).byte()[..., None].expand(-1, -1, 3).numpy())
    augment: Any = partial(Preparation(CONFIG).augmented_pair, **{**AUGMENTATION, "color_jitter": 0.0})
    padded = 0
    for seed in range(20):
        torch.manual_seed(seed)
        pixels, labels = augment(image, mask)
        assert tuple(pixels.shape) == (3, 32, 48)
        assert pixels.dtype == torch.uint8
        inside = labels != 255
        assert ((pixels[0] > 127) == (labels == 1))[inside].float().mean() > 0.8
        assert (pixels[:, ~inside] == 128).all()
        padded += int(not inside.all())
    assert 0 < padded < 20


def test_training_batches_are_the_same_from_any_point(tmp_path: Path) -> None:
    source = open_pairs(plain(tmp_path, [0, 1, 255], count=8), 2)
    augmentation = partial(Preparation(CONFIG).augmented_pair, **AUGMENTATION)
    data = SourceData(source, partial(prepare, augmentation, "RGB"), batch=2, workers=0, seed=3)
    first, again = list(data.epoch(1, 0)), list(data.epoch(1, 2))
    assert len(first) == 4
    for here, there in zip(first[2:], again, strict=True):
        assert torch.equal(here.images, there.images)
        assert here.labels is not None
        assert there.labels is not None
        assert torch.equal(here.labels, there.labels)
        assert tuple(here.labels.shape) == (2, 32, 48)
    other = next(iter(data.epoch(2, 0)))
    assert not torch.equal(other.images, first[0].images)


@pytest.mark.data
def test_real_pets(data: Path) -> None:
    source = open_pairs(data / "pets", 3, "val", first_label=1)
    assert len(source) == 1835
    images, labels = next(iter(create_loader(source, CONFIG, batch_size=4, workers=0, shuffle=True)))
    assert images.shape == (4, 3, 32, 48)
    assert set(labels.unique().tolist()) == {0, 1, 2}
    whole = create_loader(source, CONFIG, whole=True, workers=0)
    assert len(whole) == 1835
    image, mask = next(iter(whole))
    with Image.open(source.files[0]) as original:
        assert tuple(mask.shape) == (1, original.height, original.width)
    assert image.shape[-2] == 32 or image.shape[-1] == 48
