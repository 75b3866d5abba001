"""Adaptive plans on every host: what stands beside the tokens follows them, and passes give the same."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.adaptive import AdaptiveBlock, Choice, MergeStep
from pmvit.config import MetricConfig
from pmvit.config.inference import Target
from pmvit.hosts import host_of
from pmvit.hosts.adaptive import spares_last_mlp
from pmvit.hosts.outputs import as_module, as_tensor, predict
from pmvit.measuring import TokenMetric
from pmvit.measuring.flops import block_width, flops, model_cost
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.runtime.adaptive import AdaptiveStage
from pmvit.wrapping import fingerprint
from scripts.sweep import difference, randomise
from scripts.sweep_dense import create_dpt, create_features
from scripts.sweep_models import candidates
from tests.helpers import small_vit
from tests.runtime.test_blocks import BIAS, HOSTS, LABELS, SHARED, hf
from tests.segmenters import small_segmenter

NARROW: dict[str, Any] = {"img_size": (64, 96)}  # 4 x 6 patches
YOLOS = {"image_size": [96, 80], "num_detection_tokens": 5, "use_mid_position_embeddings": True, **LABELS}


def dpt() -> nn.Module:
    pytest.importorskip("segmentation_models_pytorch")
    return create_dpt("test_vit", classes=3, **NARROW)


MORE: dict[str, Callable[[], nn.Module]] = {
    "timm siglip": partial(small_vit, "vit_base_patch16_siglip_224"),
    "timm relpos, post-norm": partial(small_vit, "vit_relpos_small_patch16_rpn_224"),
    "timm features": partial(create_features, "vit_tiny_patch16_224", **NARROW),
    "timm features, relpos": partial(create_features, "vit_relpos_small_patch16_224", **NARROW),
    "timm features, dinov3": partial(create_features, "vit_small_patch16_dinov3", **NARROW),
    "data2vec": partial(hf, "Data2VecVisionForImageClassification", "Data2VecVisionConfig", BIAS),
    "data2vec, shared bias": partial(hf, "Data2VecVisionForImageClassification", "Data2VecVisionConfig", SHARED),
    "yolos": partial(hf, "YolosForObjectDetection", "YolosConfig", YOLOS),
    "segmenter": small_segmenter,
    "dpt": dpt,
}
MODELS = {**HOSTS, **MORE}
OWN_BLOCKS = {  # which optimising leaves as they are: of other kinds, or read in between
    "timm relpos, post-norm", "timm features", "timm features, relpos", "timm features, dinov3",
    "data2vec", "data2vec, shared bias", "yolos", "dpt",
}  # fmt: skip


class Shuffle(MergeStep):
    """Merges nothing, and gives the patch tokens of every image an order of their own."""

    def __init__(self, count: int, num_prefix: int, seed: int) -> None:
        super().__init__(torch.zeros(1, 1), count, 0, num_prefix)
        generator = torch.Generator().manual_seed(seed)
        patches = torch.stack([torch.randperm(count, generator=generator) for _ in range(3)])
        self.orders = torch.cat([torch.arange(num_prefix).expand(3, -1), patches + num_prefix], dim=1)

    def forward(self, tokens: Tensor, sizes: Tensor | None, num_patches: int) -> tuple[Tensor, Any, Choice]:
        orders, nobody = self.orders[: len(tokens)], torch.zeros(len(tokens), 0, dtype=torch.long)
        return tokens.gather(1, orders[..., None].expand(tokens.shape)), sizes, Choice(orders, nobody)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]()
    randomise(model)
    return model.eval()


def images_for(model: nn.Module, count: int) -> Tensor:
    return torch.randn(count, *host_of(model).input_size(), generator=torch.Generator().manual_seed(1))


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return predict(model, images)


def any_metric(model: nn.Module) -> TokenMetric:
    """What nobody measured."""
    host = host_of(model)
    names, layout = host.block_names(), host.layout
    width = block_width(host, model.get_submodule(names[0]))
    return TokenMetric(
        projections=torch.randn(len(names), width, 8, generator=torch.Generator().manual_seed(2)),
        grid=layout.grid,
        num_prefix=layout.num_prefix,
        cost=model_cost(model),
        spares_last_mlp=spares_last_mlp(host_of(model)),
        config=MetricConfig(rank=8),
        images=1,
        model=fingerprint(model),
        data="none",
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_tokens_does_not_matter(name: str) -> None:
    """Positions go where their tokens go, for every image on its own."""
    model = make(name)
    host = host_of(model)
    small = pmvit.compress(model, AdaptivePlan((1,) * len(host.block_names()), any_metric(model)))
    for index, path in enumerate(host.block_names()):
        block = small.get_submodule(path)
        assert isinstance(block, AdaptiveBlock)
        block.step = Shuffle(host.layout.num_patches, host.layout.num_prefix, index)
    tolerance = 1e-4 if "eomt" in name else 1e-5  # what it puts out are logarithms of small shares
    for images in (images_for(model, 3), images_for(model, 1)):
        assert difference(outputs(small, images), outputs(model, images)) < tolerance


@pytest.mark.parametrize("name", MODELS)
def test_plans_that_adapt_run_and_come_off(name: str) -> None:
    model = make(name)
    before = dict(model.named_modules())
    images = images_for(model, 4)
    expected = outputs(model, images)
    metric = pmvit.measure(model, [images], method="adaptive", rank=16, progress=False)
    assert list(model.named_modules()) == list(before.items())
    assert torch.equal(outputs(model, images), expected)
    plan = pmvit.plan(metric, keep=0.6)
    small = pmvit.compress(model, plan)
    found = outputs(small, images)
    assert found.shape == expected.shape
    assert difference(found, expected) > 1e-4
    alone = torch.cat([outputs(small, image[None]) for image in images])
    assert difference(alone, found) < 1e-4
    targets: tuple[Target, ...] = ("eager", "onnx")
    for target in targets:
        fast = pmvit.optimize_for_inference(small, target=target)
        assert any(isinstance(module, AdaptiveStage) for module in fast.modules()) == (name not in OWN_BLOCKS)
        assert difference(outputs(fast, images), found) < 1e-4
    pmvit.compress(model, plan, inplace=True)
    assert torch.equal(outputs(model, images), found)
    pmvit.decompress(model)
    assert list(model.named_modules()) == list(before.items())
    assert torch.equal(outputs(model, images), expected)


HELD = ("timm beit", "timm relpos", "timm rope mixed", "beit", "dinov3", "torchvision")  # one for each way of biases


@pytest.mark.parametrize("name", HELD)
def test_groups_are_found_in_graphs_threads_training_and_files(name: str, tmp_path: Path) -> None:
    model = make(name)
    merges = (0, *(5,) * (len(host_of(model).block_names()) - 1))
    small = pmvit.compress(model, AdaptivePlan(merges, any_metric(model)))
    batches = images_for(model, 12).chunk(4)
    expected = [outputs(small, images) for images in batches]
    module = as_module(small)
    with torch.no_grad():
        graphs: list[Any] = [
            torch.compile(small, fullgraph=True, backend="eager"),
            torch.export.export(module, (batches[0],)).module(),
            torch.jit.trace(module, batches[0]),
        ]
        for graph in graphs:
            assert difference(as_tensor(graph(batches[1])), module(batches[1])) < 1e-5
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(partial(outputs, small), batches * 5))
    assert all(torch.equal(*pair) for pair in zip(found, expected * 5, strict=True))
    assert flops(small).macs == pytest.approx(any_metric(model).macs(merges), rel=1e-9)
    pmvit.save(small, tmp_path / "small")
    loaded = pmvit.load(tmp_path / "small")
    assert torch.equal(outputs(loaded, batches[0]), expected[0])
    predict(small.train(), batches[0]).sum().backward()
    biases = [each.grad for path, each in small.named_parameters() if "bias_table" in path or "rel_pos.mlp" in path]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in biases)


SWINS = {candidate.family: candidate for candidate in candidates() if "swin" in candidate.family}


@pytest.mark.parametrize("family", SWINS)
def test_windows_are_refused(family: str) -> None:
    model = SWINS[family].make()
    with pytest.raises(pmvit.PmvitError, match=r"attends inside windows: make a fixed plan"):
        pmvit.measure(model, [images_for(model, 1)], method="adaptive", progress=False)
    with pytest.raises(pmvit.PmvitError, match=r"attends inside windows: make a fixed plan"):
        pmvit.compress(model, AdaptivePlan((0, 1, 1), any_metric(small_vit())))
