"""Sliding windows and the measures of segmentation, against numbers worked out by hand; the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.evaluation.segmentation import class_iou, count_classes, evaluate_segmentation, mean_iou, pixel_accuracy
from pmvit.evaluation.sliding import count_windows, sliding_logits, window_starts
from tests.data.test_segmentation_data import plain
from tests.segmenters import published, random_state, small_segmenter


class Brightness(nn.Module):
    """Scores of two classes: each pixel, and its difference from the mean of the image."""

    def forward(self, images: Tensor) -> Tensor:
        first = images[:, :1]
        return torch.cat([first, first - first.mean((2, 3), keepdim=True)], 1)


def test_one_window_is_one_forward() -> None:
    model = small_segmenter()
    images = torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        expected = model(images).movedim(1, -1)
        assert torch.equal(sliding_logits(model, images, (64, 96), 32, batch_size=2), expected)


def test_windows_reach_the_end_and_overlaps_are_averaged() -> None:
    assert window_starts(10, 4, 3) == [0, 3, 6]
    assert window_starts(11, 4, 3) == [0, 3, 6, 7]
    assert window_starts(3, 4, 3) == [0]
    assert count_windows((11, 3), (4, 4), (3, 3)) == 4
    images = torch.randn(2, 1, 6, 11, generator=torch.Generator().manual_seed(0))
    got = sliding_logits(Brightness(), images, (4, 4), 3, batch_size=3)
    assert torch.allclose(got[..., 0], images[:, 0])
    sums, seen = torch.zeros(2, 6, 11), torch.zeros(2, 6, 11)
    for top in (0, 2):
        for left in (0, 3, 6, 7):
            sums[:, top : top + 4, left : left + 4] += images[:, :, top : top + 4, left : left + 4].mean((1, 2, 3))[
                :, None, None
            ]
            seen[:, top : top + 4, left : left + 4] += 1
    assert torch.allclose(got[..., 1], images[:, 0] - sums / seen, atol=1e-6)


def test_small_images_are_padded_and_strides_checked() -> None:
    images = torch.ones(1, 1, 2, 3)
    got = sliding_logits(Brightness(), images, (4, 4))
    assert got.shape == (1, 2, 3, 2)
    assert torch.allclose(got[..., 1], torch.full((1, 2, 3), 1 - 6 / 16))
    with pytest.raises(pmvit.PmvitError, match="stride: expected 1 to 4"):
        sliding_logits(Brightness(), images, (4, 4), 5)


def test_measures_by_hand() -> None:
    labels = torch.tensor([[[0, 0, 0, 1], [1, 1, 255, 255]]])
    predicted = torch.tensor([[[0, 0, 1, 1], [1, 2, 3, 0]]])
    (counts,) = count_classes(predicted, labels, 4)
    assert counts.tolist() == [[2, 2, 0, 0], [3, 3, 0, 0], [2, 3, 1, 0]]
    assert class_iou(counts).tolist() == pytest.approx([2 / 3, 2 / 4, 0.0, float("nan")], nan_ok=True)
    assert mean_iou(counts).item() == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert pixel_accuracy(counts).item() == pytest.approx(4 / 6)
    with pytest.raises(pmvit.PmvitError, match="expected labels below 4"):
        count_classes(predicted, labels + 3, 4)


def test_evaluation_at_the_size_of_the_labels() -> None:
    model = small_segmenter()
    plan = pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.5)
    small = pmvit.compress(model, plan)
    batches = [(torch.randn(1, 3, 64, 150), torch.randint(0, 3, (1, 100, 200))) for _ in range(2)]
    found = evaluate_segmentation(model, batches, reference=model, stride=48, progress=False)
    assert found.images == 2
    assert found.agreement == 1.0
    assert found.miou == found.reference_miou
    assert found.windows == 3
    assert found.fps is not None
    assert found.fps > 0
    assert found.reference_fps is not None
    assert found.gflops == pmvit.flops(model).gflops
    other = evaluate_segmentation(small, batches, reference=model, progress=False)
    assert other.agreement is not None
    assert 0.2 < other.agreement < 1
    assert other.reference_miou is not None
    assert other.reference_gflops is not None
    assert other.gflops < other.reference_gflops
    unlabelled = evaluate_segmentation(small, [images for images, _ in batches], reference=model, progress=False)
    assert unlabelled.miou is None
    assert unlabelled.agreement is not None
    with pytest.raises(pmvit.PmvitError, match="expected images with masks"):
        evaluate_segmentation(small, [torch.randn(1, 3, 64, 96)], progress=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seg-T-Mask/16 in the published layout, random, for 32 x 32 pixels and three classes."""
    path = tmp_path_factory.mktemp("weights") / "seg_tiny.safetensors"
    save_file(random_state(published(192, 12, classes=3, side=32, decoder="mask")), path)
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_compress_and_evaluate_by_name(checkpoint: Path, tmp_path: Path) -> None:
    folder = plain(tmp_path / "data", [1, 2, 3, 0], count=3)
    named = ("segmenter:vit_tiny_patch16_384", "--weights", checkpoint, "--size", 32, "--decoder", "mask")
    reading = ("--data", folder, "--first-label", 1, "--workers", 0, "--batch-size", 2)
    result = run(
        "compress", *named, "--classes", 3, *reading, "--method", "measured", "--keep", 0.5, "-o", tmp_path / "small"
    )
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "small" / "plan.json").read_text())
    assert plan["made_by"]["plan"]["skip"] == []  # that is for plans from scores
    shown = run("evaluate", tmp_path / "small", *reading)
    assert shown.exit_code == 0, shown.output
    assert "mIoU" in shown.output
    assert "IoU of class 2" in shown.output
    assert "windows an image" in shown.output
    found = json.loads(run("evaluate", tmp_path / "small", *reading, "--stride", 16, "--json").stdout)
    assert found["images"] == 3
    assert len(found["class_iou"]) == 3
    assert 0 <= found["miou"] <= 1
    images_alone = run("evaluate", tmp_path / "small", "--data", folder / "images", "--workers", 0, "--json")
    assert json.loads(images_alone.stdout)["agreement"] <= 1


def test_blocks_to_skip_and_options_of_other_models(checkpoint: Path, tmp_path: Path) -> None:
    folder = plain(tmp_path / "data", [0, 1, 2], count=2)
    named = ("segmenter:vit_tiny_patch16_384", "--weights", checkpoint)
    reading = ("--data", folder, "--workers", 0, "--method", "measured")
    for said, skip in (("none", []), ("0,-1", [0, -1])):
        result = run("compress", *named, *reading, "--keep", 0.5, "--skip", said, "-o", tmp_path / said)
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / said / "plan.json").read_text())["made_by"]["plan"]["skip"] == skip
    refused = run("measure", "vit_tiny_patch16_224", "--data", folder, "--classes", 3, "-o", tmp_path / "s.json")
    assert refused.exit_code != 0
    assert "expected beside segmenter:NAME alone" in str(refused.exception)


@pytest.mark.data
def test_real_pets_through_the_encoder(data: Path) -> None:
    """Scores and measures on real images and masks, with the real encoder and a decoder that knows nothing."""
    from pmvit.data.opening import open_loader
    from pmvit.loading import create_model

    torch.manual_seed(0)
    file = data / "weights" / "vit_tiny_patch16_224.safetensors"
    model = create_model("segmenter:vit_tiny_patch16_224", file, classes=3, image_size=96, decoder="linear")
    batches = open_loader(model, data / "pets", first_label=1, batch_size=4, workers=0, shuffle=True)
    scores = pmvit.measure(model, batches, method="scored", iterations=1, progress=False)
    small = pmvit.compress(model, pmvit.plan(scores, keep=0.8))
    whole = open_loader(model, data / "pets", first_label=1, split="val", whole=True, workers=0, shuffle=True)
    few = [pair for pair, _ in zip(whole, range(4), strict=False)]
    found = evaluate_segmentation(small, few, reference=model, progress=False)
    assert found.agreement is not None
    assert found.agreement > 0.5
    assert found.miou is not None
    assert found.windows >= 2
