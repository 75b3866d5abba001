"""The loop of fine-tuning: what it learns and what it leaves."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import pmvit
from pmvit.evaluation.classification import Evaluation
from pmvit.tensors import read_tensors
from pmvit.training.loss import token_distance
from pmvit.training.metrics import read_metrics
from pmvit.training.record import Checkpoints, select
from tests.helpers import QUIET, Batches, compressed, same, small_plan, small_vit


def test_tuning_comes_nearer_to_the_teacher_and_leaves_it_alone(small_batches: Batches, tmp_path: Path) -> None:
    teacher = small_vit()
    model = pmvit.compress(teacher, small_plan(teacher))
    teacher.train()
    before = copy.deepcopy(teacher.state_dict())
    start = pmvit.evaluate(model, small_batches, reference=teacher, progress=False).kl
    result = pmvit.finetune(
        model, teacher=teacher, train=small_batches, val=small_batches, output=tmp_path, epochs=12, lr=1e-3,
        labels=False, **QUIET,
    )  # fmt: skip
    assert isinstance(result.last, Evaluation)
    assert result.last.kl is not None
    assert start is not None
    assert result.last.kl < 0.5 * start
    assert teacher.training
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    names = read_tensors(Checkpoints(tmp_path / "checkpoints", 1).path(36))
    assert {name.split("/")[0] for name in names} == {"model", "optimizer"}
    assert set(select(names, "model/")) == set(model.state_dict())


def test_the_default_teacher_is_the_model_uncompressed(small_batches: Batches) -> None:
    teacher = small_vit()
    options: dict[str, Any] = {"train": small_batches, "epochs": 1, "lr": 1e-3, "progress": False}
    named, unnamed = (pmvit.compress(teacher, small_plan(teacher)) for _ in range(2))
    pmvit.finetune(named, teacher=teacher, **options)
    pmvit.finetune(unnamed, **options)
    assert same(named.state_dict(), unnamed.state_dict())
    alone = pmvit.compress(teacher, small_plan(teacher))
    pmvit.finetune(alone, alpha=0.0, **options)
    assert not same(named.state_dict(), alone.state_dict())
    ignored = pmvit.compress(teacher, small_plan(teacher))
    pmvit.finetune(ignored, alpha=0.0, teacher=small_vit(num_classes=3), **options)  # is not even asked
    assert same(alone.state_dict(), ignored.state_dict())


def test_token_distillation_brings_the_token_maps_nearer(small_batches: Batches, tmp_path: Path) -> None:
    tokens = {}
    for weight in (0.0, 5.0):
        teacher: Any = small_vit()
        model = pmvit.compress(teacher, small_plan(teacher))
        pmvit.finetune(
            model, teacher=teacher, train=small_batches, epochs=10, lr=1e-3, token_alpha=weight, token_blocks=(1, 2),
            progress=False,
        )  # fmt: skip
        with torch.inference_mode():
            images = small_batches[0][0]
            tokens[weight] = token_distance(model.forward_features(images), teacher.forward_features(images))
    assert tokens[5.0] < 0.8 * tokens[0.0]


def test_accumulated_passes_make_the_same_step(pictures: Path) -> None:
    ends = []
    for accumulate in (1, 4):
        model = compressed()
        pmvit.finetune(
            model, train=pictures, epochs=1, batch_size=16, accumulate=accumulate, optimizer="sgd", lr=0.1, workers=0,
            progress=False,
        )  # fmt: skip
        ends.append(model.state_dict())
    worst = max((ends[0][name] - ends[1][name]).abs().max() for name in ends[0])
    assert worst < 1e-4
    assert not same(ends[0], small_vit().state_dict())


def test_output_is_what_compress_saves(pictures: Path, tmp_path: Path) -> None:
    model = compressed()
    options: dict[str, Any] = {"epochs": 2, "batch_size": 16, "ema": 0.9, "mixup": 0.5, "cutmix": 0.5, "lr": 1e-3}
    result = pmvit.finetune(model, train=pictures, val=pictures, output=tmp_path / "out", **QUIET, **options)
    images = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        assert torch.equal(pmvit.load(tmp_path / "out" / "last")(images), model(images))
        pmvit.load(tmp_path / "out")(images)
    best = max(line["top1"] for line in read_metrics(tmp_path / "out") if line.get("kind") == "epoch")
    assert isinstance(result.best, Evaluation)
    assert result.best.top1 == best
    assert pmvit.evaluate(pmvit.load(tmp_path / "out"), val_of(model, pictures), progress=False).top1 == best
    with Image.open(tmp_path / "out" / "curves.png") as curves:
        curves.load()
        assert curves.width > 800
    record = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert record["config"]["ema"] == 0.9
    assert record["result"]["steps"] == 8


def val_of(model: nn.Module, folder: Path) -> Any:
    from pmvit.data.loaders import create_loader
    from pmvit.data.sources import open_source
    from pmvit.hosts import host_of

    return create_loader(open_source(folder, 7), host_of(model).data_config(), workers=0)


def test_an_uncompressed_model_is_tuned_without_a_teacher(small_batches: Batches) -> None:
    model = small_vit()
    before = pmvit.evaluate(model, small_batches, progress=False).cross_entropy
    result = pmvit.finetune(model, train=small_batches, val=small_batches, epochs=8, lr=1e-3, progress=False)
    assert isinstance(result.last, Evaluation)
    assert result.last.cross_entropy is not None
    assert before is not None
    assert result.last.cross_entropy < 0.7 * before


def test_a_folder_without_classes_needs_no_labels(pictures: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in pictures.rglob("*.png"):
        (flat / path.name).write_bytes(path.read_bytes())
    with pytest.raises(pmvit.PmvitError, match="labels=False"):
        pmvit.finetune(compressed(), train=flat, batch_size=16, epochs=1, progress=False, workers=0)
    result = pmvit.finetune(
        compressed(), train=flat, val=flat, batch_size=16, epochs=2, labels=False, progress=False, workers=0
    )
    assert isinstance(result.last, Evaluation)
    assert result.last.top1 is None
    assert result.last.kl is not None


def test_validation_without_labels_looks_at_the_teacher(pictures: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in pictures.rglob("*.png"):
        (flat / path.name).write_bytes(path.read_bytes())
    options: dict[str, Any] = {"batch_size": 16, "epochs": 2, "progress": False, "workers": 0}
    result = pmvit.finetune(compressed(), train=pictures, val=flat, output=tmp_path / "out", **options)
    assert isinstance(result.best, Evaluation)
    assert result.best.top1 is None
    assert result.best.kl is not None
