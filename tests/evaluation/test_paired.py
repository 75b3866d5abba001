"""A model beside its original, image by image."""

import pytest
import torch

import pmvit
from pmvit.data.demo import demo_loader, demo_model
from pmvit.errors import PmvitError
from pmvit.evaluation.paired import evaluate_pair
from pmvit.evaluation.segmentation import evaluate_segmentation
from tests.helpers import small_plan
from tests.segmenters import small_segmenter


def test_pairs_are_what_evaluate_measures_one_by_one() -> None:
    model = demo_model()
    small = pmvit.compress(model, small_plan(model, keep=0.4))
    data = demo_loader("test", 40, 100)
    found = evaluate_pair(small, model, data, progress=False)
    alone = pmvit.evaluate(small, data, reference=model, progress=False)
    measures = {one.name: one for one in found.measures}
    assert (found.images, found.broken) == (100, 0)
    for name in ("top1", "top5", "cross_entropy", "agreement", "kl"):
        assert measures[name].compressed.value == pytest.approx(getattr(alone, name))
    top1 = measures["top1"]
    assert top1.original is not None
    assert top1.difference is not None
    assert top1.original.value == pytest.approx(alone.reference_top1)
    assert top1.difference.value == pytest.approx(top1.compressed.value - top1.original.value)
    unpaired = (top1.compressed.high - top1.compressed.low) + (top1.original.high - top1.original.low)
    assert 0 < top1.difference.high - top1.difference.low < unpaired
    assert evaluate_pair(small, model, data, limit=50, progress=False).images == 50
    with pytest.raises(PmvitError, match="at least one image"):
        evaluate_pair(small, model, [], progress=False)


def test_losses_by_class_and_the_images_that_differ_most() -> None:
    """Against what the outputs of both models say, one image after the other."""
    model = demo_model()
    small = pmvit.compress(model, small_plan(model, keep=0.3))
    data = demo_loader("test", 30, 100)
    found = evaluate_pair(small, model, data, most_apart=4, progress=False)
    images, labels = (torch.cat(each) for each in zip(*data, strict=True))
    with torch.inference_mode():
        before, after = model(images), small(images)
    divergence = (before.softmax(-1) * (before.log_softmax(-1) - after.log_softmax(-1))).sum(-1)
    differs = before.argmax(-1) != after.argmax(-1)
    order = (differs * 1000.0 + divergence).argsort(descending=True)[:4].tolist()
    assert [one.name for one in found.apart] == [f"image {number + 1}" for number in order]
    assert differs[order[0]]
    for one, number in zip(found.apart, order, strict=True):
        assert torch.equal(one.image, images[number])
        assert one.label is not None
        assert int(one.label) == labels[number]
        assert one.distance == pytest.approx(float(divergence[number]), rel=1e-3)
    assert sum(one.images for one in found.classes) == 100
    changes = []
    for each in found.classes:
        mine = labels == each.number
        assert each.images == int(mine.sum())
        assert each.compressed == pytest.approx((after.argmax(-1) == labels)[mine].float().mean().item())
        assert each.original is not None
        assert each.original == pytest.approx((before.argmax(-1) == labels)[mine].float().mean().item())
        changes.append(each.compressed - each.original)
    assert changes == sorted(changes)
    unlabelled = evaluate_pair(small, model, [images], progress=False)
    assert unlabelled.apart == ()
    lowest = unlabelled.classes[0]
    assert lowest.original is None
    assert lowest.compressed == pytest.approx(1 - differs[before.argmax(-1) == lowest.number].float().mean().item())


def test_pairs_of_models_that_label_pixels() -> None:
    model = small_segmenter()
    small = pmvit.compress(model, small_plan(model))
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(1, 3, 64, 96, generator=generator), torch.randint(0, 3, (1, 64, 96), generator=generator))
        for _ in range(4)
    ]
    both = evaluate_pair(small, model, data, most_apart=2, progress=False)
    found = {one.name: one for one in both.measures}
    alone = evaluate_segmentation(small, data, reference=model, progress=False)
    miou = found["miou"]
    assert miou.original is not None
    assert miou.difference is not None
    assert miou.compressed.value == pytest.approx(alone.miou)
    assert miou.original.value == pytest.approx(alone.reference_miou)
    assert miou.difference.low <= miou.difference.value <= miou.difference.high
    assert found["pixel_agreement"].compressed.value == pytest.approx(alone.agreement)
    assert alone.class_iou is not None
    for one in both.classes:
        assert one.compressed == pytest.approx(alone.class_iou[one.number])
        assert one.images == 4
    assert both.apart[0].distance >= both.apart[1].distance > 0
    assert both.apart[0].image.shape == (3, 64, 96)
