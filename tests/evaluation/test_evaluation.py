"""Accuracy, agreement and divergence, by hand and on real images."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.data.loaders import create_loader
from pmvit.data.sources import open_source
from pmvit.evaluation.classification import evaluate_all, measure
from pmvit.hosts import host_of
from pmvit.measuring import Scores


def test_measures_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    reference = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    result = measure(logits, torch.tensor([0, 0]), reference)
    assert result["top1"].tolist() == [1, 0]
    assert result["top5"].tolist() == [1, 1]
    assert result["agreement"].tolist() == [1, 0]
    assert result["reference_top1"].tolist() == [1, 1]
    assert result["cross_entropy"][0].item() == pytest.approx(math.log(1 + math.exp(-2)))
    p, q = torch.softmax(reference[1], 0), torch.softmax(logits[1], 0)
    assert result["kl"][1].item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)


def test_batches_of_different_size_weigh_by_image(small_model: nn.Module) -> None:
    images, labels = torch.randn(10, 3, 96, 96), torch.randint(0, 7, (10,))
    whole = pmvit.evaluate(small_model, [(images, labels)], reference=small_model, progress=False)
    parts = pmvit.evaluate(small_model, list(zip(images.split(3), labels.split(3), strict=True)), progress=False)
    assert parts.top1 == pytest.approx(whole.top1)
    assert parts.cross_entropy == pytest.approx(whole.cross_entropy, rel=1e-5)
    assert whole.agreement == 1
    assert whole.kl == pytest.approx(0, abs=1e-6)
    assert whole.top1 is not None
    assert whole.top1_error == pytest.approx(math.sqrt(whole.top1 * (1 - whole.top1) / 10))


def test_images_without_labels_are_compared_with_the_reference(small_model: nn.Module) -> None:
    result = pmvit.evaluate(small_model, [torch.randn(4, 3, 96, 96)], reference=small_model, progress=False)
    assert (result.top1, result.top5, result.cross_entropy, result.reference_top1) == (None,) * 4
    assert result.agreement == 1
    with pytest.raises(pmvit.PmvitError, match="expected images with labels, or the original as reference="):
        pmvit.evaluate(small_model, torch.randn(2, 3, 96, 96), progress=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_not_finite_are_an_error(small_model: nn.Module, value: float) -> None:
    broken = copy.deepcopy(small_model)
    with torch.no_grad():
        broken.get_parameter("head.bias")[2] = value
    batch = (torch.randn(4, 3, 96, 96), torch.zeros(4, dtype=torch.long))
    with pytest.raises(pmvit.PmvitError, match="got NaN or infinity from the model for 4 of 4 images"):
        pmvit.evaluate(broken, [batch], progress=False)
    with pytest.raises(pmvit.PmvitError, match="got NaN or infinity from the reference"):
        pmvit.evaluate(small_model, [batch], reference=broken, progress=False)


def test_one_image_that_is_not_finite_is_counted(small_model: nn.Module) -> None:
    images = torch.randn(3, 3, 96, 96)
    images[1, 0, 0, 0] = math.nan
    with pytest.raises(pmvit.PmvitError, match="for 1 of 3 images"):
        pmvit.evaluate(small_model, [(images, torch.zeros(3, dtype=torch.long))], progress=False)


def test_modes_are_restored_and_bad_input_is_named(small_model: nn.Module) -> None:
    small_model.train()
    pmvit.evaluate(small_model, [torch.randn(1, 3, 96, 96)], reference=small_model, progress=False)
    assert small_model.training
    with pytest.raises(pmvit.PmvitError, match="at least one image"):
        pmvit.evaluate(small_model, [], progress=False)
    with pytest.raises(pmvit.PmvitError, match="expected labels below 7"):
        pmvit.evaluate(small_model, [(torch.randn(1, 3, 96, 96), torch.tensor([7]))], progress=False)


@pytest.mark.data
def test_real_model_on_real_images(deit_tiny: nn.Module, deit_scores: Scores, data: Path) -> None:
    """DeiT-Tiny knows its images, and a plan from scores keeps more of that than the same budget at random."""
    config = host_of(deit_tiny).data_config()
    loader = create_loader(open_source(data / "imagenet/val", 1000), config, batch_size=50, workers=0, shuffle=True)
    batches: list[tuple[Tensor, Tensor]] = [batch for batch, _ in zip(loader, range(2), strict=False)]
    by_score = pmvit.compress(deit_tiny, pmvit.plan(deit_scores, keep=0.7))
    at_random = pmvit.compress(
        deit_tiny, pmvit.plan(pmvit.measure(deit_tiny, [], method="scored", scorer="random"), keep=0.7)
    )
    original, scored, random = evaluate_all(
        [copy.deepcopy(deit_tiny), by_score, at_random], batches, reference=deit_tiny, progress=False
    )
    assert original.top1 is not None
    assert original.top5 is not None
    assert 0.60 < original.top1 < 0.80
    assert original.top5 > 0.85
    assert scored.agreement is not None
    assert random.agreement is not None
    assert scored.agreement > random.agreement
    assert scored.kl is not None
    assert random.kl is not None
    assert scored.kl < random.kl
    assert scored.top1 is not None
    assert scored.top1 > original.top1 - 0.12
