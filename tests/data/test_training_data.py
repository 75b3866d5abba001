"""Training batches: the same again from any point of a run, whatever reads them."""

import io
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pmvit
from pmvit.data.batches import TrainingBatch
from pmvit.data.loaders import create_loader, prepare
from pmvit.data.seeding import seeded
from pmvit.data.sources import open_source
from pmvit.data.training import LoaderData, SourceData, TrainingData
from pmvit.data.transforms import BatchTransform, training_transform
from tests.helpers import make_pictures, small_vit

from timm.data.transforms_factory import create_transform  # isort: skip  # after pmvit

CONFIG: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "crop_pct": 1.0,
    "crop_mode": "center",
}
AUGMENTATION: dict[str, Any] = {
    "crop_scale": (0.3, 1.0),
    "hflip": 0.5,
    "color_jitter": 0.3,
    "auto_augment": None,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures", 40)


@pytest.fixture(scope="module")
def shards(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same images in four tar files, as WebDataset has them."""
    folder = tmp_path_factory.mktemp("shards")
    files = sorted(pictures.rglob("*.png"))
    for number in range(4):
        with tarfile.open(folder / f"images-{number:02d}.tar", "w") as archive:
            for path in files[number::4]:
                for ending, content in (("png", path.read_bytes()), ("cls", path.parent.name.encode())):
                    info = tarfile.TarInfo(f"{path.stem}.{ending}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    return f"{folder}/images-{{00..03}}.tar"


@pytest.fixture(scope="module")
def saved_dataset(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same images as a Hugging Face dataset on disk."""
    import datasets

    files = sorted(pictures.rglob("*.png"))
    features = datasets.Features({"photo": datasets.Image(), "label": datasets.ClassLabel(num_classes=7)})
    rows = {"photo": [str(path) for path in files], "label": [int(path.parent.name) for path in files]}
    made = datasets.Dataset.from_dict(rows, features=features)
    folder = tmp_path_factory.mktemp("hugging") / "pets"
    datasets.DatasetDict({"train": made}).save_to_disk(folder)
    return str(folder)


def opened(data: str | Path, *, workers: int = 0, process: tuple[int, int] = (0, 1), seed: int = 5) -> TrainingData:
    source, transform = open_source(data, 7), training_transform(CONFIG, **AUGMENTATION)
    read = partial(prepare, transform, "RGB")
    return SourceData(source, read, batch=4, workers=workers, seed=seed, process=process, epoch_images=40)


def same(first: list[TrainingBatch], second: list[TrainingBatch]) -> bool:
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        assert a.labels is not None
        assert b.labels is not None
        if not (torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and a.names == b.names):
            return False
    return True


@pytest.fixture(scope="module", params=["folder", "hf", "hf-stream", "shards"])
def data(request: pytest.FixtureRequest, pictures: Path, saved_dataset: str, shards: str) -> str:
    return {
        "folder": str(pictures),
        "hf": f"hf:{saved_dataset}@train",
        "hf-stream": f"hf-stream:{saved_dataset}@train",
        "shards": shards,
    }[request.param]


def test_any_point_of_an_epoch_is_reached_again(data: str) -> None:
    workers = 2
    whole = list(opened(data, workers=workers).epoch(1, 0))
    assert len(whole) == len(opened(data)) == 10
    assert all(batch.images.shape == (4, 3, 32, 32) for batch in whole)
    assert len({name for batch in whole for name in batch.names}) == 40
    for skip in (3, 10):
        assert same(list(opened(data, workers=workers).epoch(1, skip)), whole[skip:])
    assert not same(list(opened(data, workers=workers).epoch(2, 0)), whole)
    assert not same(list(opened(data, workers=workers, seed=6).epoch(1, 0)), whole)


def test_labels_are_those_of_the_images(data: str, pictures: Path) -> None:
    by_number = {path.stem: int(path.parent.name) for path in pictures.rglob("*.png")}
    for batch in opened(data).epoch(0, 0):
        assert batch.labels is not None
        assert [by_number[Path(name.rpartition(":")[2]).stem] for name in batch.names] == batch.labels.tolist()


def test_processes_share_the_images(data: str) -> None:
    names: list[str] = []
    for index in range(2):
        mine = opened(data, process=(index, 2))
        assert len(mine) == 5
        names += [name for batch in mine.epoch(0, 0) for name in batch.names]
    assert len(set(names)) == 40


def test_a_folder_gives_the_same_batches_with_any_number_of_workers(pictures: Path) -> None:
    alone = list(opened(pictures).epoch(0, 0))
    assert same(list(opened(pictures, workers=3).epoch(0, 0)), alone)


def test_two_processes_see_together_what_one_sees(pictures: Path) -> None:
    halves = [list(opened(pictures, process=(index, 2)).epoch(0, 0)) for index in range(2)]
    whole = list(opened(pictures).epoch(0, 0))
    assert [name for a, b in zip(*halves, strict=True) for name in a.names + b.names] == [
        n for b in whole for n in b.names
    ]


def test_evaluation_reads_every_source_once(data: str, pictures: Path) -> None:
    expected = torch.cat([labels for _, labels in create_loader(open_source(pictures), CONFIG, workers=0)])
    loader = create_loader(open_source(data, 7), CONFIG, batch_size=7, workers=2)
    found = torch.cat([labels for _, labels in loader])
    assert sorted(found.tolist()) == sorted(expected.tolist())


def test_a_loader_of_ones_own_gives_the_same_batches_again() -> None:
    dataset = TensorDataset(torch.arange(20.0)[:, None, None, None], torch.arange(20))
    mine = LoaderData(DataLoader(dataset, 4, shuffle=True), seed=1, process=(0, 1))
    whole = list(mine.epoch(0, 0))
    assert same(list(mine.epoch(0, 2)), whole[2:])
    assert not same(list(mine.epoch(1, 0)), whole)
    parts = [list(LoaderData(DataLoader(dataset, 4), seed=1, process=(index, 2)).epoch(0, 0)) for index in range(2)]
    assert [len(part) for part in parts] == [2, 2]


def test_broken_images_are_replaced_and_named(pictures: Path, tmp_path: Path) -> None:
    for path in pictures.rglob("*.png"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        (tmp_path / path.parent.name / path.name).write_bytes(path.read_bytes())
    broken = tmp_path / "3" / "3.png"
    broken.write_bytes(broken.read_bytes()[:100])
    for workers in (0, 2):
        mine = opened(tmp_path, workers=workers)
        batches = list(mine.epoch(0, 0))
        assert [len(batch.images) for batch in batches] == [4] * 10
        assert str(broken) not in [name for batch in batches for name in batch.names]
        assert list(mine.broken) == [str(broken)]


def test_a_batch_of_broken_images_is_named_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for number in range(4):
        (tmp_path / "0" / f"{number}.png").write_bytes(b"no image")
    for workers in (0, 1):
        transform = training_transform(CONFIG, **AUGMENTATION)
        data = SourceData(open_source(tmp_path), partial(prepare, transform, "RGB"), batch=4, workers=workers, seed=0)
        with pytest.raises(pmvit.PmvitError, match=r"^expected images, got a whole batch that cannot be read: /"):
            list(data.epoch(0, 0))


def test_no_random_crop_shows_the_middle_square() -> None:
    transform = training_transform(CONFIG, crop_scale=(1.0, 1.0), hflip=0, color_jitter=0, auto_augment=None)
    image = Image.new("RGB", (96, 32))
    image.paste((255, 255, 255), (32, 0, 64, 32))
    tensor: Tensor = transform(image)
    assert torch.equal(tensor, torch.full((3, 32, 32), 255, dtype=torch.uint8))


def test_training_and_evaluation_prepare_images_alike(pictures: Path) -> None:
    """Without augmentation, a training image is what evaluation sees."""
    transform = training_transform(CONFIG, crop_scale=(1.0, 1.0), hflip=0, color_jitter=0, auto_augment=None)
    path = next(iter(sorted(pictures.rglob("*.png"))))
    square = Image.open(path).crop((7, 0, 103, 96))
    finish = BatchTransform(CONFIG, 0.0, torch.device("cpu"))
    trained = finish(transform(square)[None])
    evaluated = create_transform(**{**CONFIG, "input_size": (3, 32, 32)})(square)[None]
    assert torch.allclose(trained, evaluated, atol=1e-6)
    assert torch.equal(finish(trained), trained)  # what is no bytes is ready
    erased = BatchTransform(CONFIG, 1.0, torch.device("cpu"))(transform(square)[None])
    assert 0.01 < (erased != trained).float().mean() < 0.5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("nowhere/{0..3}.tar", "expected a tar file at nowhere/0.tar"),
        ("hf:nowhere/at/all", "could not open the dataset nowhere/at/all"),
        ("nowhere", "expected a folder of images at nowhere"),
    ],
)
def test_sources_that_are_not_there(data: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(pmvit.PmvitError, match=message):
        open_source(data)


def test_streams_need_a_shard_a_process(shards: str) -> None:
    with pytest.raises(pmvit.PmvitError, match="expected at least 8 shards"):
        opened(shards, process=(0, 8))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
def test_crops_are_timms(pictures: Path, interpolation: str) -> None:
    config = {**CONFIG, "interpolation": interpolation}
    ours = training_transform(config, crop_scale=(0.3, 1.0), hflip=0.5, color_jitter=0.0, auto_augment=None)
    timms = create_transform(
        (3, 32, 32), is_training=True, scale=(0.3, 1.0), color_jitter=0.0, interpolation=interpolation, normalize=False
    )
    for number, path in enumerate(sorted(pictures.rglob("*.png"))[:12]):
        pixels = []
        for transform in (ours, timms):
            with seeded(number):
                pixels.append(transform(Image.open(path).convert("RGB")).int())
        assert pixels[0].shape == (3, 32, 32)
        assert (pixels[0] - pixels[1]).abs().max() <= 1


def test_a_stream_is_evaluated_like_the_folder_it_was_made_of(pictures: Path, shards: str) -> None:
    model = small_vit(img_size=32)
    expected, found = (
        pmvit.evaluate(model, create_loader(open_source(data, 7), CONFIG, workers=0), progress=False)
        for data in (pictures, shards)
    )
    assert found.images == expected.images == 40
    assert found.top1 == expected.top1
    assert found.cross_entropy == pytest.approx(expected.cross_entropy, abs=1e-5)
