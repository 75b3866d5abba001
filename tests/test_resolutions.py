"""Models at another image size than they were made for: weights of one's own, dynamic models, the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pmvit
from pmvit.cli.common import pairs, source_of
from pmvit.hosts import host_of
from pmvit.loading import create_model, original_model
from tests.helpers import make_pictures, pmvit_here, small_vit

import timm  # isort: skip

SMALL: dict[str, Any] = {"img_size": 96, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}
SWIN: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3)}
FAMILIES = {
    "vit_tiny_patch16_224": SMALL,
    "deit_tiny_distilled_patch16_224": SMALL,
    "beit_base_patch16_224": SMALL,
    "eva02_tiny_patch14_224": {**SMALL, "img_size": 84},
    "swin_tiny_patch4_window7_224": SWIN,
}
LARGER = {84: 112, 96: 160, 64: 128}


def weights_of(name: str, arguments: dict[str, Any], path: Path) -> tuple[nn.Module, Path]:
    model = small_vit(name, **arguments) if "depth" in arguments else timm.create_model(name, **arguments).eval()
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path)
    return model, path


@pytest.mark.parametrize("name", FAMILIES)
def test_own_weights_are_resized_as_timm_does_it(name: str, tmp_path: Path) -> None:
    arguments = FAMILIES[name]
    model, file = weights_of(name, arguments, tmp_path / "w.safetensors")
    side = LARGER[arguments["img_size"]]
    larger = {**arguments, "img_size": side}
    found: Any = create_model(name, file, **larger)
    overlay = {"state_dict": model.state_dict(), "num_classes": model.num_classes, "custom_load": False}
    expected = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **larger).eval()
    images = torch.randn(2, 3, side, side)
    assert host_of(found).input_size() == (3, side, side)
    with torch.inference_mode():
        assert torch.equal(found(images), expected(images))
    features = {key: value for key, value in larger.items() if key != "num_classes"}
    if name.startswith("vit"):
        extractor: Any = create_model(name, file, features_only=True, **features)
        assert torch.equal(extractor.model.pos_embed, found.pos_embed)


def test_weights_are_not_resized_unless_that_is_asked_for(tmp_path: Path) -> None:
    _, file = weights_of("vit_tiny_patch16_224", SMALL, tmp_path / "w.safetensors")
    made = {key: value for key, value in SMALL.items() if key != "img_size"}
    with pytest.raises(pmvit.PmvitError, match=r"'pos_embed' of shape \(1, 197, 48\), got \(1, 37, 48\)"):
        create_model("vit_tiny_patch16_224", file, **made)
    with pytest.raises(pmvit.PmvitError, match=r"expected .* of shape"):
        create_model("vit_tiny_patch16_224", file, **{**SMALL, "img_size": 160, "num_heads": 3, "embed_dim": 24})


def test_torchvision_at_another_size(tmp_path: Path) -> None:
    from torchvision.models import get_model
    from torchvision.models.vision_transformer import interpolate_embeddings

    file = tmp_path / "vit.safetensors"  # of the smallest that has a name
    state = get_model("vit_b_32", weights=None, image_size=64, num_classes=7).state_dict()
    save_file(state, file)
    found: Any = create_model("torchvision:vit_b_32", file, image_size=128, num_classes=7)
    assert host_of(found).input_size() == (3, 128, 128)
    resized = interpolate_embeddings(128, 32, state)
    assert torch.equal(found.encoder.pos_embedding, resized["encoder.pos_embedding"])
    assert found.encoder.pos_embedding.shape == (1, 17, 768)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_a_dynamic_model_at_one_size(name: str, tmp_path: Path) -> None:
    patch = 16 if name.startswith("vit") else 14
    model: Any = small_vit(name, img_size=6 * patch, dynamic_img_size=True)
    images = torch.randn(6, 3, 8 * patch, 8 * patch)
    with torch.inference_mode():
        expected = model(images)
    with pytest.raises(pmvit.PmvitError, match=r"expected images of shape .*; got .*at_size"):
        pmvit.measure(model, images, progress=False)
    model.set_input_size(img_size=(8 * patch, 8 * patch))
    with torch.inference_mode():
        assert torch.allclose(model(images), expected, atol=1e-5)
    small = pmvit.compress(model, pmvit.plan(pmvit.measure(model, images, progress=False), keep=0.6))
    pmvit.save(small, tmp_path / "out", arguments={"dynamic_img_size": True})
    loaded = pmvit.load(tmp_path / "out")
    assert host_of(loaded).input_size() == (3, 8 * patch, 8 * patch)
    with torch.inference_mode():
        assert torch.allclose(loaded(images), small(images), atol=1e-5)


def test_the_command_line_at_another_size(tmp_path: Path) -> None:
    _, file = weights_of("vit_tiny_patch16_224", SMALL, tmp_path / "w.safetensors")
    pictures = make_pictures(tmp_path / "pictures", 14)
    (pictures / "0" / "photo.heic").write_bytes(b"")
    made = [part for name in ("embed_dim", "depth", "num_heads") for part in ("--model-arg", f"{name}={SMALL[name]}")]
    named = ["vit_tiny_patch16_224", "--weights", file, *made]
    for number, dynamic in enumerate(("False", "True")):
        out = tmp_path / str(number)
        given = [*named, "--img-size", 128, "--model-arg", f"dynamic_img_size={dynamic}"]
        done = pmvit_here("compress", *given, "--data", pictures, "--keep", "0.6", "--workers", 0, "-o", out)
        assert done.returncode == 0, done.stderr
        assert "1 of 15 files below" in done.stdout
        assert "photo.heic" in done.stdout
        small: Any = pmvit.load(out)
        assert host_of(small).input_size() == (3, 128, 128)
        assert small.dynamic_img_size is (dynamic == "True")
        assert original_model(small) is not None
    shown = pmvit_here("evaluate", tmp_path / "0", "--data", pictures, "--workers", 0, "--json")
    assert json.loads(shown.stdout)["images"] == 14
    tuning = ["--epochs", 1, "--batch-size", 7, "--lr", "1e-4", "--workers", 0]
    tuned = pmvit_here("finetune", *named, "--img-size", 128, "--data", pictures, "-o", tmp_path / "t", *tuning)
    assert tuned.returncode == 0, tuned.stderr
    assert host_of(pmvit.load(tmp_path / "t")).input_size() == (3, 128, 128)
    again = pmvit_here("finetune", "--resume", tmp_path / "t")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--data-arg", "input_size=[3,128,128]"], "input_size: expected [3, 224, 224]"),
        (["--data-arg", "size=128"], "expected one of input_size, interpolation"),
        (["--decoder", "mask"], "decoder: expected beside segmenter:NAME alone"),
    ],
)
def test_what_cannot_be_had_is_refused(given: list[str], words: str, tmp_path: Path) -> None:
    _, file = weights_of("vit_tiny_patch16_224", {**SMALL, "img_size": 224}, tmp_path / "w.safetensors")
    made = [part for name in ("embed_dim", "depth", "num_heads") for part in ("--model-arg", f"{name}={SMALL[name]}")]
    named = ["vit_tiny_patch16_224", "--weights", file, *made]
    done = pmvit_here("measure", *named, *given, "--data", tmp_path, "-o", tmp_path / "m.json")
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_transformers_at_another_size(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 56}
    for kind in ("Dinov2", "ViT"):  # which adapts to the size of an image, and which does if it is asked
        config = getattr(transformers, f"{kind}Config")(**sizes, patch_size=14, intermediate_size=96, num_labels=7)
        folder = tmp_path / kind
        getattr(transformers, f"{kind}ForImageClassification")(config).save_pretrained(folder)
        assert host_of(create_model(str(folder))).input_size() == (3, 56, 56)
        model = create_model(str(folder), image_size=112)
        assert host_of(model).input_size() == (3, 112, 112)
        small = pmvit.compress(
            model, pmvit.plan(pmvit.measure(model, torch.randn(4, 3, 112, 112), progress=False), keep=0.6)
        )
        pmvit.save(small, tmp_path / "out")
        assert host_of(pmvit.load(tmp_path / "out")).input_size() == (3, 112, 112)
    config = transformers.EomtConfig(**sizes, patch_size=14, num_blocks=1, num_queries=4, num_upscale_blocks=1)
    transformers.EomtForUniversalSegmentation(config).save_pretrained(tmp_path / "eomt")
    with pytest.raises(pmvit.PmvitError, match="a EomtForUniversalSegmentation is for one: make it for the other"):
        create_model(str(tmp_path / "eomt"), image_size=112)


def test_one_option_for_every_library() -> None:
    for name, argument in (
        ("vit_tiny_patch16_224", "img_size"),
        ("hf-hub:owner/name", "img_size"),
        ("hf:owner/name", "image_size"),
        ("torchvision:vit_b_16", "image_size"),
        ("segmenter:vit_tiny_patch16_224", "image_size"),
    ):
        for option in ("img_size", "size"):  # the second is in runs that were started before
            assert source_of(name, {option: 64})["arguments"] == {argument: 64}


def test_values_are_read_as_json_or_as_python_writes_them() -> None:
    texts = ["a=False", "b=false", "c=None", "d=null", "e=(1, 2)", "f=[1,2]", "g=1e-6", "h=gelu", "i='x'", "j=a=b"]
    values = [False, False, None, None, (1, 2), [1, 2], 1e-6, "gelu", "x", "a=b"]
    assert pairs("--model-arg", texts) == dict(zip("abcdefghij", values, strict=True))
