"""torchvision's VisionTransformer: scores, bias, saving, loading by name, and the real weights in its layout."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from pmvit.hosts import TokenLayout, host_of
from pmvit.loading import create_model
from pmvit.planning import Plan
from scripts.sweep import randomise, try_model
from scripts.sweep_models import reduced_torchvision, torchvision_models
from tests.helpers import small_plan
from tests.hosts.layouts import check_same_as_timm, explicit_attention, explicit_scores, torchvision_vit


def small_model() -> Any:
    torch.manual_seed(0)
    model = reduced_torchvision(16)
    randomise(model)
    return model


@pytest.mark.parametrize("candidate", torchvision_models(), ids=lambda candidate: candidate.name)
def test_what_the_sweep_checks(candidate: Any) -> None:
    assert try_model(candidate).reason == ""


def test_scores_are_those_of_explicit_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model().double()
    images, labels = torch.randn(3, 3, 96, 96, dtype=torch.float64), torch.tensor([0, 3, 5])
    scores = pmvit.measure(model, [(images, labels)], method="scored", progress=False)
    maps: list[Tensor] = []
    logits = model(images)
    for attention in (module for module in model.modules() if isinstance(module, nn.MultiheadAttention)):
        monkeypatch.setattr(attention, "forward", partial(_explicit, attention, maps))
    output = model(images)
    assert torch.allclose(output, logits)
    loss = F.cross_entropy(output, labels, reduction="sum")
    assert torch.allclose(scores.values, explicit_scores(loss, maps, 1, 36), rtol=1e-7, atol=1e-12)


def _explicit(
    attention: nn.MultiheadAttention, maps: list[Tensor], tokens: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return explicit_attention(attention, tokens, maps), None


def test_attention_is_counted() -> None:
    """PyTorch's counter does not see the fast path of `nn.MultiheadAttention`."""
    model = small_model()
    tokens, width, depth, hidden = 37, 96, 2, 192
    block = tokens * (4 * width**2 + 2 * width * hidden) + 2 * tokens**2 * width
    assert pmvit.flops(model).macs == depth * block + 36 * 3 * 16**2 * width + width * 11


@pytest.mark.parametrize("attention_bias", [True, False])
def test_saved_optimised_and_exported(attention_bias: bool, tmp_path: Path) -> None:
    model = small_model()
    small = pmvit.compress(model, small_plan(model, attention_bias=attention_bias))
    pmvit.save(small, tmp_path / "small")
    loaded = pmvit.load(tmp_path / "small")
    images = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        assert torch.equal(loaded(images), small(images))
        assert torch.allclose(pmvit.optimize_for_inference(small)(images), small(images), rtol=1e-4, atol=1e-4)
        assert torch.equal(pmvit.decompress(loaded)(images), model(images))
    assert pmvit.export(small, tmp_path / "small.pt2").max_error < 1e-5


def test_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = create_model("torchvision:vit_b_16", _weights(tmp_path, save_file), image_size=32, num_classes=3)
    host = host_of(weights)
    assert host.layout == TokenLayout((2, 2), 1)
    assert host.data_config()["crop_pct"] == 0.875
    assert len(host.block_names()) == 12
    with pytest.raises(pmvit.PmvitError, match=r"expected one of torchvision's vit_b_16.*swin_t"):
        create_model("torchvision:resnet18")


def _weights(folder: Path, save_file: Any) -> Path:
    from torchvision.models import vit_b_16

    save_file(vit_b_16(image_size=32, num_classes=3).state_dict(), folder / "weights.safetensors")
    return folder / "weights.safetensors"


@pytest.mark.data
def test_the_real_vit_tiny_is_the_same_in_the_layout_of_torchvision(
    vit_tiny: nn.Module, real_images: Tensor, vit_tiny_plan: Plan
) -> None:
    check_same_as_timm(torchvision_vit(vit_tiny), vit_tiny, vit_tiny_plan, real_images)
