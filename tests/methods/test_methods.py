"""Other methods: each does what its paper states."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import pmvit
from pmvit.compression import compression_of
from pmvit.data.opening import open_loader
from pmvit.evaluation.classification import evaluate
from pmvit.evaluation.segmentation import evaluate_segmentation
from pmvit.methods import Tome, make_method
from pmvit.methods.attention import take
from pmvit.methods.budget import method_for
from pmvit.methods.tome import match
from tests.helpers import QUIET, same, small_plan, small_vit, tome
from tests.segmenters import small_segmenter


def test_tome_merges_the_most_similar_pairs() -> None:
    keys = torch.eye(8)[None].repeat(2, 1, 1)
    keys[0, 4] = keys[0, 7]  # of image 0, token 4 is like token 7, and 6 a little like 5
    keys[0, 6] = keys[0, 5] + 0.5 * keys[0, 6]
    found = match(keys, 1, 1)
    assert found.merged[0].tolist() == [4]
    assert found.stays[0].tolist() == [0, 2, 6, 1, 3, 5, 7]
    assert found.into[0].tolist() == [6]  # where token 7 is then
    tokens = torch.arange(8.0)[None, :, None].repeat(2, 1, 1)
    sizes = torch.ones(2, 8, 1)
    sizes[:, 7] = 3
    new, new_sizes = found.merge(tokens, sizes)
    assert new.shape == (2, 7, 1)
    assert new[0].flatten().tolist() == [0, 2, 6, 1, 3, 5, (4 + 3 * 7) / 4]
    assert new_sizes.sum() == sizes.sum()


@pytest.mark.parametrize("host", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_tome_loses_r_tokens_a_block_and_no_prefix(host: str) -> None:
    model: Any = small_vit(host)
    images = torch.randn(2, 3, 96, 96)
    unchanged, reduced, at_most = (tome(model, r) for r in (0, 5, 100))
    with torch.inference_mode():
        assert torch.allclose(unchanged(images), model(images), atol=1e-5)
        prefix = model.num_prefix_tokens
        assert cast("Any", reduced).forward_features(images).shape[1] == 36 + prefix - 3 * 5
        assert reduced(images).shape == (2, 7)
        assert at_most(images).shape == (2, 7)  # no block merges more than half of what it has
    assert pmvit.flops(reduced).macs < pmvit.flops(model).macs


@pytest.mark.parametrize("num_prefix", [0, 1, 2, 3])
def test_tome_finds_every_token_again(num_prefix: int) -> None:
    """Whatever is merged when, patches that are alike have their own values after un-merging, each in its place."""
    torch.manual_seed(0)
    kinds = torch.randint(4, (3, 25 + num_prefix))
    kinds[:, :num_prefix] = 4 + torch.arange(num_prefix)
    values = torch.eye(8)[kinds]
    tokens, sizes, places = values, torch.ones(3, 25 + num_prefix, 1), None
    for r in (6, 4, 3):
        matched = match(tokens, r, num_prefix)
        places = matched.places() if places is None else matched.places().gather(1, places)
        tokens, sizes = matched.merge(tokens, sizes)
    assert places is not None
    assert tokens.shape[1] == 12 + num_prefix
    assert torch.equal(take(tokens, places), values)
    assert torch.equal(
        torch.zeros(3, 12 + num_prefix).scatter_add(1, places, torch.ones_like(places) * 1.0), sizes[..., 0]
    )


def test_tome_gives_every_token_back() -> None:
    model: Any = small_vit()
    images = torch.randn(2, 3, 96, 96)
    unchanged, reduced = (cast("Any", tome(model, r, unmerge=True)) for r in (0, 5))
    with torch.inference_mode():
        whole, back = model.forward_features(images), reduced.forward_features(images)
        assert torch.allclose(unchanged.forward_features(images), whole, atol=1e-5)
        assert back.shape == whole.shape
        assert len(back[0].unique(dim=0)) == 37 - 15


def test_tome_segments() -> None:
    model = small_segmenter()
    images = torch.randn(2, 3, 64, 96)
    unchanged, reduced, skipping = tome(model, 0), tome(model, 3), tome(model, 3, skip=(0, 1, -2, -1))
    with torch.inference_mode():
        assert torch.allclose(unchanged(images), model(images), atol=1e-5)
        assert reduced(images).shape == model(images).shape
        assert reduced(torch.randn(1, 3, 90, 70)).shape == (1, 3, 90, 70)
    costs = [pmvit.flops(each).macs for each in (reduced, skipping, model)]
    assert costs == sorted(set(costs))
    labels = torch.randint(3, (2, 64, 96))
    found = evaluate_segmentation(reduced, [(images, labels)], reference=model, progress=False)
    assert found.gflops == pmvit.flops(reduced).gflops
    reduced.train()(images).square().sum().backward()
    assert [name for name, weight in reduced.named_parameters() if weight.grad is None] == []


def test_tome_costs_what_it_should() -> None:
    for model, share in ((small_segmenter(), 0.7), (small_vit(), 0.6)):
        wanted = share * pmvit.flops(model).gflops
        schedule = method_for(model, Tome, wanted).r
        assert isinstance(schedule, tuple)
        assert max(schedule) - min(schedule) <= 1
        assert pmvit.flops(tome(model, schedule)).gflops == pytest.approx(wanted, rel=0.01)
    wanted = 0.9 * pmvit.flops(small_segmenter()).gflops
    assert method_for(small_segmenter(), Tome, wanted, skip=(0, -1)).schedule(6)[::5] == [0, 0]
    with pytest.raises(pmvit.PmvitError, match=f"got {wanted / 9:.4g}, and the nearest is"):
        method_for(small_segmenter(), Tome, wanted / 9)


def test_tome_models_are_saved(tmp_path: Path) -> None:
    for number, model in enumerate((tome(small_segmenter(), (4, 3, 3, 3, 3, 3), skip=(-1,)), tome(small_vit(), 4))):
        pmvit.save(model, tmp_path / str(number))
        loaded: Any = pmvit.load(tmp_path / str(number))
        images = torch.randn(2, *pmvit.hosts.host_of(model).input_size())
        with torch.inference_mode():
            assert torch.equal(loaded(images), model(images))
        method = model.compression.what
        assert loaded.compression.what == method
        again = pmvit.compress(pmvit.decompress(loaded), method)
        assert compression_of(loaded) is None
        with torch.inference_mode():
            assert torch.equal(again(images), model(images))
    with pytest.raises(pmvit.PmvitError, match="compressed already"):
        pmvit.compress(model, small_plan(small_vit()))


def test_tome_models_are_finetuned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3, 96, 96), torch.arange(4)) for _ in range(2)]
    model = tome(small_vit(), 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pmvit.finetune(model, train=batches, val=batches, output=tmp_path, epochs=1, **QUIET)
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert same(pmvit.load(tmp_path / "last").state_dict(), model.state_dict())
    again = tome(small_vit(), 4)
    pmvit.finetune(again, train=batches, val=batches, output=tmp_path, epochs=1, resume=True, **QUIET)
    assert same(again.state_dict(), model.state_dict())
    with pytest.raises(pmvit.PmvitError, match="another plan"):
        pmvit.finetune(tome(small_vit(), 3), train=batches, output=tmp_path, epochs=1, resume=True, **QUIET)


def test_methods_go_by_name() -> None:
    model = small_vit()
    images = torch.randn(1, 3, 96, 96)
    with torch.inference_mode():
        assert torch.equal(pmvit.compress(model, make_method("tome", r=4))(images), tome(model, 4)(images))
    with pytest.raises(pmvit.PmvitError, match=r"one of the methods .*tome"):
        pmvit.compress(model, make_method("tomato"))


def test_tome_says_what_it_takes() -> None:
    with pytest.raises(pmvit.PmvitError, match="plain blocks"):
        tome(small_vit("beit_base_patch16_224"), 3)
    with pytest.raises(pmvit.PmvitError, match="compressed already"):
        tome(pmvit.compress(small_vit(), small_plan(small_vit())), 3)
    with pytest.raises(pmvit.PmvitError, match="0 or more"):
        tome(small_vit(), -1)
    with pytest.raises(pmvit.PmvitError, match="learn: it is for the matrices of a plan"):
        pmvit.compress(small_vit(), Tome(3), learn="dense")
    with pytest.raises(pmvit.PmvitError, match=r"expected a plan or a method of pmvit\.methods.* got a str: plans"):
        pmvit.compress(small_vit(), "tome")  # type: ignore[arg-type]  # the mistake


@pytest.mark.data
def test_tome_keeps_accuracy_without_tuning(deit_tiny: nn.Module, data: Path) -> None:
    """The paper's r = 13 costs DeiT models about two points; here on 200 images."""
    loader = open_loader(deit_tiny, str(data / "imagenet" / "val"), batch_size=50, workers=0)
    batches = [batch for batch, _ in zip(loader, range(4), strict=False)]
    reduced = evaluate(tome(deit_tiny, 13), batches, reference=deit_tiny, progress=False)
    assert reduced.agreement is not None
    assert reduced.agreement > 0.85
    assert reduced.top1 is not None
    assert reduced.reference_top1 is not None
    assert reduced.top1 > reduced.reference_top1 - 0.05
