"""Folders become loaders: labels, broken images, the model's own preparation; the demo's data."""

import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import pmvit
from pmvit.data.batches import first_images
from pmvit.data.demo import CLASSES, demo_images, demo_loader, demo_model
from pmvit.data.loaders import create_loader
from pmvit.data.sources import choose_samples, find_images, open_source
from pmvit.errors import PmvitWarning
from pmvit.hosts import host_of

import timm  # isort: skip
from timm.data import create_transform  # isort: skip

CONFIG = {
    "input_size": [3, 32, 32],
    "interpolation": "bicubic",
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "crop_pct": 1.0,
    "crop_mode": "center",
}


def write_images(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), (number * 20, 100, 50)).save(folder / name)


def labels_of(folder: Path, num_classes: int | None = None) -> list[int] | None:
    return find_images(folder, num_classes)[1]


def test_class_folders_are_numbered_in_natural_order(tmp_path: Path) -> None:
    write_images(tmp_path, "class10/a.png", "class2/a.jpg", "class2/sub/b.PNG", "class1/a.jpeg")
    files, labels = find_images(tmp_path, 3)
    assert [path.name for path in files] == ["a.jpeg", "a.jpg", "b.PNG", "a.png"]
    assert labels == [0, 1, 1, 2]


def test_folders_that_are_a_part_of_the_classes(tmp_path: Path) -> None:
    write_images(tmp_path / "numbers", "007/a.png", "3/a.png")
    assert labels_of(tmp_path / "numbers", 10) == [3, 7]
    write_images(tmp_path / "synsets", "n01440764/a.png", "n15075141/a.png")
    assert labels_of(tmp_path / "synsets", 1000) == [0, 999]
    write_images(tmp_path / "names", "cat/a.png", "dog/a.png")
    with pytest.raises(pmvit.PmvitError, match="expected 10 class folders"):
        find_images(tmp_path / "names", 10)


def test_links_are_followed_and_mixtures_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "store", "a/0.png", "b/0.png")
    (tmp_path / "linked").mkdir()
    for name in "ab":
        (tmp_path / "linked" / name).symlink_to(tmp_path / "store" / name)
    assert labels_of(tmp_path / "linked", 2) == [0, 1]
    write_images(tmp_path / "store", "stray.png")
    with pytest.raises(pmvit.PmvitError, match=r"got both \(stray.png lies outside\)"):
        find_images(tmp_path / "store", 2)


def test_images_alone_have_no_labels(tmp_path: Path) -> None:
    write_images(tmp_path, "b.png", "a.png")
    (batch,) = create_loader(open_source(tmp_path), CONFIG, workers=0)
    assert batch.shape == (2, 3, 32, 32)


def test_a_broken_image_is_counted_named_and_skipped(tmp_path: Path) -> None:
    write_images(tmp_path, *(f"{label}/{i}.png" for label in range(2) for i in range(3)))
    whole = (tmp_path / "0/1.png").read_bytes()
    (tmp_path / "0/1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "1/2.png").write_bytes(b"")
    for workers in (0, 2):
        loader = create_loader(open_source(tmp_path), CONFIG, batch_size=2, workers=workers)
        labels = torch.cat([labels for _, labels in loader])
        assert labels.tolist() == [0, 0, 1, 1]
        assert set(loader.broken) == {str(tmp_path / "0/1.png"), str(tmp_path / "1/2.png")}
        assert "2 broken images skipped" in loader.broken.summary()
        assert str(tmp_path / "1/2.png") in loader.broken.summary()
    with pytest.raises(pmvit.PmvitError, match=r"cannot be read: .*1\.png"):
        list(create_loader(open_source(tmp_path), CONFIG, workers=0, strict=True))


def test_folders_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(pmvit.PmvitError, match="expected a folder of images"):
        find_images(tmp_path / "none")
    with pytest.raises(pmvit.PmvitError, match="found none with the endings"):
        find_images(tmp_path)


def test_shuffling_depends_on_the_seed_alone(tmp_path: Path) -> None:
    write_images(tmp_path, *(f"{label}/0.png" for label in range(9)))
    orders = [
        torch.cat(
            [y for _, y in create_loader(open_source(tmp_path), CONFIG, workers=0, shuffle=True, seed=seed)]
        ).tolist()
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(9))


@pytest.mark.data
def test_images_are_prepared_as_timm_prepares_them(deit_tiny: nn.Module, data: Path) -> None:
    config = host_of(deit_tiny).data_config()
    folder = data / "imagenet" / "val" / "000"
    batch = next(iter(create_loader(open_source(folder), config, workers=0)))
    transform = create_transform(**timm.data.resolve_model_data_config(deit_tiny), is_training=False)
    expected = transform(Image.open(folder / "0.jpg").convert("RGB"))
    assert torch.equal(batch[0], expected)


def test_the_demo_ships_a_trained_model_and_its_images() -> None:
    images, labels = demo_images("test", 300)
    assert images.shape == (300, 28, 28)
    assert set(labels.tolist()) == set(range(len(CLASSES)))
    result = pmvit.evaluate(demo_model(), demo_loader("test", count=300), progress=False)
    assert result.images == 300
    assert result.top1 is not None
    assert result.top1 > 0.8


def test_samples_are_spread_evenly_and_an_image_is_a_source(tmp_path: Path) -> None:
    write_images(tmp_path, *(f"{number}.png" for number in range(10)))
    chosen = [[Path(sample.name).stem for sample in choose_samples(open_source(tmp_path), most)] for most in (3, 20)]
    assert chosen == [["0", "3", "6"], [str(number) for number in range(10)]]
    (sample,) = choose_samples(open_source(tmp_path / "4.png"), 3)
    assert (sample.image, sample.label) == (tmp_path / "4.png", None)


def test_the_first_images_of_a_loader() -> None:
    batches = [(torch.full((2, 1, 1, 1), float(number)), torch.zeros(2)) for number in range(3)]
    assert first_images(batches, 3).flatten().tolist() == [0, 0, 1]
    assert first_images([images for images, _ in batches], 99).flatten().tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(pmvit.PmvitError, match="the loader is empty"):
        first_images([], 3)


def test_the_formats_that_are_read(tmp_path: Path) -> None:
    endings = ("png", "jpg", "jpeg", "webp", "bmp", "tif", "tiff", "gif", "WEBP")
    picture = Image.linear_gradient("L").convert("RGB")
    for number, ending in enumerate(endings):
        picture.save(tmp_path / f"{number}.{ending}")
    loader = create_loader(open_source(tmp_path), CONFIG, workers=0)
    (batch,) = loader
    assert (len(batch), loader.broken) == (len(endings), {})
    assert (batch - batch[:1]).abs().max() < 0.1  # all of them the same gradient


def test_what_is_no_image_is_counted_and_named(tmp_path: Path) -> None:
    write_images(tmp_path, "a/0.png", "b/0.png")
    for name in ("a/photo.heic", "a/pixels.npy", "b/list.txt", "b/more.txt", "b/.hidden"):
        (tmp_path / name).write_bytes(b"")
    words = r"4 of 7 files below .* are skipped, .*: a/photo\.heic, a/pixels\.npy, b/list\.txt and 1 more"
    with pytest.warns(PmvitWarning, match=words):
        open_source(tmp_path, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_images(tmp_path / "clean", "0.png")
        open_source(tmp_path / "clean")


def test_sixteen_bits_are_scaled_and_unknown_scales_refused(tmp_path: Path) -> None:
    grey = np.linspace(0, 255, 40 * 36).reshape(36, 40).astype(np.uint8)
    wide = grey.astype(np.uint16) * 257
    Image.fromarray(grey).save(tmp_path / "8.png")
    Image.fromarray(wide).save(tmp_path / "16.png")
    Image.fromarray(wide).save(tmp_path / "16.tif")
    Image.fromarray(wide.astype(np.int32)).save(tmp_path / "32.tif")
    Image.fromarray(wide.astype(np.float32)).save(tmp_path / "float.tif")
    Image.fromarray(wide.astype(np.int32) - 5).save(tmp_path / "negative.tif")
    (expected,) = create_loader(open_source(tmp_path / "8.png"), CONFIG, workers=0)
    for name in ("16.png", "16.tif", "32.tif"):
        (found,) = create_loader(open_source(tmp_path / name), CONFIG, workers=0)
        assert torch.equal(found, expected), name
    for name in ("float.tif", "negative.tif"):
        loader = create_loader(open_source(tmp_path / name), CONFIG, workers=0)
        assert list(loader) == []
        assert "does not say what is black" in loader.broken.summary()


def test_orientation_is_as_timm_has_it(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.linear_gradient("L").convert("RGB").resize((40, 36)).save(tmp_path / "0.jpg", exif=exif)
    (batch,) = create_loader(open_source(tmp_path), CONFIG, workers=0)
    config: Any = CONFIG
    dataset: Any = timm.data.ImageDataset(str(tmp_path), transform=create_transform(**config))
    assert torch.equal(batch[0], dataset[0][0])


def test_a_row_without_an_image_is_a_broken_one(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_images(tmp_path, "0.png")
    features = datasets.Features({"image": datasets.Image()})
    rows = datasets.Dataset.from_dict({"image": [str(tmp_path / "0.png"), None]}, features=features)
    rows.save_to_disk(str(tmp_path / "rows"))
    loader = create_loader(open_source(f"hf:{tmp_path / 'rows'}"), CONFIG, workers=0)
    assert [len(batch) for batch in loader] == [1]
    assert list(loader.broken) == ["row 1 of 2 images of rows@train"]


def test_a_sample_of_a_shard_without_an_image_is_a_broken_one(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    write_images(tmp_path, "0.png")
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        shard.add(tmp_path / "0.png", "000.png")
        shard.add(tmp_path / "0.png", "001.heic")
    loader = create_loader(open_source(tmp_path / "shard.tar"), CONFIG, workers=0)
    assert [len(batch) for batch in loader] == [1]
    assert list(loader.broken) == [f"{tmp_path / 'shard.tar'}:001"]
