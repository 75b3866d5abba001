"""Calibration: nearer to the original, without labels, and the same again."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.data.demo import demo_loader, demo_model
from pmvit.training.biases import correct_biases
from pmvit.training.loss import tapped_tokens
from tests.helpers import QUIET, Batches, compressed, same, small_vit


def test_a_calibrated_model_is_nearer_to_its_original_on_other_images() -> None:
    model = demo_model()
    train, test = demo_loader("train", 20, 200), demo_loader("test", 250, 250)
    small = pmvit.compress(model, pmvit.plan(pmvit.score(model, train, progress=False), flops_share=0.5))
    before = pmvit.evaluate(small, test, reference=model, progress=False)
    pmvit.calibrate(small, [images for images, _ in train], teacher=model, epochs=1, progress=False)
    after = pmvit.evaluate(small, test, reference=model, progress=False)
    assert before.kl is not None
    assert after.kl is not None
    assert after.kl < 0.8 * before.kl


def test_the_same_call_goes_on_and_ends_where_it_ended(small_batches: Batches, tmp_path: Path) -> None:
    first, second = compressed(), compressed()
    options = {**QUIET, "epochs": 2, "output": tmp_path, "resume": True}
    done = pmvit.calibrate(first, small_batches, **options)
    assert pmvit.calibrate(second, small_batches, **options) == done
    assert same(first.state_dict(), second.state_dict())
    assert not same(first.state_dict(), compressed().state_dict())
    assert same(pmvit.load(tmp_path).state_dict(), first.state_dict())


def test_an_original_has_nothing_to_come_back_to(small_batches: Batches) -> None:
    with pytest.raises(pmvit.PmvitError, match="expected a compressed model to calibrate"):
        pmvit.calibrate(small_vit(), small_batches)


@pytest.mark.parametrize(("reconstruct", "share"), [("residual", 0.5), ("pinv", 1.0)])
def test_corrected_biases_bring_back_the_mean_of_every_block(
    small_batches: Batches, reconstruct: str, share: float
) -> None:
    """All of a block's tokens move by its bias; with a pseudo-inverse, each by another share of it."""
    teacher = small_vit()
    scores = pmvit.score(teacher, [], scorer="random")
    model = pmvit.compress(teacher, pmvit.plan(scores, keep=0.5, prune=0.0, reconstruct=reconstruct))
    images = small_batches[0][0]
    before = shifts(model, teacher, images)
    assert correct_biases(model, teacher, images) == 3
    after = shifts(model, teacher, images)
    assert all(b < share * a for a, b in zip(before, after, strict=True))


def shifts(model: nn.Module, teacher: nn.Module, images: Tensor) -> list[float]:
    """How far the mean over images and patch tokens is from the original's, after each block."""
    blocks = range(3)
    with tapped_tokens(model, tuple(blocks)) as own, tapped_tokens(teacher, tuple(blocks)) as other:
        with torch.inference_mode():
            model(images), teacher(images)
        return [float((own[block] - other[block])[:, 1:].mean((0, 1)).norm()) for block in blocks]
