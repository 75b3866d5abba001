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


def test_pairs_of_models_that_label_pixels() -> None:
    model = small_segmenter()
    small = pmvit.compress(model, small_plan(model))
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(1, 3, 64, 96, generator=generator), torch.randint(0, 3, (1, 64, 96), generator=generator))
        for _ in range(4)
    ]
    found = {one.name: one for one in evaluate_pair(small, model, data, progress=False).measures}
    alone = evaluate_segmentation(small, data, reference=model, progress=False)
    miou = found["miou"]
    assert miou.original is not None
    assert miou.difference is not None
    assert miou.compressed.value == pytest.approx(alone.miou)
    assert miou.original.value == pytest.approx(alone.reference_miou)
    assert miou.difference.low <= miou.difference.value <= miou.difference.high
    assert found["pixel_agreement"].compressed.value == pytest.approx(alone.agreement)
