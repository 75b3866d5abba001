"""Models that label pixels learn: the loss at every pixel, a run from masks to mIoU, resumed runs, the command line."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import pmvit
from pmvit.cli.common import split_folders
from pmvit.config import FinetuneConfig
from pmvit.data.batches import IGNORED
from pmvit.data.loaders import create_loader
from pmvit.data.segmentation import open_pairs
from pmvit.evaluation import segmentation
from pmvit.evaluation.segmentation import SegmentationEvaluation
from pmvit.evaluation.validation import evaluation_from, pooled
from pmvit.training import StoppedError
from pmvit.training.loss import cross_entropy, divergence
from pmvit.training.trainer import Trainer
from tests.data.test_segmentation_data import CONFIG, plain
from tests.evaluation.test_segmentation import run
from tests.segmenters import small_segmenter

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 3e-3, "warmup_epochs": 0, "workers": 0, "cpu": True}


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of a bright disc on dark ground; masks with labels from 1, and a border of 0 that does not count."""
    folder = tmp_path_factory.mktemp("discs")
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:64, :96]
    for split, count in (("train", 16), ("val", 4)):
        for side in ("images", "masks"):
            (folder / side / split).mkdir(parents=True)
        for number in range(count):
            centre = rng.integers(16, 48), rng.integers(16, 80)
            disc = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < 18**2
            pixels = rng.integers(0, 60, (64, 96, 3)) + 150 * disc[..., None]
            labels = np.where(disc, 2, 1)
            labels[0] = 0
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / split / f"{number}.png")
            Image.fromarray(labels.astype(np.uint8)).save(folder / "masks" / split / f"{number}.png")
    return folder


def segmenter() -> nn.Module:
    return small_segmenter(classes=2, decoder="linear")


def compressed(model: nn.Module) -> nn.Module:
    return pmvit.compress(
        model, pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.5, skip=(0, -1))
    )


_step = Trainer._step


def stop_after_three(trainer: Trainer, *arguments: Any) -> Any:
    measured, _ = _step(trainer, *arguments)
    return measured, signal.SIGTERM if trainer.step == 3 else 0


def test_every_labelled_pixel_counts_alike() -> None:
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 5, (2, 3, 4), generator=torch.Generator().manual_seed(1))
    labels[0, 0] = IGNORED
    flat, kept = logits.reshape(-1, 5), labels.flatten() != IGNORED
    by_hand = -flat.log_softmax(-1)[torch.arange(24), labels.flatten().clamp(max=4)][kept].mean()
    assert torch.allclose(cross_entropy(logits, labels), by_hand)
    assert cross_entropy(logits, torch.full_like(labels, IGNORED)) == 0
    taught = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(2))
    expected = (taught.softmax(-1) * (taught.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean()
    assert torch.allclose(divergence(logits, taught), expected, atol=1e-6)
    with pytest.raises(pmvit.PmvitError, match="expected one label per pixel for this model"):
        cross_entropy(logits, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(pmvit.PmvitError, match="expected one label per image for this model"):
        cross_entropy(logits[:, 0, 0], labels)


def test_coarse_predictions_are_compared_at_the_size_of_the_labels() -> None:
    coarse = torch.zeros(1, 2, 2, 2)
    coarse[..., 0] = 9.0
    assert cross_entropy(coarse, torch.zeros(1, 8, 8, dtype=torch.int64)) < 0.001


def test_learns_masks_and_resumes_bit_identical(masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disc is found, and a run that is stopped in the middle ends as one that is not."""
    teacher = segmenter()
    options: dict[str, Any] = {**QUICK, "alpha": 0.0, "epochs": 6, "color_jitter": 0.2, "progress": False}
    first = pmvit.finetune(teacher, train=masks, val=masks, output=tmp_path / "first", first_label=1, **options)
    assert isinstance(first.last, SegmentationEvaluation)
    assert first.last.miou is not None
    assert first.last.images == 4
    assert first.last.miou > 0.6
    results = {}
    for name in ("whole", "stopped"):
        small = compressed(teacher)
        arguments: dict[str, Any] = {"train": masks, "val": masks, "teacher": teacher, "first_label": 1}
        arguments |= {"output": tmp_path / name, "progress": False, **QUICK}
        if name == "stopped":
            with monkeypatch.context() as patch:
                patch.setattr(Trainer, "_step", stop_after_three)
                with pytest.raises(StoppedError):
                    pmvit.finetune(small, **arguments)
            small = compressed(teacher)
        results[name] = pmvit.finetune(small, resume=name == "stopped", **arguments)
    assert results["whole"] == results["stopped"]
    weights = [pmvit.load(tmp_path / name / "last").state_dict() for name in results]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert {"ce", "kl"} <= set(lines[0])
    again = pmvit.finetune(compressed(teacher), resume=True, **arguments)  # has come to its end already
    assert again == results["stopped"]


def test_without_masks_the_teacher_alone_is_learnt(masks: Path) -> None:
    model = segmenter()
    small = compressed(model)
    options: dict[str, Any] = {**QUICK, "labels": False, "progress": False}
    result = pmvit.finetune(small, train=masks / "images" / "train", val=masks / "images" / "val", **options)
    assert isinstance(result.last, SegmentationEvaluation)
    assert result.last.miou is None
    assert result.last.agreement is not None
    assert result.last.agreement > 0.5


def test_what_is_for_images_is_refused(masks: Path) -> None:
    small = compressed(segmenter())
    for name, value in (("mixup", 0.8), ("auto_augment", "rand-m9"), ("random_erasing", 0.2)):
        with pytest.raises(pmvit.PmvitError, match=r"mixup|is for models that label images"):
            pmvit.finetune(small, train=masks, first_label=1, progress=False, **{**QUICK, name: value})
    with pytest.raises(pmvit.PmvitError, match="resize_scale: expected two multiples"):
        FinetuneConfig(resize_scale=(2.0, 0.5))


def test_processes_share_all_images_and_their_counts_add_up(tmp_path: Path) -> None:
    source = open_pairs(plain(tmp_path, [0, 1, 2], count=5), 3)
    model = small_segmenter()

    reference = compressed(model)

    def count(process: int, processes: int) -> dict[str, torch.Tensor]:
        loader = create_loader(source, CONFIG, whole=True, workers=0, process=(process, processes))
        return segmentation.count_pixels(model, loader, reference, progress=False)

    together = segmentation.summarize(pooled([count(0, 2), count(1, 2)]), model, reference)
    assert together.images == 5
    assert together == segmentation.summarize(count(0, 1), model, reference)
    assert evaluation_from(json.loads(json.dumps(vars(together)))) == together


def test_parts_of_a_folder(masks: Path, tmp_path: Path) -> None:
    assert split_folders(str(masks), None) == (str(masks), str(masks))
    assert split_folders(str(masks), "other") == (str(masks), "other")
    assert split_folders(str(plain(tmp_path, [0, 1])), None) == (str(tmp_path), None)  # all would be for training


def test_tuned_and_run_by_name(masks: Path, tmp_path: Path) -> None:
    pmvit.save(segmenter(), tmp_path / "original")
    common = ("--data", masks, "--first-label", 1, "--batch-size", 8, "--workers", 0, "--device", "cpu", "--epochs", 1)
    result = run("run", tmp_path / "original", *common, "--keep", 0.6, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "mIoU" in result.output
    assert "top-1" not in result.output
    tuned = run("finetune", tmp_path / "out", *common, "--preset", "segmenter", "-o", tmp_path / "tuned")
    assert tuned.exit_code == 0, tuned.output
    assert "best after epoch 1 of 1: mIoU" in tuned.output
    resumed = run("finetune", "--resume", tmp_path / "tuned")
    assert resumed.exit_code == 0, resumed.output
    record = json.loads((tmp_path / "tuned" / "finetune.json").read_text())
    assert record["command"]["first_label"] == 1
    assert record["config"]["alpha"] == 1.0


@pytest.mark.data
def test_a_new_segmenter_by_name(masks: Path, tmp_path: Path, data: Path) -> None:
    weights = data / "weights" / "vit_tiny_patch16_224.safetensors"
    named = ("segmenter:vit_tiny_patch16_224", "--weights", weights, "--size", 64, "--classes", 2)
    result = run(
        *("finetune", *named, "--decoder", "linear", "--data", masks, "--first-label", 1, "--epochs", 1),
        *("--batch-size", 8, "--workers", 0, "--device", "cpu", "-o", tmp_path / "new"),
    )
    assert result.exit_code == 0, result.output
    assert pmvit.load(tmp_path / "new").classes == 2
