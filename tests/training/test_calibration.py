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
    train, test = demo_loader("train", 20, 120), demo_loader("test", 200, 200)
    small = pmvit.compress(
        model, pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.3, prune=0.1)
    )
    before = pmvit.evaluate(small, test, reference=model, progress=False)
    pmvit.calibrate(small, [images for images, _ in train], teacher=model, epochs=1, progress=False)
    after = pmvit.evaluate(small, test, reference=model, progress=False)
    assert before.kl is not None
    assert after.kl is not None
    assert after.kl < 0.7 * before.kl


def test_the_same_call_goes_on_and_ends_where_it_ended(small_batches: Batches, tmp_path: Path) -> None:
    first, second = compressed(), compressed()
    options = {**QUIET, "epochs": 2, "output": tmp_path, "resume": True}
    done = pmvit.calibrate(first, small_batches, **options)
    assert pmvit.calibrate(second, small_batches, **options) == done
    assert same(first.state_dict(), second.state_dict())
    assert not same(first.state_dict(), compressed().state_dict())
    assert same(pmvit.load(tmp_path).state_dict(), first.state_dict())


def test_what_a_model_agrees_with_is_said_in_its_card(small_batches: Batches, tmp_path: Path) -> None:
    """The first teacher is the original; that of the second calibration has the weights that the first left."""
    options = {**QUIET, "epochs": 1, "val": small_batches}
    small, another = compressed(), small_vit(act_layer="relu")
    with torch.no_grad():
        next(another.parameters()).add_(1)
    for number, (teacher, reference, title) in enumerate(
        (
            (None, "original", "agreement with the original"),
            (None, "uncompressed", "agreement with the same weights uncompressed"),
            (another, "other", "agreement with another model"),
        )
    ):
        folder = tmp_path / str(number)
        result = pmvit.calibrate(small, small_batches, teacher=teacher, distill=True, output=folder, **options)
        assert result.best is not None
        assert result.best.reference == reference
        assert f"| {title} |" in (folder / "README.md").read_text(encoding="utf-8")


def test_an_original_has_nothing_to_come_back_to(small_batches: Batches) -> None:
    with pytest.raises(pmvit.PmvitError, match="expected a compressed model to calibrate"):
        pmvit.calibrate(small_vit(), small_batches)


def test_corrected_biases_give_back_the_mean_of_every_block(small_batches: Batches) -> None:
    """With nothing pruned, the mean over images and tokens, the class token a tenth of it, is the original's again.

    After the last block, where nothing but the class token is read, it is the mean of that alone.
    """
    teacher = small_vit()
    scores = pmvit.measure(teacher, [], method="scored", scorer="random")
    model = pmvit.compress(teacher, pmvit.plan(scores, keep=0.5, prune=0.0))
    images = small_batches[0][0]
    before = shifts(model, teacher, images)
    assert correct_biases(model, teacher, images) == 3
    assert all(b < 1e-3 * a for a, b in zip(before, shifts(model, teacher, images), strict=True))


def test_biases_bring_a_plan_nearer_whose_last_mlp_sees_no_patch() -> None:
    """Measured plans leave garbage where nobody looks; it must not count."""
    model = demo_model()
    merge_costs = pmvit.measure(model, demo_loader("train", 32, 32), method="measured", progress=False)
    small = pmvit.compress(model, pmvit.plan(merge_costs, flops_share=0.5))
    test = demo_loader("test", 200, 200)
    before = pmvit.evaluate(small, test, reference=model, progress=False)
    correct_biases(small, model, next(iter(demo_loader("train", 128, 128)))[0])
    after = pmvit.evaluate(small, test, reference=model, progress=False)
    assert before.kl is not None
    assert after.kl is not None
    assert after.kl < before.kl


def shifts(model: nn.Module, teacher: nn.Module, images: Tensor) -> list[float]:
    """How far that mean is from the original's, after each block; of the class token alone after the last."""
    with tapped_tokens(model, (0, 1, 2)) as own, tapped_tokens(teacher, (0, 1, 2)) as other, torch.inference_mode():
        model(images), teacher(images)
        means = [(own[block] - other[block]).mean(0) for block in own]
    of_all = [float((0.1 * mean[0] + 0.9 * mean[1:].mean(0)).norm()) for mean in means[:-1]]
    return [*of_all, float(means[-1][0].norm())]
