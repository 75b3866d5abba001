"""Other methods: each does what its paper states."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import pmvit
from pmvit import methods
from pmvit.evaluation import evaluate
from pmvit.loading import open_loader
from pmvit.methods.tome import match, merge_matched, tome
from tests.helpers import small_plan, small_vit


def test_tome_merges_the_most_similar_pairs() -> None:
    keys = torch.eye(8)[None].repeat(2, 1, 1)
    keys[0, 4] = keys[0, 7]  # of image 0, token 4 is like token 7, and 6 a little like 5
    keys[0, 6] = keys[0, 5] + 0.5 * keys[0, 6]
    stays, merged, into = match(keys, 1, 1)
    assert merged[0].tolist() == [2]  # token 4
    assert into[0].tolist() == [3]  # token 7
    assert stays[0].tolist() == [0, 1, 3]
    tokens = torch.arange(8.0)[None, :, None].repeat(2, 1, 1)
    sizes = torch.ones(2, 8, 1)
    sizes[:, 7] = 3
    new, new_sizes = merge_matched(tokens, sizes, (stays, merged, into), 1)
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


def test_methods_go_by_name() -> None:
    model = small_vit()
    images = torch.randn(1, 3, 96, 96)
    with torch.inference_mode():
        assert torch.equal(methods.compress(model, "tome", r=4)(images), tome(model, 4)(images))
    with pytest.raises(pmvit.PmvitError, match="one of the methods tome"):
        methods.compress(model, "tomato")


def test_tome_says_what_it_takes() -> None:
    with pytest.raises(pmvit.PmvitError, match="plain blocks"):
        tome(small_vit("beit_base_patch16_224"), 3)
    with pytest.raises(pmvit.PmvitError, match="plain blocks"):
        tome(pmvit.compress(small_vit(), small_plan(small_vit())), 3)
    with pytest.raises(pmvit.PmvitError, match="0 or more"):
        tome(small_vit(), -1)


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
