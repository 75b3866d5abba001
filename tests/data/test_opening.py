"""What may stand for images: paths, words, datasets, tensors, batches of every kind; and what may not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pmvit
from pmvit.comparison.weights import gradients_of
from pmvit.data.opening import ImageData, as_loader, prepare_as
from pmvit.data.sources import find_images
from pmvit.evaluation.segmentation import evaluate_segmentation
from pmvit.hosts import host_of
from pmvit.methods import PsVit
from tests.helpers import QUIET, make_pictures, small_plan, small_vit
from tests.segmenters import small_segmenter


class Pictures(Dataset[Any]):
    """The images of a folder as Pillow's, as torchvision's `ImageFolder` has them; or as dictionaries."""

    def __init__(self, folder: Path, as_rows: bool = False) -> None:
        self.files, labels = find_images(folder)
        self.labels, self.as_rows = labels or [], as_rows

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.files[index]) as image:
            item = image.convert("RGB"), self.labels[index]
        return {"image": item[0], "label": item[1]} if self.as_rows else item


class Streamed(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("opening") / "pictures", 21)


@pytest.fixture(scope="module")
def prepared(folder: Path) -> tuple[Tensor, Tensor]:
    batches = list(as_loader(small_vit(), folder, workers=0))
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def all_kinds(folder: Path, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """The same images with labels, as everything that may stand for them."""
    pairs = list(zip(images, labels, strict=True))
    return {
        "a path": folder,
        "its text": str(folder),
        "a Dataset of Pillow's images": Pictures(folder),
        "a Dataset of rows": Pictures(folder, as_rows=True),
        "a Dataset of tensors": TensorDataset(images, labels),
        "a stream of images": Streamed(pairs),
        "a stream of batches": Streamed([(images[:9], labels[:9]), (images[9:], labels[9:])]),
        "a DataLoader": DataLoader(TensorDataset(images, labels), batch_size=5),
        "a list": [(images[:9], labels[:9]), (images[9:], labels[9:])],
        "dictionaries": [{"pixel_values": images, "labels": labels}],
        "one batch of a processor": {"pixel_values": images, "labels": labels},
        "labels in a list": [(images, labels.tolist())],
    }


def test_every_kind_of_images_is_evaluated_the_same(folder: Path, prepared: tuple[Tensor, Tensor]) -> None:
    model = small_vit()
    expected = pmvit.evaluate(model, [prepared], progress=False)
    for name, data in all_kinds(folder, *prepared).items():
        found = pmvit.evaluate(model, data, progress=False)
        assert found.images == 21, name
        assert found.top1 == expected.top1, name
        assert found.cross_entropy == pytest.approx(expected.cross_entropy, rel=1e-5), name


def test_images_alone_are_a_tensor_or_its_batches(prepared: tuple[Tensor, Tensor]) -> None:
    model, images = small_vit(), prepared[0]
    expected = pmvit.measure(model, [images], method="measured", progress=False)
    kinds: tuple[ImageData, ...] = (images, {"pixel_values": images}, DataLoader(TensorDataset(images), 21))
    for data in kinds:
        found = pmvit.measure(model, data, method="measured", progress=False)
        assert found.images == 21
        assert found.merges == expected.merges


class Rising(Dataset[Any]):
    """Images in the order of their class, as folders have them, each filled with its number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 96, 96), float(index))


def test_what_is_measured_is_not_the_first_class_alone() -> None:
    first = next(iter(as_loader(small_vit(), Rising(), shuffle=True, batch_size=8)))
    numbers = first[:, 0, 0, 0].tolist()
    assert numbers != sorted(numbers)
    assert max(numbers) > 16


def test_every_verb_takes_a_path_and_a_dataset(folder: Path, tmp_path: Path) -> None:
    model = small_vit()
    kinds: tuple[ImageData, ...] = (folder, Pictures(folder))
    for number, data in enumerate(kinds):
        costs = pmvit.measure(model, data, progress=False)
        small = pmvit.compress(model, pmvit.plan(costs, keep=0.6))
        assert costs.images == 21
        written = pmvit.export(small, tmp_path / f"{number}.pt2", images=data)
        assert written.images == 16
        pmvit.calibrate(small, data, epochs=1, batch_size=7, epoch_images=7, **QUIET)
        tuned = pmvit.finetune(small, train=data, val=data, epochs=1, batch_size=7, lr=1e-4, **QUIET)
        assert tuned.steps == 3
        assert tuned.best is not None
        assert tuned.best.images == 21
        assert PsVit(tolerance=0.5).fit(model, data) == PsVit(tolerance=0.5).fit(model, [_prepared(model, folder)])
        assert set(gradients_of(model, data)) == {name for name, _ in model.named_parameters()}
        compared = pmvit.compare(model, data, gflops=0.02, methods=["tome"], runtimes=(), exports=False, progress=False)
        assert compared.rows[0].evaluation is not None


def _prepared(model: nn.Module, folder: Path) -> Tensor:
    return torch.cat([images for images, _ in as_loader(model, folder, workers=0, shuffle=True)])


def test_masks_come_with_a_dataset(tmp_path: Path) -> None:
    model = small_segmenter()
    for number in range(3):
        image = Image.effect_noise((90, 70), 60).convert("RGB")
        for kind, picture in (("images", image), ("masks", image.convert("L").point(lambda value: value // 86))):
            (tmp_path / kind).mkdir(exist_ok=True)
            picture.save(tmp_path / kind / f"{number}.png")
    pairs = [
        (Image.open(tmp_path / "images" / f"{n}.png").convert("RGB"), Image.open(tmp_path / "masks" / f"{n}.png"))
        for n in range(3)
    ]
    expected = evaluate_segmentation(model, tmp_path, progress=False)
    found = evaluate_segmentation(model, Listed(pairs), progress=False)
    assert (found.miou, found.images) == (expected.miou, 3)
    small = pairs[0][1].resize((9, 7))
    with pytest.raises(pmvit.PmvitError, match="expected a mask of 70 x 90 pixels; got a tensor of shape"):
        evaluate_segmentation(model, Listed([(pairs[0][0], small)]), progress=False)


class Listed(Dataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


IMAGES = torch.zeros(4, 3, 96, 96)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (5, "got a int"),
        (None, "got a NoneType"),
        (nn.Identity(), "got a Identity"),
        (b"folder", "got a bytes"),
        (IMAGES[0], r"got a tensor of shape \(3, 96, 96\)"),
        ({"input_ids": IMAGES}, "got a dict with input_ids"),
        ([IMAGES[0]], r"expected images of shape \(3, 96, 96\), as the model takes them; got \(96, 96\)"),
        ([IMAGES[0, 0]], r"got a tensor of shape \(96, 96\)"),
        ([5], "got a int"),
        ([{"input_ids": IMAGES}], "got a dict with input_ids"),
        ([(IMAGES, torch.zeros(4), "names")], "got a tuple of 3"),
        ([(IMAGES, torch.zeros(3).long())], r"a label for each of 4 images; got a tensor of shape \(3,\)"),
        ([(IMAGES, ["cat"] * 4)], "a label for each of 4 images; got a list of 4"),
        ([IMAGES.byte()], "expected images that are normalised, as the model takes them; got a batch of torch.uint8"),
        ([torch.zeros(2, 3, 64, 64)], r"expected images of shape \(3, 96, 96\), .*got \(3, 64, 64\)"),
        (Listed([]), "expected images in the Listed; it is empty"),
        (Listed(["a.png"]), "item 0 of the Listed: expected an image of Pillow's.*got a str"),
        (Listed([IMAGES[0].byte()]), r"item 0 of the Listed.*got a tensor of shape \(3, 96, 96\)"),
        (Listed([(IMAGES[0], "cat")]), "expected a class or a mask as label; got a str"),
        (Listed([(IMAGES[0], 1), (IMAGES[0, :, :64], 1)]), "expected prepared images of one size"),
        ("nowhere", "expected a folder of images at nowhere; there is none"),
    ],
)
def test_anything_else_is_an_error_of_one_line(data: Any, words: str) -> None:
    with pytest.raises(pmvit.PmvitError, match=words) as raised:
        pmvit.evaluate(small_vit(), data, progress=False)
    assert "\n" not in str(raised.value)


def test_the_wrong_thing_is_refused_by_every_verb(tmp_path: Path) -> None:
    model = small_vit()
    small = pmvit.compress(model, small_plan(model))
    wrong: Any = 5
    for verb in (
        lambda: pmvit.measure(model, wrong),
        lambda: pmvit.evaluate(small, wrong),
        lambda: pmvit.calibrate(small, wrong),
        lambda: pmvit.finetune(small, train=wrong),
        lambda: pmvit.finetune(small, train=[(IMAGES, torch.zeros(4).long())], val=wrong),
        lambda: pmvit.export(small, tmp_path / "m.pt2", images=wrong),
        lambda: pmvit.benchmark(small, images=wrong),
        lambda: pmvit.compare(model, wrong, gflops=0.02, methods=["tome"], progress=False),
        lambda: PsVit(tolerance=0.5).fit(model, wrong),
        lambda: evaluate_segmentation(small_segmenter(), wrong),
    ):
        with pytest.raises(pmvit.PmvitError, match=r"expected images: a path or a word for a dataset, .*got a int"):
            verb()


def test_hugging_face_datasets_are_datasets(folder: Path, prepared: tuple[Tensor, Tensor]) -> None:
    datasets = pytest.importorskip("datasets")
    files, labels = find_images(folder)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"image": list(map(str, files)), "label": labels}, features=features)
    expected = pmvit.evaluate(small_vit(), [prepared], progress=False)
    for data in (rows, rows.to_iterable_dataset()):
        found = pmvit.evaluate(small_vit(), data, progress=False)
        assert (found.images, found.top1) == (21, expected.top1)


def test_a_dataset_tunes_to_the_same_bits_again() -> None:
    """Also one that draws its augmentation itself: its draws are seeded image by image."""

    class Drawn(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return torch.randn(3, 96, 96), index % 7

    weights = []
    for _ in range(2):
        model = small_vit()
        small = pmvit.compress(model, small_plan(model))
        torch.manual_seed(torch.seed())
        pmvit.finetune(small, train=Drawn(), epochs=1, batch_size=4, lr=1e-3, **QUIET)
        weights.append(small.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_how_images_are_prepared_is_changed_or_refused() -> None:
    model = small_vit()
    prepare_as(model, {"crop_pct": 1.0, "mean": (0.1, 0.2, 0.3), "input_size": [3, 96, 96]})
    assert host_of(model).data_config()["mean"] == [0.1, 0.2, 0.3]
    for values, words in (
        ({"input_size": [3, 128, 128]}, r"expected \[3, 96, 96\], as this model has it; got .*--img-size"),
        ({"crop_percent": 1.0}, "expected one of input_size, .*crop_mode to prepare images by; got crop_percent"),
        ({"mean": [0.5]}, "mean: expected"),
        ({"crop_pct": "all"}, "crop_pct 'all'"),
        ({"crop_pct": 1e-9}, "expected images of up to 10,000 pixels a side before they are cropped"),
        ({"crop_mode": "centre"}, "crop_mode: expected center, squash, border; got 'centre'"),
        ({"interpolation": "best"}, "interpolation: expected bilinear, .*; got 'best'"),
    ):
        with pytest.raises(pmvit.PmvitError, match=words):
            prepare_as(small_vit(), values)
