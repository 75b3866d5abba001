"""One plan for images of many sizes: as large shares merge, and what is for one size knows which."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pmvit
from pmvit.adaptive import AdaptiveBlock, merged_of
from pmvit.compression import at_size, compression_of, plan_of_image
from pmvit.errors import PmvitError, PmvitWarning
from pmvit.hosts import host_of
from pmvit.hosts.outputs import as_module, logits_of, predict
from pmvit.loading import original_model
from pmvit.planning.adaptive import AdaptivePlan
from scripts.sweep import difference
from scripts.sweep_dense import create_dpt, create_features
from tests.helpers import make_pictures, pmvit_here, small_plan, small_vit
from tests.hosts.test_adaptive_hosts import Shuffle, any_metric
from tests.runtime.test_blocks import BIAS, LABELS, SHARED, THREE, hf
from tests.segmenters import small_segmenter

Size = tuple[int, int]
NARROW: dict[str, Any] = {"img_size": 224, "embed_dim": 24, "depth": 4, "num_heads": 2}
DYNAMIC: dict[str, Any] = {"dynamic_img_size": True}
SIZES: dict[str, tuple[Size, ...]] = {
    "vit_tiny_patch16_224": ((160, 160), (288, 288), (384, 384), (512, 512), (160, 320)),
    "vit_small_patch14_reg4_dinov2": ((154, 154), (224, 336)),
}


def images_of(size: Size, count: int = 2) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def compressed(model: nn.Module) -> nn.Module:
    """By a plan that nobody measured."""
    host = host_of(model)
    depth = len(host.block_names())
    merges = [host.layout.num_patches * share // 100 for share in (0, 31, 0, 17, *[0] * depth)[:depth]]
    return pmvit.compress(model, AdaptivePlan(tuple(merges), any_metric(model)))


def plan_on(model: nn.Module) -> AdaptivePlan:
    compression = compression_of(model)
    assert compression is not None
    assert isinstance(compression.what, AdaptivePlan)
    return compression.what


@torch.inference_mode()
def outputs(model: nn.Module, images: Tensor) -> Tensor:
    return predict(model, images)


@pytest.fixture(scope="module")
def vit() -> Any:
    return small_vit(depth=4, **DYNAMIC)


@pytest.fixture(scope="module")
def small(vit: nn.Module) -> Any:
    return pmvit.compress(vit, pmvit.plan(pmvit.measure(vit, images_of((96, 96), 8), progress=False), keep=0.6))


@given(st.integers(2, 5000), st.integers(1, 5000), st.lists(st.integers(0, 400), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_shares_are_rounded_once(of: int, count: int, merges: list[int]) -> None:
    sums = [min(merged, of - 1) for merged in accumulate(merges)]
    found = [merged_of(count, merged, of) for merged in sums]
    for merged, each in zip(sums, found, strict=True):
        assert 0 <= each < count
        assert abs(each - count * merged / of) <= 0.5 or each == count - 1
    assert found == sorted(found)  # no step gives tokens back
    assert [merged_of(of, merged, of) for merged in sums] == sums


@pytest.mark.parametrize("name", SIZES)
def test_every_size_is_as_if_the_model_was_made_for_it(name: str) -> None:
    """Tokens are counted in every block: the shares of the plan, whatever the size."""
    model: Any = small_vit(name, **NARROW, **DYNAMIC)
    small: Any = compressed(model)
    before, plan = outputs(small, images_of((224, 224))), plan_on(small)
    seen: list[int] = []
    for block in small.blocks:
        inside = block.block if isinstance(block, AdaptiveBlock) else block
        inside.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    for size in SIZES[name]:
        static: Any = small_vit(name, **NARROW)
        static.set_input_size(img_size=size)
        with pytest.warns(PmvitWarning, match=r"measured on .* for 1\d x 1\d tokens, and is put on"):
            made = pmvit.compress(static, plan)
        images, layout = images_of(size, 1), host_of(static).layout
        seen.clear()
        found = outputs(small, images)
        assert [count - layout.num_prefix for count in seen] == list(plan_on(made).tokens)
        for left, count in zip(plan.tokens, seen, strict=True):
            share = layout.num_patches * left / plan.metric.num_patches
            assert abs(share + layout.num_prefix - count) <= 0.5
        at = at_size(small, size)
        assert plan_on(at).merges == plan_on(made).merges
        assert pmvit.flops(at).macs == pmvit.flops(made).macs == plan_on(made).metric.macs(plan_on(made).merges)
        for other in (made, at, pmvit.optimize_for_inference(at)):
            assert difference(outputs(other, images), found) < 1e-5
    assert torch.equal(outputs(small, images_of((224, 224))), before)


ASKED = {"interpolate_pos_encoding": True}
TRANSFORMERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dinov2": (partial(hf, "Dinov2ForImageClassification", "Dinov2Config", LABELS), {}),
    "dinov3": (partial(hf, "DINOv3ViTModel", "DINOv3ViTConfig", THREE), {}),
    "vit": (partial(hf, "ViTForImageClassification", "ViTConfig", LABELS), ASKED),
    "siglip": (partial(hf, "SiglipVisionModel", "SiglipVisionConfig", THREE), ASKED),
    "beit": (partial(hf, "BeitForImageClassification", "BeitConfig", BIAS), ASKED),
    "beit, shared bias": (partial(hf, "BeitForImageClassification", "BeitConfig", SHARED), ASKED),
    "timm eva02": (partial(small_vit, "eva02_tiny_patch14_224", img_size=84, **DYNAMIC), {}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_positions_go_with_their_tokens_at_another_size(name: str, tmp_path: Path) -> None:
    make, asked = TRANSFORMERS[name]
    model = make().eval()
    host = host_of(model)
    (_, height, width), grid = host.input_size(), host.layout.grid
    size = (height // grid[0] * (grid[0] + 2), width // grid[1] * (grid[1] - 1))
    images = images_of(size)
    expected = outputs(model, images)
    small = compressed(model)
    at = at_size(small, size)
    with torch.no_grad():
        found = predict(small, images)
        assert difference(logits_of(small(images, **asked)), found) < 1e-6
    assert difference(outputs(at, images), found) < 1e-6
    assert difference(outputs(pmvit.optimize_for_inference(at), images), found) < 1e-4
    if name in ("vit", "timm eva02"):
        pmvit.save(at, tmp_path / "small")
        loaded = pmvit.load(tmp_path / "small")
        assert host_of(loaded).input_size() == (3, *size)
        assert difference(outputs(loaded, images), found) < 1e-6
    for index, path in enumerate(host.block_names()):
        block = small.get_submodule(path)
        if isinstance(block, AdaptiveBlock):
            block.step = Shuffle(host_of(at).layout.num_patches, host.layout.num_prefix, index)
    assert difference(outputs(small, images), expected) < 1e-5


def test_graphs_are_whole_at_every_size(small: Any) -> None:
    """Made of a model that has seen larger images, and of one that has not."""
    sizes: tuple[Size, ...] = ((96, 96), (128, 96), (64, 64))
    expected = [outputs(small, images_of(size)) for size in sizes]
    fresh = copy.deepcopy(at_size(small, 96))
    compiled: Any = torch.compile(fresh, fullgraph=True, backend="eager")
    with torch.no_grad():
        for size, wanted in zip(sizes, expected, strict=True):
            assert difference(compiled(images_of(size)), wanted) < 1e-5
        for model, size, wanted in zip((fresh, small), sizes[1:3], expected[1:3], strict=True):
            exported = torch.export.export(as_module(model), (images_of(size),)).module()
            assert difference(exported(images_of(size)), wanted) < 1e-5
        traced: Any = torch.jit.trace(fresh, images_of(sizes[1]), check_trace=False)
        assert difference(traced(images_of(sizes[1])), expected[1]) < 1e-5


def test_larger_images_leave_nothing_that_is_saved_or_shared(small: Any) -> None:
    """Constants of larger images stay with the model: not in its state, and no thread sees those of another."""
    model, names = copy.deepcopy(small), set(small.state_dict())
    sizes: tuple[Size, ...] = ((96, 96), (64, 128), (192, 192), (256, 128))
    expected = [outputs(small, images_of(size)) for size in sizes]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(partial(outputs, model), [images_of(size) for size in sizes] * 4))
    assert all(torch.equal(*pair) for pair in zip(found, expected * 4, strict=True))
    assert set(model.state_dict()) == names
    model(images_of((192, 192))).sum().backward()  # what inference left is no hindrance
    assert difference(outputs(copy.deepcopy(model), images_of((192, 192))), expected[2]) == 0


def test_feature_maps_and_segmenters_take_any_size(small: Any) -> None:
    images = images_of((64, 128))
    with torch.inference_mode():
        maps = small.forward_intermediates(images, intermediates_only=True)
        at = at_size(small, (64, 128)).forward_intermediates(images, intermediates_only=True)
    assert [each.shape[-2:] for each in maps] == [(4, 8)] * 4
    assert all(difference(*pair) < 1e-5 for pair in zip(maps, at, strict=True))
    features = compressed(create_features("vit_tiny_patch16_224", img_size=64, **DYNAMIC))
    with torch.inference_mode():
        assert [each.shape[-2:] for each in features(images)] == [(4, 8)] * len(features(images))
    segmenter: Any = small_segmenter()
    labelled = compressed(segmenter)
    height, width = host_of(segmenter).input_size()[-2:]
    for size in ((height + 16, width), (height + 5, 2 * width)):
        with torch.inference_mode():
            assert labelled(images_of(size)).shape == segmenter(images_of(size)).shape


def test_a_dpt_is_saved_at_another_size(tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    small, images = compressed(create_dpt("test_vit", classes=3, img_size=64).eval()), images_of((64, 128))
    pmvit.save(at_size(small, (64, 128)), tmp_path / "small")
    assert difference(outputs(pmvit.load(tmp_path / "small"), images), outputs(small, images)) < 1e-5


def test_a_saved_model_is_opened_at_any_size(small: Any, vit: Any, tmp_path: Path) -> None:
    pmvit.save(small, tmp_path / "small", arguments=DYNAMIC)
    size, images = (128, 160), images_of((128, 160), 4)
    loaded = pmvit.load(tmp_path / "small", img_size=size)
    found = outputs(loaded, images)
    assert difference(found, outputs(small, images)) < 1e-5
    assert plan_on(loaded).measured_at == (6, 6)
    assert "8 x 10 (measured at 6 x 6; as large shares merge)" in str(plan_on(loaded))
    pmvit.save(loaded, tmp_path / "again", arguments=DYNAMIC)
    again = pmvit.load(tmp_path / "again")
    assert torch.equal(outputs(again, images), found)
    for model in (loaded, again):  # whose position embeddings are not those of the original any more
        original = original_model(model)
        assert original is not None
        assert difference(outputs(original, images), outputs(vit, images)) < 1e-5
    gflops = 0.7 * pmvit.flops(at_size(vit, size)).gflops
    faster = pmvit.load(tmp_path / "small", img_size=size, gflops=gflops)
    assert 0.95 * gflops < pmvit.flops(faster).gflops <= gflops
    assert plan_on(faster).measured_at == (6, 6)
    plan = plan_of_image(small, images[0])
    assert plan is not None
    assert (plan.grid, [layer.num_kept for layer in plan.layers.values()]) == ((8, 10), list(plan_on(loaded).tokens))


def test_the_command_line_takes_sizes(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    small = compressed(small_vit(depth=2, **DYNAMIC))
    pmvit.save(small, tmp_path / "small", arguments=DYNAMIC)
    done = pmvit_here("export", tmp_path / "small", "--img-size", "64,128", "-o", tmp_path / "out.onnx")
    assert done.returncode == 0, done.stderr
    for side in (64, 128):
        images = images_of((side, side), 3)
        session = onnxruntime.InferenceSession(tmp_path / f"out-{side}.onnx", providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"images": images.numpy()})
        assert difference(torch.from_numpy(found), outputs(small, images)) < 1e-3
    told = json.loads(pmvit_here("info", tmp_path / "small", "--img-size", 128, "--json").stdout)
    assert (told["grid"], told["measured_at"]) == ([8, 8], [6, 6])
    assert told["compressed"]["macs"] == pmvit.flops(at_size(small, 128)).macs
    pictures = make_pictures(tmp_path / "pictures", 7)
    shown = pmvit_here("evaluate", tmp_path / "small", "--img-size", 128, "--data", pictures, "--workers", 0, "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["reference"] == "original"


def test_what_is_for_one_size_says_so(vit: Any, small: Any) -> None:
    fixed = pmvit.compress(vit, small_plan(vit))
    with pytest.raises(ValueError, match=r"expected 37 tokens .*, got 65: a fixed plan is for one image size") as told:
        fixed(images_of((128, 128)))
    assert "\n" not in str(told.value)
    with pytest.raises(PmvitError, match="this one has a Plan, which is for one size: make the model for the other"):
        at_size(fixed, 128)
    for model in (small, fixed):
        with pytest.raises(ValueError, match=r"got 65: a model that is optimised for inference is for one image size"):
            pmvit.optimize_for_inference(model)(images_of((128, 128)))
    with pytest.raises(PmvitError, match="a VisionTransformerRelPos is for one: make it for the other"):
        at_size(small_vit("vit_relpos_small_patch16_224"), 128)
    for wrong, words in (
        (0, "expected a side in pixels"),
        ((64,), "or height and width"),
        (100, "multiples of the pat"),
    ):
        with pytest.raises(PmvitError, match=words):
            at_size(small, wrong)  # type: ignore[arg-type]
