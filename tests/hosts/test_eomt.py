"""EoMT of transformers: queries that join the tokens of its last blocks, and become masks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pmvit
from pmvit.evaluation.segmentation import evaluate_segmentation
from pmvit.hosts import host_of
from pmvit.hosts.outputs import logits_of, pixel_scores, predict
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.bench.variants import in_place_plan
from scripts.sweep import difference, randomise
from scripts.sweep_models import reduced_hf
from tests.helpers import small_plan
from tests.hosts.dense_models import eomt, images_for, masks_for
from tests.hosts.layouts import explicit_scores

transformers = pytest.importorskip("transformers")


def test_eomt_becomes_a_graph(tmp_path: Path) -> None:
    """Which of its blocks mask attention is a tensor, which no graph can ask."""
    model = eomt()
    small = pmvit.compress(model, small_plan(model))
    assert pmvit.export(small, tmp_path / "small.pt2").max_error < 1e-4
    assert isinstance(small.attn_mask_probs, Tensor)  # only the copy that was written has numbers


@pytest.mark.parametrize("masks", [True, False])
def test_eomt_keeps_its_decoder(masks: bool) -> None:
    """Blocks that hold queries are left alone, and get what the original would give them if nothing is merged."""
    model = eomt(masks)
    images = images_for(model)
    host = host_of(model)
    assert host.block_names() == ["layers.0", "layers.1"]
    assert host.outputs().pixel_classes == 3
    same, small = (pmvit.compress(model, plan) for plan in (in_place_plan((6, 6), 2), small_plan(model)))
    assert [isinstance(layer, PruneMerge) for layer in small.layers] == [True, True, False, False]
    with torch.inference_mode():
        expected, got, other = (m(images, output_hidden_states=True) for m in (model, same, small))
    for name in ("class_queries_logits", "masks_queries_logits", "last_hidden_state"):
        assert difference(got[name], expected[name]) < 1e-5
        assert other[name].shape == expected[name].shape
        assert difference(other[name], expected[name]) > 1e-3
    shapes = [tuple(state.shape) for state in expected.hidden_states]
    assert shapes == [(2, 41, 96)] * 3 + [(2, 46, 96)] * 2  # 36 patches, 5 prefix tokens, then 5 queries
    assert [tuple(state.shape) for state in other.hidden_states] == shapes


def test_queries_become_classes_of_pixels() -> None:
    """What stands for its queries are the classes of pixels, as MaskFormer finds them."""
    model = eomt()
    images = images_for(model)
    with torch.inference_mode():
        output = model(images)
        logits = predict(model, images)
    shares = output.class_queries_logits.softmax(-1)[..., :-1]
    said = torch.einsum("bqc,bqhw->bhwc", shares, output.masks_queries_logits.sigmoid())
    assert torch.allclose(logits.exp(), said, rtol=1e-3, atol=2e-4)
    is_said = said.amax(-1) > 1e-6  # elsewhere no query has anything to say
    assert is_said.float().mean() > 0.8
    assert torch.equal(logits.argmax(-1)[is_said], said.argmax(-1)[is_said])
    alone = pixel_scores(output.class_queries_logits[..., 1:3], output.masks_queries_logits)
    of_one = output.class_queries_logits[..., 1:3].softmax(-1)[..., 0]
    told = (of_one[..., None, None] * output.masks_queries_logits.sigmoid()).sum(1) > 0.5
    assert torch.equal(alone[:, 0] > 0, told)


@pytest.mark.parametrize(
    ("masks_attention", "dtype", "error"), [(True, torch.float32, 1e-3), (False, torch.float64, 1e-5)]
)
def test_scores_of_eomt_are_those_of_explicit_attention(
    masks_attention: bool, dtype: torch.dtype, error: float
) -> None:
    """Eq. 9 by hand, on the maps that transformers returns with `eager` attention.

    Its masks are float32, and with those PyTorch's fused attention on CPUs is wrong in float64.
    """
    model = eomt(masks_attention)
    model.set_attn_implementation("eager")
    model.to(dtype)
    images, masks = images_for(model).to(dtype), masks_for(model)
    scores = pmvit.measure(model, [(images, masks)], method="scored", progress=False).values
    output = model(images, output_attentions=True)
    logits = logits_of(output)
    labels = masks[:, 2::4, 2::4]  # of a pixel in the middle of those that share a logit
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    expected = explicit_scores(loss, list(output.attentions)[:2], 5, 36)
    assert scores.shape == (2, 36)
    assert (scores - expected).abs().max() < error * expected.max()


def test_eomt_needs_blocks_before_its_queries() -> None:
    model = eomt(num_hidden_layers=2)
    with pytest.raises(pmvit.PmvitError, match="all 2 of this EomtForUniversalSegmentation are its decoder"):
        pmvit.measure(model, [images_for(model)], method="scored", progress=False)


def test_semantic_segmentation_of_transformers_is_evaluated() -> None:
    neck = {"fusion_hidden_size": 24, "neck_hidden_sizes": [24] * 4, "backbone_out_indices": [0, 1, 2, 3]}
    model: Any = reduced_hf(
        "DPTForSemanticSegmentation", "DPTConfig", {"num_labels": 3, "num_hidden_layers": 4, **neck}
    )
    randomise(model)
    images, masks = images_for(model), masks_for(model)
    result = evaluate_segmentation(model, [(images, masks)], reference=model, progress=False)
    assert result.agreement == 1
    assert result.miou is not None
