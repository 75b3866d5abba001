"""Segmenter: its shapes, published checkpoints, compression, saving, export, scores, features between blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import pmvit
from pmvit.hosts import TokenLayout, host_of
from pmvit.hosts.segmenter import checkpoint as segmenter_checkpoint
from pmvit.hosts.segmenter.model import DecoderKind, create_segmenter
from pmvit.loading import create_model, read_weights
from pmvit.measuring import Scores
from pmvit.planning import Plan
from pmvit.runtime.bench.variants import in_place_plan
from tests.segmenters import WIDTHS, by_hand, published, random_state, small_segmenter

DECODERS = ("mask", "linear")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


def some_plan(model: Any, **options: Any) -> Plan:
    scores = pmvit.measure(model, [], method="scored", scorer="random")
    made: Plan = pmvit.plan(scores, keep=0.5, prune=0.1, **options)
    return made


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("size", [(64, 96), (96, 64), (70, 101), (5, 40)])
def test_every_pixel_of_any_image_gets_scores(decoder: str, size: tuple[int, int]) -> None:
    model = small_segmenter(decoder=decoder)
    with torch.inference_mode():
        output = model(torch.randn(2, 3, *size))
    assert output.shape == (2, 3, *size)
    assert output.isfinite().all()


def test_padding_is_cropped_again(images: Tensor) -> None:
    model = small_segmenter()
    with torch.inference_mode():
        padded = F.pad(images[..., :60, :90], (0, 6, 0, 4))
        assert torch.equal(model(images[..., :60, :90]), model(padded)[..., :60, :90])


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_published_layouts_fit(name: str, decoder: DecoderKind) -> None:
    width, depth = WIDTHS[name]
    with torch.device("meta"):
        shapes = published(width, depth, classes=150, side=512, decoder=decoder)
        state = {key: torch.empty(shape) for key, shape in shapes.items()}
        said = segmenter_checkpoint.arguments_of(state, f"vit_{name}_patch16_384", {})
        model = create_segmenter(f"vit_{name}_patch16_384", **said)
        fitted = segmenter_checkpoint.fit(state, model)
    assert said == {"classes": 150, "decoder": decoder, "norm_eps": 1e-5, "image_size": 512}
    assert {key: value.shape for key, value in fitted.items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_a_distilled_encoder_has_two_prefix_tokens() -> None:
    with torch.device("meta"):
        shapes = published(192, 12, classes=19, side=768, decoder="mask", distilled=True)
        state = {key: torch.empty(shape) for key, shape in shapes.items()}
        said = segmenter_checkpoint.arguments_of(state, "deit_tiny_distilled_patch16_224", {})
        model = create_segmenter("deit_tiny_distilled_patch16_224", **said)
        fitted = segmenter_checkpoint.fit(state, model)
    assert (said["classes"], said["image_size"]) == (19, 768)
    assert fitted.keys() == model.state_dict().keys()
    assert host_of(model).layout == TokenLayout((48, 48), 2)


def test_a_published_checkpoint_gives_what_its_equations_say(tmp_path: Path) -> None:
    state = random_state(published(192, 12, classes=5, side=64, decoder="mask"))
    wrapped = {
        "model": {f"module.{name}": value for name, value in state.items()},
        "epoch": 64,
        "optimizer": {"lr": 0.1},
    }
    torch.save(wrapped, tmp_path / "checkpoint.pth")
    model = create_model("segmenter:vit_tiny_patch16_384", tmp_path / "checkpoint.pth")
    assert host_of(model).input_size() == (3, 64, 64)
    pictures = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.inference_mode():
        expected = by_hand({k: v.double() for k, v in state.items()}, pictures, depth=12, heads=3)
        masks = expected.transpose(1, 2).unflatten(2, (4, 4))
        expected = F.interpolate(masks, size=(64, 64), mode="bilinear")
        assert torch.allclose(model.double()(pictures), expected, rtol=0, atol=1e-9)
        larger = create_model("segmenter:vit_tiny_patch16_384", tmp_path / "checkpoint.pth", image_size=96)
        assert larger(torch.randn(1, 3, 96, 96)).shape == (1, 5, 96, 96)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    state = random_state(published(192, 12, classes=5, side=64, decoder="linear"))
    save_file(state, tmp_path / "linear.safetensors")
    with pytest.raises(pmvit.PmvitError, match="decoder"):
        create_model("segmenter:vit_tiny_patch16_384", tmp_path / "linear.safetensors", decoder="mask")
    with pytest.raises(pmvit.PmvitError, match=r"expected 'encoder\.cls_token' of shape"):
        create_model("segmenter:vit_small_patch16_384", tmp_path / "linear.safetensors")
    with pytest.raises(pmvit.PmvitError, match="did you mean"):
        create_model("segmenter:vit_tinny_patch16_384", tmp_path / "linear.safetensors")
    with pytest.raises(pmvit.PmvitError, match="plain vision transformers"):
        create_segmenter("resnet18", img_size=None, dynamic_img_size=None)
    with pytest.raises(pmvit.PmvitError, match="expected mask or linear"):
        create_segmenter(image_size=64, decoder="conv")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(pmvit.PmvitError, match="expected multiples of the patches of vit_tiny_patch16_224, 16 x 16"):
        create_segmenter(image_size=100)


@pytest.mark.data
def test_weights_of_an_encoder_alone(data: Path) -> None:
    file = data / "weights" / "vit_tiny_patch16_224.safetensors"
    model: Any = create_model("segmenter:vit_tiny_patch16_224", file, classes=3, image_size=224)
    assert torch.equal(model.encoder.blocks[3].mlp.fc1.weight, read_weights(file)["blocks.3.mlp.fc1.weight"].float())
    smaller: Any = create_model("segmenter:vit_tiny_patch16_224", file, classes=3, image_size=(96, 128))
    assert smaller.encoder.pos_embed.shape == (1, 6 * 8 + 1, 192)


@pytest.mark.parametrize("decoder", DECODERS)
def test_plans_that_change_nothing(decoder: str, images: Tensor) -> None:
    model = small_segmenter(decoder=decoder)
    assert host_of(model).layout == TokenLayout((4, 6), 1)
    with torch.inference_mode():
        expected = model(images)
        for plan in (Plan.keep_all((4, 6), 6), in_place_plan((4, 6), 6)):
            assert torch.allclose(pmvit.compress(model, plan)(images), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("attention_bias", [True, False])
def test_saved_and_optimised(decoder: str, attention_bias: bool, images: Tensor, tmp_path: Path) -> None:
    model = small_segmenter(decoder=decoder, norm_eps=1e-5)
    small = pmvit.compress(model, some_plan(model, attention_bias=attention_bias))
    pmvit.save(small, tmp_path / "small")
    loaded = pmvit.load(tmp_path / "small")
    with torch.inference_mode():
        output = small(images)
        assert not torch.allclose(output, model(images), atol=1e-3)
        assert torch.equal(loaded(images), output)
        assert torch.allclose(pmvit.optimize_for_inference(small)(images), output, rtol=1e-4, atol=1e-4)
        assert torch.equal(pmvit.decompress(loaded)(images), model(images))
    with pytest.raises(ValueError, match="a fixed plan is for one image size"):
        small(torch.randn(1, 3, 64, 64))


def test_onnx_gives_the_same(tmp_path: Path) -> None:
    model = small_segmenter()
    exported = pmvit.export(pmvit.compress(model, some_plan(model)), tmp_path / "small.onnx")
    assert exported.max_error < 1e-4
    assert exported.agreement > 0.999


def test_plans_from_scores_leave_the_first_and_last_two_blocks_alone_unless_told() -> None:
    model = small_segmenter()
    scores = pmvit.measure(model, [], method="scored", scorer="random")
    assert sorted(pmvit.plan(scores, keep=0.5).layers) == [2, 3]
    assert sorted(pmvit.plan(scores, keep=0.5, skip=()).layers) == [0, 1, 2, 3, 4, 5]
    assert sorted(pmvit.plan(scores, keep=0.5, skip=(0,)).layers) == [1, 2, 3, 4, 5]
    assert pmvit.plan(scores, keep=0.5).made_by["plan"]["skip"] == [0, 1, -2, -1]
    shallow = pmvit.measure(small_segmenter(depth=3), [], method="scored", scorer="random")
    assert sorted(pmvit.plan(shallow, keep=0.5).layers) == [0, 1, 2]


def test_what_is_skipped_is_saved_with_the_scores(tmp_path: Path) -> None:
    scores = pmvit.measure(small_segmenter(), [], method="scored", scorer="random")
    scores.save(tmp_path / "scores.json")
    assert Scores.load(tmp_path / "scores.json").skip == (0, 1, -2, -1)


def test_scores_ignore_pixels_and_resize_labels(images: Tensor) -> None:
    model = small_segmenter()
    labels = torch.randint(0, 3, (2, 64, 96), generator=torch.Generator().manual_seed(2))
    first = pmvit.measure(model, [(images, labels)], method="scored", progress=False).values
    doubled = labels.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.allclose(pmvit.measure(model, [(images, doubled)], method="scored", progress=False).values, first)
    half = labels.clone()
    half[1] = 255
    alone = pmvit.measure(model, [(images[:1], labels[:1])], method="scored", progress=False).values
    assert torch.allclose(
        pmvit.measure(model, [(images, half)], method="scored", progress=False).values, alone / 2, rtol=1e-4
    )
    with pytest.raises(pmvit.PmvitError, match="expected labels below 3"):
        pmvit.measure(model, [(images, labels + 1)], method="scored", progress=False)
    for loss in ("predicted", "entropy"):
        assert pmvit.measure(model, [images], method="scored", loss=loss, progress=False).values.shape == (6, 24)


def test_cost_is_that_of_encoder_and_decoder() -> None:
    tokens, width, classes = 25, 48, 3
    block = 12 * width**2
    encoder = 6 * (tokens * block + 2 * tokens**2 * width) + 24 * 3 * 16**2 * width
    inside = 24 + classes
    decoder = 24 * width**2 + 2 * (inside * block + 2 * inside**2 * width) + inside * width**2 + 24 * classes * width
    assert pmvit.flops(small_segmenter()).macs == encoder + decoder
    assert pmvit.flops(small_segmenter(decoder="linear")).macs == encoder + 24 * classes * width


def test_feature_maps_between_blocks(images: Tensor) -> None:
    """timm reads tokens between the blocks of a compressed encoder as between those of the original."""
    model = small_segmenter()
    with torch.inference_mode():
        expected = model.encoder.forward_intermediates(images, intermediates_only=True)
        same = pmvit.compress(model, in_place_plan((4, 6), 6)).encoder
        for got, wanted in zip(same.forward_intermediates(images, intermediates_only=True), expected, strict=True):
            assert torch.allclose(got, wanted, rtol=0, atol=1e-5)
        maps = pmvit.compress(model, some_plan(model)).encoder.forward_intermediates(images, intermediates_only=True)
        assert [tuple(m.shape) for m in maps] == [(2, 48, 4, 6)] * 6
        assert torch.equal(maps[1], expected[1])
        assert not torch.allclose(maps[3], expected[3], atol=1e-3)
