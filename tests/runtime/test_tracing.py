"""What PyTorch's and torchvision's tracers make of compressed models: what they make of the originals."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pmvit
from pmvit.prune_merge import PruneMerge
from tests.helpers import small_plan, small_vit
from tests.runtime.split_plans import perturb, split_plan
from tests.runtime.test_optimize import images
from tests.swins import compressed as compressed_swin
from tests.swins import images as swin_images

from torchvision.models.feature_extraction import create_feature_extractor  # isort: skip  # after pmvit


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Without what the tracers say about themselves and about timm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


KINDS = ("residual", "pinv", "dense", "groups for MLPs", "adaptive")


def compressed_vit(kind: str = "residual") -> nn.Module:
    vit = small_vit(depth=5)
    if kind == "adaptive":
        metric = pmvit.measure(vit, [images(4)], method="adaptive", rank=8, progress=False)
        return pmvit.compress(vit, pmvit.plan(metric, keep=0.6))
    plans: dict[str, dict[str, Any]] = {"pinv": {"reconstruct": "pinv", "attention_bias": False}}
    plan = split_plan() if kind == "groups for MLPs" else small_plan(vit, **plans.get(kind, {}))
    model = pmvit.compress(vit, plan, learn="dense" if kind == "dense" else "group")
    perturb(model)
    return model


@pytest.mark.parametrize("optimised", [None, "eager", "packed", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_passes_its_own_check_and_takes_other_batches(kind: str, optimised: Any) -> None:
    model = compressed_vit(kind)
    if optimised is not None:
        is_packed = optimised == "packed"  # whatever is faster here
        model = pmvit.optimize_for_inference(model, target="eager" if is_packed else optimised, pack=is_packed)
    with torch.inference_mode():
        model(images(4))  # whatever is kept between calls is there
    traced = torch.jit.trace(model, images(2))
    with torch.no_grad():
        for count in (2, 1, 3):
            assert torch.allclose(traced(images(count)), model(images(count)), rtol=0, atol=1e-5)


def test_a_trace_follows_the_weights() -> None:
    model = compressed_vit()
    with torch.inference_mode():
        model(images(2))
    traced = torch.jit.trace(model, images(2))
    before = traced(images(2))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PruneMerge):
                module.merge_weights.mul_(1.5)
        assert torch.allclose(traced(images(2)), model(images(2)), rtol=0, atol=1e-5)
        assert not torch.allclose(traced(images(2)), before, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_features_can_be_extracted(kind: str) -> None:
    model: Any = compressed_vit(kind)
    nodes = ["blocks.1", "blocks.4", "norm", "head"]
    seen: dict[str, torch.Tensor] = {}
    for name in nodes:
        model.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
    extract = create_feature_extractor(model, nodes)
    for count in (2, 3):
        model(images(count))
        found = extract(images(count))
        assert list(found) == nodes
        assert all(torch.equal(found[name], seen[name]) for name in nodes)


def test_features_inside_a_block_are_those_of_groups_and_learn() -> None:
    model: Any = compressed_vit()
    (groups,) = create_feature_extractor(model, ["blocks.2.block.attn.proj"])(images(2)).values()
    assert groups.shape[1] == model.blocks[2].num_prefix + model.blocks[2].num_groups
    create_feature_extractor(model, ["head"])(images(2))["head"].sum().backward()
    assert model.blocks[2].merge_weights.grad is not None


def test_features_of_swin_can_be_extracted() -> None:
    model, small = compressed_swin()
    for made in (model, small):
        found = create_feature_extractor(made, ["layers.0", "head"])(swin_images(made))
        assert torch.equal(found["head"], made(swin_images(made)))
        assert found["layers.0"].shape[1:3] == (28, 28)


def test_an_optimised_model_has_no_features_to_extract() -> None:
    """Groups stand between its blocks, and these are not tensors that a tracer could follow."""
    fast = pmvit.optimize_for_inference(compressed_vit())
    with pytest.raises(torch.fx.proxy.TraceError):
        create_feature_extractor(fast, ["blocks.1"])
