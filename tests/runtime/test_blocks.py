"""Blocks of every library, put together anew from what their hosts say: the same output, and nothing left out."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from pmvit.planning import Plan
from pmvit.runtime.bench.variants import in_place_plan, variant
from pmvit.runtime.blocks.arguments import TokensAlone, arguments_of
from pmvit.runtime.blocks.graph import FewQueries
from pmvit.runtime.blocks.halves import AttentionHalf, MlpHalf
from pmvit.runtime.blocks.packed import Packable, can_pack
from pmvit.runtime.optimize import optimize_for_inference
from scripts.sweep import randomise
from scripts.sweep_models import CLIP, QUERIES, SPECTROGRAM, VIDEO, reduced_hf, reduced_torchvision
from tests.helpers import small_plan, small_vit
from tests.runtime.split_plans import split_plan

THREE = {"num_hidden_layers": 3}
LABELS = {"num_labels": 7, **THREE}
BIAS = {"use_relative_position_bias": True, "layer_scale_init_value": 0.1, **LABELS}
EOMT = {"num_labels": 7, **QUERIES}
SHARED = {"use_shared_relative_position_bias": True, **LABELS}


def hf(model: str, config: str, changes: dict[str, Any]) -> Any:
    pytest.importorskip("transformers")
    return reduced_hf(model, config, changes)


def small_naflex(name: str, **arguments: Any) -> Any:
    model: Any = small_vit(name, **arguments)
    model.pretrained_cfg["input_size"] = (3, 96, 96)
    return model


HOSTS: dict[str, Any] = {
    "timm vit": small_vit,
    "timm vit, pooled, qk norm, layer scale": partial(
        small_vit, "vit_tiny_patch16_224", global_pool="avg", qk_norm=True, init_values=0.1
    ),
    "timm vit, registers, SwiGLU": partial(
        small_vit, "vit_giant_patch14_reg4_dinov2", img_size=84, global_pool="token"
    ),
    "timm vit, quick gelu": partial(small_vit, "vit_base_patch16_clip_quickgelu_224"),
    "timm vit, normalised attention": partial(small_vit, scale_attn_norm=True, scale_mlp_norm=True),
    "timm beit": partial(small_vit, "beit_base_patch16_224"),
    "timm beit, shared bias": partial(
        small_vit, "beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True
    ),
    "timm eva": partial(small_vit, "eva_large_patch14_196", img_size=84),
    "timm eva02": partial(small_vit, "eva02_tiny_patch14_224", img_size=84),
    "timm eva02, normalised inside": partial(small_vit, "eva02_base_patch14_224", img_size=84),
    "timm dinov3": partial(small_vit, "vit_small_patch16_dinov3"),
    "timm perception encoder": partial(small_vit, "vit_pe_core_tiny_patch16_384"),
    "timm rope mixed": partial(small_vit, "vit_small_patch16_rope_mixed_224"),
    "timm relpos": partial(small_vit, "vit_relpos_small_patch16_224"),
    "timm relpos, class token, shared": partial(small_vit, "vit_relpos_base_patch16_clsgap_224", shared_rel_pos=True),
    "timm relpos, table": partial(small_vit, "vit_relpos_small_patch16_224", rel_pos_type="bias"),
    "vit": partial(hf, "ViTForImageClassification", "ViTConfig", LABELS),
    "vit model": partial(hf, "ViTModel", "ViTConfig", THREE),
    "msn": partial(hf, "ViTMSNForImageClassification", "ViTMSNConfig", LABELS),
    "mae": partial(hf, "ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.0, **THREE}),
    "ijepa": partial(hf, "IJepaForImageClassification", "IJepaConfig", LABELS),
    "deit": partial(hf, "DeiTForImageClassificationWithTeacher", "DeiTConfig", LABELS),
    "beit": partial(hf, "BeitForImageClassification", "BeitConfig", BIAS),
    "beit, shared bias": partial(hf, "BeitForImageClassification", "BeitConfig", SHARED),
    "dinov2": partial(hf, "Dinov2ForImageClassification", "Dinov2Config", LABELS),
    "dinov2, SwiGLU": partial(hf, "Dinov2ForImageClassification", "Dinov2Config", {"use_swiglu_ffn": True, **LABELS}),
    "registers": partial(hf, "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", LABELS),
    "dinov3": partial(hf, "DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 2, **THREE}),
    "dinov3, gated": partial(hf, "DINOv3ViTModel", "DINOv3ViTConfig", {"use_gated_mlp": True, **THREE}),
    "pixio": partial(hf, "PixioModel", "PixioConfig", THREE),
    "clip": partial(hf, "CLIPVisionModelWithProjection", "CLIPVisionConfig", THREE),
    "clip classifier": partial(hf, "CLIPForImageClassification", "CLIPConfig", {"num_labels": 7}),
    "metaclip2": partial(hf, "MetaClip2VisionModelWithProjection", "MetaClip2VisionConfig", THREE),
    "siglip": partial(hf, "SiglipVisionModel", "SiglipVisionConfig", THREE),
    "eomt": partial(hf, "EomtForUniversalSegmentation", "EomtConfig", EOMT),
    "eomt, dinov3": partial(hf, "EomtDinov3ForUniversalSegmentation", "EomtDinov3Config", EOMT),
    "videomae": partial(hf, "VideoMAEForVideoClassification", "VideoMAEConfig", {**VIDEO, **LABELS}),
    "vjepa2": partial(hf, "VJEPA2ForVideoClassification", "VJEPA2Config", {**CLIP, **LABELS}),
    "ast": partial(hf, "ASTForAudioClassification", "ASTConfig", {**SPECTROGRAM, **LABELS}),
    "naflex": partial(small_naflex, "naflexvit_base_patch16_map"),
    "naflex rope": partial(small_naflex, "naflexvit_base_patch16_gap", rope_type="axial", class_token=True),
    "torchvision": partial(reduced_torchvision, 16),
}
READ_PREFIX = {"timm vit", "vit", "msn", "deit", "clip", "metaclip2", "torchvision"}
READ_PREFIX |= {"timm vit, registers, SwiGLU", "timm vit, quick gelu", "timm vit, normalised attention"}
READ_PREFIX |= {"timm rope mixed", "ast"}
COUNTS = ((30, 20), (24, 16), (20, 12))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = HOSTS[name]()
    randomise(model)
    return model.eval()


def images_for(model: nn.Module) -> Tensor:
    return torch.randn(2, *host_of(model).input_size(), generator=torch.Generator().manual_seed(1))


def plans(model: nn.Module) -> dict[str, Plan]:
    host = host_of(model)
    depth, grid = len(host.block_names()), host.layout.grid
    return {
        "whole": small_plan(model),
        "whole, biased": small_plan(model, attention_bias=True),
        "paper": small_plan(model, reconstruct="pinv"),
        "split": split_plan(grid, COUNTS[:depth], attention_bias=True),
        "reordered": in_place_plan(grid, depth),
    }


def check_rewritten(model: nn.Module) -> None:
    """Every block is rewritten: none of the host's own is left."""
    for name in host_of(model).block_names():
        assert isinstance(model.get_submodule(f"{name}.block"), TokensAlone), name


@pytest.mark.parametrize("name", HOSTS)
def test_rewritten_blocks_give_the_same(name: str) -> None:
    model = make(name)
    images = images_for(model)
    tolerance = 1e-4 if "eomt" in name else 1e-5  # what it puts out are logarithms of small shares
    for plan, made in plans(model).items():
        small = pmvit.compress(model, made)
        with torch.inference_mode():
            expected = predict(small, images)
        for target in ("eager", "graph", "onnx"):
            fast = optimize_for_inference(small, target=target)
            check_rewritten(fast)
            with torch.inference_mode():
                error = (predict(fast, images) - expected).abs().max() / expected.abs().max()
            assert error < tolerance, (plan, target)
    with torch.inference_mode():
        expected = predict(model, images)
        fast = optimize_for_inference(model)
        check_rewritten(fast)
        assert (predict(fast, images) - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("name", HOSTS)
def test_the_halves_of_a_block_make_the_block(name: str) -> None:
    model = make(name)
    host = host_of(model)
    path = host.block_names()[1]
    called: dict[str, Any] = {}
    block = model.get_submodule(path)
    hook = block.register_forward_hook(
        lambda _, given, named, output: called.update(given=given, named=named, output=output), with_kwargs=True
    )
    with torch.no_grad():
        arguments = arguments_of(host)[path]
        predict(model, images_for(model))
        hook.remove()
        parts = host.plain_parts(block, arguments.at_centres)
        assert parts is not None
        tokens = called["given"][0]
        output = called["output"][0] if isinstance(called["output"], tuple) else called["output"]
        assert torch.allclose(MlpHalf(parts)(AttentionHalf(parts)(tokens)), output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HOSTS)
def test_the_last_block_computes_what_is_read(name: str) -> None:
    model = make(name)
    fast = optimize_for_inference(pmvit.compress(model, small_plan(model)))
    last: Any = fast.get_submodule(f"{host_of(fast).block_names()[-1]}.block")
    if name in READ_PREFIX:
        assert last.num_outputs == host_of(model).layout.num_prefix
        is_linear = "normalised" not in name and "rope" not in name and last.num_outputs == 1
        assert isinstance(last.attention, FewQueries) == is_linear
    else:
        assert last.num_outputs > host_of(model).layout.num_prefix


@pytest.mark.parametrize("name", ["vit", "dinov3", "timm eva02", "beit", "torchvision"])
def test_variants_of_a_benchmark_run(name: str) -> None:
    model = make(name)
    for plan in ("whole, biased", "split"):
        small = pmvit.compress(model, plans(model)[plan])
        for kind in ("compressed", "optimized", "bound", "direct"):
            with torch.inference_mode():
                assert predict(variant(kind, small, "eager"), images_for(model)).isfinite().all()


@pytest.mark.parametrize("name", ["timm eva02", "beit"])
def test_rewritten_blocks_are_exported(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = make(name)
    small = pmvit.compress(model, plans(model)["split"])
    assert pmvit.export(small, tmp_path / "model.onnx", images=images_for(model)).max_error < 1e-4


def test_what_the_parts_do_not_hold_is_refused() -> None:
    model: Any = make("timm vit")
    fast: Any = optimize_for_inference(model)
    with pytest.raises(pmvit.PmvitError, match=r"expected images alone .* got attn_mask as well"):
        fast.forward_features(images_for(model), attn_mask=torch.zeros(37, 37))


@pytest.mark.parametrize("pack", [True, False])
def test_packing_can_be_told_and_is_kept(pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> bool:
        raise AssertionError("nothing is to be timed")

    monkeypatch.setattr("pmvit.runtime.blocks.packed.is_faster", never)
    if not can_pack(torch.zeros(1)):
        pytest.skip("this PyTorch has no oneDNN")
    model = make("timm vit")
    fast = optimize_for_inference(model, pack=pack)
    moved = copy.deepcopy(fast).to("cpu")
    images = images_for(model)
    for made in (fast, moved):
        assert {module.is_packed for module in made.modules() if isinstance(module, Packable)} == {pack}
        with torch.inference_mode():
            assert torch.allclose(predict(made, images), predict(model, images), atol=1e-5)
    wider = moved.double()
    assert {module.is_packed for module in wider.modules() if isinstance(module, Packable)} == {False}
    with torch.inference_mode():
        assert predict(wider, images.double()).dtype == torch.float64
