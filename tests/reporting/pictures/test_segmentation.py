"""Pictures of segmentations show what the models found, in colours that can be told apart; trade-off curves, too."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.data.loaders import create_loader
from pmvit.data.segmentation import open_pairs
from pmvit.evaluation.segmentation import evaluate_segmentation
from pmvit.hosts import host_of
from pmvit.hosts.segmenter.model import Segmenter
from pmvit.numbers.colours import NEUTRAL, OKABE_ITO, distances, palette, to_oklab
from pmvit.planning import Plan
from pmvit.reporting.pictures.segmentation import (
    BETTER,
    CHANGED,
    DIFFERENCES,
    DIMMED,
    LEAST_WIDTH,
    OPACITY,
    SAME,
    TILE,
    WORSE,
    Segmentation,
    SegmentedImage,
    differences,
    mask_overlay,
)
from pmvit.reporting.pictures.tiles import MARGIN, SPACE
from pmvit.reporting.pictures.tradeoff import draw_tradeoff, tradeoff_figure
from tests.data.test_segmentation_data import plain, write_image
from tests.helpers import small_vit
from tests.segmenters import small_segmenter

COLUMNS = ["input", "ground truth", "original", "compressed", "difference"]


def width_of(columns: int, column: int) -> int:
    return 2 * MARGIN + columns * (column + SPACE) - SPACE


def colours_of(picture: Image.Image) -> set[tuple[int, ...] | float]:
    counted = picture.getcolors(picture.width * picture.height)
    assert counted is not None
    return {colour for _, colour in counted}


@pytest.fixture(scope="module")
def original() -> Segmenter:
    return small_segmenter()


@pytest.fixture(scope="module")
def small(original: Segmenter) -> Segmenter:
    return pmvit.compress(
        original, pmvit.plan(pmvit.measure(original, [], method="scored", scorer="random"), keep=0.5, prune=0.1)
    )


@pytest.mark.parametrize(("classes", "least"), [(7, 0.07), (20, 0.06), (150, 0.02)])
def test_colours_can_be_told_apart_by_all_eyes(classes: int, least: float) -> None:
    colours = palette(classes)
    assert len(colours) == classes
    assert colours[:7] == OKABE_ITO
    eyes = to_oklab(np.array([*colours, NEUTRAL], dtype=np.float64))
    for one in range(classes + 1):
        others = np.delete(eyes, one, axis=1)
        assert distances(others, eyes[:, one]).min() > least


def test_a_mask_has_its_colours_where_it_should() -> None:
    labels = torch.zeros(6, 9, dtype=torch.int64)
    labels[:, 3:6], labels[:, 6:] = 4, 255
    picture = mask_overlay(Image.new("RGB", (9, 6), (100, 100, 100)), labels, 5)
    assert picture.size == (9, 6)
    for left, colour in ((0, palette(5)[0]), (3, palette(5)[4]), (6, NEUTRAL)):
        expected = tuple(round((1 - OPACITY) * 100 + OPACITY * channel) for channel in colour)
        assert colours_of(picture.crop((left, 0, left + 3, 6))) == {expected}


def test_better_and_worse_by_hand() -> None:
    first, second = torch.tensor([[0, 0, 1, 1, 2, 1]]), torch.tensor([[0, 1, 0, 2, 1, 2]])
    labels = torch.tensor([[1, 0, 0, 0, 255, 1]])
    assert differences(first, second, labels).tolist() == [[SAME, WORSE, BETTER, CHANGED, CHANGED, WORSE]]
    assert differences(first, second, None).tolist() == [[SAME, *[CHANGED] * 5]]


def test_a_model_that_keeps_all_differs_nowhere(original: Segmenter, tmp_path: Path) -> None:
    folder = plain(tmp_path, [0, 1, 2, 255], count=1)
    kept = pmvit.compress(original, Plan.keep_all((4, 6), 6))
    (found,) = pmvit.segment(kept, folder, progress=False).images
    assert found.agreement == 1
    assert found.original_miou == found.compressed_miou
    grey = DIMMED * np.asarray(found.image.convert("L"), dtype=np.float64)
    blank = found.panels()[-1][0]
    assert np.array_equal(np.asarray(blank), np.repeat(grey.round().astype(np.uint8)[..., None], 3, -1))


def test_what_is_drawn_is_what_evaluation_measures(original: Segmenter, small: Segmenter, tmp_path: Path) -> None:
    folder = plain(tmp_path / "data", [1, 2, 3, 0], count=1)
    made = pmvit.segment(small, folder, original=original, first_label=1, stride=32, progress=False)
    (found,) = made.images
    config = host_of(small).data_config()
    loader = create_loader(open_pairs(folder, 3, first_label=1), config, whole=True, workers=0)
    expected = evaluate_segmentation(small, loader, reference=original, stride=32, progress=False)
    assert (found.agreement, found.compressed_miou, found.original_miou) == (
        expected.agreement,
        expected.miou,
        expected.reference_miou,
    )
    assert found.agreement is not None
    assert 0.2 < found.agreement < 1
    assert found.labels is not None
    assert found.compressed is not None
    assert found.labels.shape == found.original.shape == (40, 60)
    kinds = differences(found.original, found.compressed, found.labels)
    drawn = np.asarray(found.panels()[-1][0])
    for kind, (colour, _) in DIFFERENCES.items():
        assert np.array_equal((drawn == colour).all(-1), (kinds == kind).numpy())
    sheet, picture = made.save(tmp_path / "pictures")
    assert (sheet.name, picture.name) == ("sheet.png", "1-0.png")
    with Image.open(sheet) as drawn_sheet, Image.open(picture) as drawn_picture:
        assert drawn_sheet.width == width_of(len(COLUMNS), TILE)
        assert drawn_picture.width == width_of(len(COLUMNS), 4 * 60)  # enlarged, as it is that small
        left = MARGIN + 4 * (4 * 60 + SPACE)
        shown = np.asarray(drawn_picture)[:, left : left + 4 * 60]
    expected_pixels = np.repeat(np.repeat(drawn, 4, axis=0), 4, axis=1)
    tops = [top for top in range(len(shown) - 160) if np.array_equal(shown[top : top + 160], expected_pixels)]
    assert len(tops) == 1  # to the pixel


def test_images_alone_and_one_model_alone(original: Segmenter, small: Segmenter, tmp_path: Path) -> None:
    for number in range(5):
        write_image(tmp_path / f"{number}.png", size=(300, 200), seed=number)
    made = pmvit.segment(small, tmp_path, limit=2, progress=False)
    assert [Path(image.name).name for image in made.images] == ["0.png", "2.png"]
    assert [len(image.panels()) for image in made.images] == [4, 4]
    assert made.images[0].original_miou is None
    assert made.picture(0).width == width_of(4, 200)
    alone = pmvit.segment(original, tmp_path / "3.png", progress=False)
    assert alone.images[0].agreement is None
    assert alone.picture(0).width == width_of(2, 200)
    assert torch.equal(alone.images[0].original, pmvit.segment(original, tmp_path, progress=False).images[3].original)


def test_the_legend_has_the_classes_that_are_there() -> None:
    labels = torch.zeros(30, 200, dtype=torch.int64)
    labels[:, 100:] = 149
    image = SegmentedImage("black.png", Image.new("RGB", (200, 30)), 150, None, labels, None)
    picture = Segmentation((image,)).picture(0)
    assert picture.width == width_of(2, LEAST_WIDTH)
    assert colours_of(picture) & set(palette(150)) == {palette(150)[0], palette(150)[149]}


def test_what_cannot_be_drawn_is_said_in_a_line(small: Segmenter, tmp_path: Path) -> None:
    folder = plain(tmp_path / "data", [0, 1, 2], count=2)
    names = tmp_path / "names.txt"
    names.write_text("pet\nbackground\n")
    other = small_segmenter(classes=4)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (small, {"names": names}, r"names\.txt: expected 3 names.*got 2"),
        (small, {"names": tmp_path / "none.txt"}, r"expected names of classes in .*none\.txt"),
        (small, {"original": other}, "expected an original with 3 classes at 64 x 96 pixels.*got one with 4 classes"),
        (small, {"limit": 0}, "limit: expected 1 or more"),
        (small, {"stride": 100}, "stride: expected 1 to 64"),
        (small_vit(), {}, "expected a model that labels pixels"),
    ]
    for model, options, message in wrong:
        with pytest.raises(pmvit.PmvitError, match=message) as found:
            pmvit.segment(model, folder, progress=False, **options)
        assert "\n" not in str(found.value)
    (folder / "images" / "0.png").write_bytes(b"no image")
    made = pmvit.segment(small, folder, progress=False)
    assert len(made.broken) == 1
    with pytest.raises(pmvit.PmvitError, match=r"expected a folder or a new name.*got the file .*names\.txt"):
        made.save(names)
    (folder / "images" / "1.png").write_bytes(b"no image")
    with pytest.raises(pmvit.PmvitError, match=r"expected an image that can be read, got none: .*0\.png"):
        pmvit.segment(small, folder, progress=False)


def test_the_command_writes_and_measures(original: Segmenter, small: Segmenter, tmp_path: Path) -> None:
    folder = plain(tmp_path / "data", [0, 1, 2], count=3)
    pmvit.save(small, tmp_path / "small")
    pmvit.save(original, tmp_path / "original")
    (tmp_path / "names.txt").write_text("pet\nbackground\nborder\n")
    command = ["segment", tmp_path / "small", "--data", folder, "--names", tmp_path / "names.txt", "--limit", 2]
    command += ["--original", tmp_path / "original", "-o", tmp_path / "pictures"]
    result = CliRunner().invoke(app, [str(part) for part in (*command, "--json")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [Path(row["picture"]).name for row in found["images"]] == ["1-0.png", "2-1.png"]
    assert all(0 <= row["compressed_miou"] <= 1 for row in found["images"])
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["1-0.png", "2-1.png", "sheet.png"]
    shown = CliRunner().invoke(app, [str(part) for part in command])
    assert shown.exit_code == 0, shown.output
    assert "2-1.png" in shown.output
    assert "sheet.png" in shown.output.replace("\n", "")


def rows() -> list[dict[str, Any]]:
    first = {"name": "original", "keep": None, "stage": "original", "gflops": 1.4, "miou": 0.82, "fps": 30.0}
    made = [first]
    for (name, drop), stage, keep in itertools.product((("a", 0.0), ("b", 0.1)), ("compressed", "tuned"), (0.8, 0.5)):
        value = 0.8 * keep**0.1 - drop
        interval = {"miou_low": value - 0.01, "miou_high": value + 0.02}
        made.append({"name": name, "keep": keep, "stage": stage, "gflops": keep, "miou": value, **interval, "fps": 20})
    return made


def test_a_line_for_each_method_and_stage(tmp_path: Path) -> None:
    figure = tradeoff_figure(rows())
    for axes in figure.axes:
        containers = {str(container.get_label()): container for container in axes.containers}
        assert sorted(containers) == ["a, compressed", "a, tuned", "b, compressed", "b, tuned", "original"]
    drawn = {container.get_label(): container[0].get_xydata() for container in figure.axes[0].containers}
    assert drawn["original"].tolist() == [[1.4, 82.0]]
    expected = [[keep, 100 * (0.8 * keep**0.1 - 0.1)] for keep in (0.5, 0.8)]
    assert drawn["b, tuned"] == pytest.approx(np.array(expected))
    path = draw_tradeoff(rows(), tmp_path / "curves.png")
    with Image.open(path) as picture:
        assert picture.width > 2 * 500
    without_speed = [{key: value for key, value in row.items() if key != "fps"} for row in rows()]
    assert len(tradeoff_figure(without_speed, costs=("gflops",)).axes) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"miou": None}, r"row 1 \(a\): expected a number for miou, got none"),
        ({"miou": "high"}, r"row 1 \(a\): expected a number for miou, got 'high'"),
        ({"miou": float("nan"), "miou_low": None}, r"row 1 \(a\): expected a number for miou, got nan"),
        ({"miou_low": 0.9}, r"row 1 \(a\): expected miou within its interval, 0\.9 to"),
        ({"keep": "all"}, r"row 1 \(a\): expected a number for keep, got 'all'"),
        ({"name": None}, "row 1: expected the name of a method, got None"),
    ],
)
def test_rows_that_cannot_be_drawn(change: dict[str, Any], message: str) -> None:
    made = rows()
    made[1] |= change
    with pytest.raises(pmvit.PmvitError, match=message) as found:
        tradeoff_figure(made)
    assert "\n" not in str(found.value)


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(pmvit.PmvitError, match="expected rows to draw, got none"):
        draw_tradeoff([], tmp_path / "curves.png")
    with pytest.raises(pmvit.PmvitError, match="expected watts in some row"):
        draw_tradeoff(rows(), tmp_path / "curves.png", costs=("watts",))
    with pytest.raises(pmvit.PmvitError, match="row 0: expected an object"):
        draw_tradeoff([3], tmp_path / "curves.png")  # type: ignore[list-item]  # the mistake
    assert not list(tmp_path.iterdir())
