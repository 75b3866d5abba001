"""Models of Hugging Face transformers: every family, scores, hidden states, masks, heads."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from pmvit.config.measuring import Loss
from pmvit.hosts import TokenLayout, host_of
from pmvit.hosts.outputs import as_tensor, predict
from pmvit.planning import Plan
from pmvit.runtime.bench.variants import variant
from scripts.sweep import try_model
from scripts.sweep_models import hf_models, reduced_hf
from tests.helpers import small_plan
from tests.hosts.hf_models import BIAS, FAMILIES, LABELS, OTHERS, images_for, make, vit
from tests.hosts.layouts import explicit_scores

transformers = pytest.importorskip("transformers")

TRIED = [c for c in hf_models() if c.name.split()[0] in {*(row[0] for row in FAMILIES.values()), *OTHERS}]


@pytest.mark.parametrize("candidate", TRIED, ids=lambda candidate: candidate.name)
def test_what_the_sweep_checks(candidate: Any) -> None:
    assert try_model(candidate).reason == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_explicit_attention(family: str) -> None:
    """Eq. 9 by hand, on the maps that the library itself returns with `eager` attention; some are float32 in it."""
    model = make(family, attn_implementation="eager").double()
    images = images_for(model)
    host = host_of(model)
    layout = host.layout
    has_labels = host.outputs().num_classes is not None
    loss: Loss = "labels" if has_labels else "predicted" if host.outputs().gives_logits else "embedding"
    labels = torch.tensor([0, 3, 5])
    scores = pmvit.measure(model, [(images, labels)], method="scored", loss=loss, progress=False)
    assert model.config._attn_implementation == "eager"
    more = {"noise": torch.arange(36.0).expand(3, -1)} if family == "mae" else {}
    output = model(images, output_attentions=True, **more)
    tensor = as_tensor(output)
    if loss == "embedding":
        value = 0.5 * (tensor - tensor.detach().mean(0)).square().sum()
    else:
        flat = tensor.flatten(0, -2)
        value = F.cross_entropy(flat, labels if has_labels else flat.argmax(-1), reduction="sum")
    before = 1 if family == "yolos" else layout.num_prefix  # the others of YOLOS stand at the end
    expected = explicit_scores(value, list(output.attentions), before, layout.num_patches)
    assert (scores.values - expected).abs().max() < 1e-5 * expected.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_have_all_tokens(family: str) -> None:
    model = make(family)
    images = images_for(model)
    layout = host_of(model).layout
    same, small = (pmvit.compress(model, plan) for plan in (_in_place(model), small_plan(model)))
    with torch.no_grad():
        expected = model(images, output_hidden_states=True, **_noise(family)).hidden_states
        for compressed in (same, small):
            states = compressed(images, output_hidden_states=True, **_noise(family)).hidden_states
            assert [state.shape for state in states] == [state.shape for state in expected]
            assert states[0].shape[1] == layout.num_tokens
            assert torch.allclose(states[0], expected[0], atol=1e-6)
            close = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(states, expected, strict=True)]
            assert all(close) == (compressed is same)
        assert predict(small, images).shape == predict(model, images).shape


def _noise(family: str) -> dict[str, Tensor]:
    return {"noise": torch.arange(36.0).expand(3, -1)} if family == "mae" else {}


def _in_place(model: nn.Module) -> Plan:
    from pmvit.runtime.bench.variants import in_place_plan

    host = host_of(model)
    return in_place_plan(host.layout.grid, len(host.block_names()))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_either_attention_gives_the_same(implementation: str) -> None:
    model = vit()
    small = pmvit.compress(model, small_plan(model, attention_bias=True))
    images = images_for(model)
    with torch.no_grad():
        expected = small(images).logits
        small.set_attn_implementation(implementation)
        assert torch.allclose(small(images).logits, expected, atol=1e-5)


def test_flash_attention_is_told_that_it_takes_no_bias() -> None:
    """Nothing else depends on the implementation: scores go through sdpa, and masks of padding are reduced."""
    model = vit()
    plan = small_plan(model, attention_bias=True)
    small = pmvit.compress(model, plan)
    small.config._attn_implementation = "flash_attention_2"
    wrapper = small.vit.layers[0]
    with pytest.raises(pmvit.PmvitError, match="takes no bias: make the plan with attention_bias=False"):
        wrapper.block_arguments((None,), {})
    plain = pmvit.compress(model, small_plan(model, attention_bias=False))
    padding = torch.rand(2, 37) > 0.5
    reduced = plain.vit.layers[0].block_arguments((padding,), {})
    assert torch.equal(reduced["attention_mask"], padding[:, plain.vit.layers[0].centres])
    model.config._attn_implementation = "flash_attention_2"
    with host_of(model).observed():
        assert model.vit.layers[0].attention.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "flash_attention_2"


def test_masks_are_reduced_to_the_centres() -> None:
    model = vit()
    moved = pmvit.compress(model, _in_place(model))
    images = images_for(model)
    mask = torch.rand(3, 37) > 0.3
    mask[:, 0] = True
    with torch.no_grad():
        assert torch.allclose(
            moved(images, attention_mask=mask).logits, model(images, attention_mask=mask).logits, atol=1e-4
        )
        assert not torch.allclose(model(images, attention_mask=mask).logits, model(images).logits, atol=1e-2)


def test_a_model_that_was_evaluated_can_be_trained() -> None:
    """transformers keeps tables of position indices, which inference mode would spoil for training."""
    model = make("beit", image_size=80)
    images = images_for(model)
    pmvit.evaluate(model, [images], reference=model, progress=False)
    model(images).logits.sum().backward()
    assert model.beit.layers[0].relative_position_bias.relative_position_bias_table.grad.any()


def test_detection_tokens_are_never_merged() -> None:
    model = make("yolos")
    assert host_of(model).layout == TokenLayout((6, 5), 1 + 5, num_suffix=5)
    assert pmvit.compress(model, small_plan(model)).vit.encoder.layer[0].token_mask[:6].all()


@pytest.mark.parametrize("between", [True, False])
def test_every_variant_of_a_detector_runs_in_a_benchmark(between: bool) -> None:
    """With position embeddings between blocks, which read all tokens, and without; ToMe says why it does not."""
    model = make("yolos", use_mid_position_embeddings=between)
    result = pmvit.benchmark(
        pmvit.compress(model, small_plan(model)),
        against=["original", "original-optimized", "compressed", "optimized", "bound", "direct", "tome"],
        batches=[1],
        rounds=2,
        progress=False,
    )
    failures = {row.variant: row.failure for row in result.rows if row.failure is not None}
    assert list(failures) == ["tome"]
    assert "expected a timm VisionTransformer with plain blocks" in failures["tome"]


def test_mae_has_to_see_all_patches() -> None:
    with pytest.raises(pmvit.PmvitError, match=r"set config\.mask_ratio = 0"):
        pmvit.measure(make("mae", mask_ratio=0.5), [torch.randn(2, 3, 96, 96)], method="scored", loss="embedding")
    model = make("mae")
    small = pmvit.compress(model, small_plan(model))
    images = images_for(model)
    with torch.no_grad():  # a compressed one keeps the order of the patches, whoever calls it
        assert torch.equal(small(images).last_hidden_state, small(images).last_hidden_state)
    pmvit.decompress(small)
    assert small.embeddings.random_masking.__name__ == "random_masking"


def test_models_without_classes_say_so() -> None:
    model = make("clip")
    images = images_for(model)
    with pytest.raises(pmvit.PmvitError, match='use loss="embedding"'):
        pmvit.measure(model, [(images, torch.tensor([0, 1, 2]))], method="scored", progress=False)
    with pytest.raises(pmvit.PmvitError, match="pass the uncompressed original as reference="):
        pmvit.evaluate(model, [images], progress=False)
    detector = make("yolos")
    with pytest.raises(pmvit.PmvitError, match="expected labels of shape"):
        pmvit.measure(detector, [(images_for(detector), torch.tensor([0, 1, 2]))], method="scored", progress=False)
    result = pmvit.evaluate(pmvit.compress(model, small_plan(model)), [images], reference=model, progress=False)
    assert result.top1 is None
    assert result.cosine is not None
    assert 0 < result.cosine < 1
    assert pmvit.evaluate(model, [images], reference=model, progress=False).cosine == pytest.approx(1, abs=1e-6)


def test_segmentation_agrees_pixel_by_pixel() -> None:
    changes = {**LABELS, **BIAS, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
    model: Any = reduced_hf("BeitForSemanticSegmentation", "BeitConfig", changes)
    assert len(host_of(model).block_names()) == 3  # it reads nothing of the fourth
    images = images_for(model)
    with torch.no_grad():
        logits = model(images).logits
        assert torch.equal(predict(model, images), logits.permute(0, 2, 3, 1))
    result = pmvit.evaluate(model, [images], reference=model, progress=False)
    assert result.agreement == 1
    scores = pmvit.measure(model, [images], method="scored", loss="predicted", progress=False)
    assert scores.values.shape == (3, 36)


def test_the_bound_leaves_all_tokens_where_a_pyramid_reads_them() -> None:
    torch.manual_seed(0)
    model: Any = reduced_hf("Dinov2Backbone", "Dinov2Config", {"out_features": ["stage1", "stage2"]})
    small = pmvit.compress(model, small_plan(model))
    images = images_for(model)
    with torch.no_grad():
        expected, got = model(images).feature_maps, variant("bound", small, "eager")(images).feature_maps
    assert [part.shape for part in got] == [part.shape for part in expected]
