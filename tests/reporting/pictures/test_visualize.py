"""`visualize` draws what every kind of compressed model does to images, and says in a line what it cannot draw."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.hosts import host_of
from pmvit.planning import LayerPlan, Plan
from pmvit.reporting.blocks import blocks_of, describe_blocks
from pmvit.reporting.pictures.cam import agreement, explain
from tests.data.test_segmentation_data import write_image
from tests.helpers import compressed, pmvit_here, small_plan, small_vit, tome
from tests.segmenters import small_segmenter
from tests.swins import small_swin


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    if name == "ViT":
        config = transformers.ViTConfig(**shape, image_size=48, patch_size=8, num_labels=5)
        model: nn.Module = transformers.ViTForImageClassification(config)
    else:
        size = {"image_size": [48, 64], "patch_size": 8, "num_detection_tokens": 6, "num_labels": 5}
        model = transformers.YolosForObjectDetection(transformers.YolosConfig(**shape, **size))
    return model.eval()


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model: nn.Module = VisionTransformer(48, 8, 3, 2, 32, 64, num_classes=5)
    nn.init.normal_(model.get_parameter("heads.head.weight"))
    return model.eval()


MODELS: dict[str, Any] = {
    "timm ViT": small_vit,
    "timm Swin": small_swin,
    "padded Swin": lambda: small_swin("v1 padded"),
    "torchvision Swin": lambda: small_swin("torchvision v1"),
    "torchvision ViT": torchvision_vit,
    "Segmenter": small_segmenter,
    "Hugging Face ViT": lambda: hugging_face("ViT"),
    "YOLOS": lambda: hugging_face("Yolos"),
}


def wrapped(model: nn.Module) -> nn.Module:
    """The model with every block wrapped and every token alone, in the opposite order: it computes the same."""
    grids = tuple(layout.grid for layout in host_of(model).layouts())
    layers = {}
    for number, (rows, columns) in enumerate(grids):
        backwards = tuple(reversed(range(rows * columns)))
        layers[number] = LayerPlan(backwards, backwards, (1.0,) * len(backwards))
    return pmvit.compress(model, Plan(grids[0], len(grids), layers, grids=grids))


@pytest.mark.parametrize("kind", MODELS)
def test_both_models_look_at_the_same_places_if_nothing_is_merged(kind: str) -> None:
    model = MODELS[kind]()
    image = torch.randn(host_of(model).input_size(), generator=torch.Generator().manual_seed(0))
    first, second = explain(model, image), explain(wrapped(model), image)
    assert first.found == second.found == first.target
    layouts = host_of(model).layouts()
    read = [values is not None for values in first.maps]
    assert all(read[:-1])
    assert read[-1] == (kind not in ("timm ViT", "torchvision ViT", "Hugging Face ViT", "YOLOS"))  # the patches are
    for one, other, layout in zip(first.maps, second.maps, layouts, strict=True):
        if one is not None and other is not None:
            assert one.shape == layout.grid
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.max()))
    assert any(values is not None and values.any() for values in first.maps)


def test_agreement_by_hand() -> None:
    first = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert agreement(first, 2 * first) == pytest.approx(1)
    assert agreement(first, torch.tensor([[1.0, 0.0], [0.0, 0.0]])) == pytest.approx(0.6)
    assert agreement(first, None) is agreement(first, torch.zeros(2, 2)) is None


def test_grad_cam_by_hand() -> None:
    model: Any = small_vit(global_pool="avg", class_token=False, fc_norm=False)
    model.norm = nn.Identity()
    image = torch.randn(3, 96, 96)
    with torch.no_grad():
        tokens = model.forward_features(image[None])[0]
        found = int(model(image[None]).argmax())
        channels = model.head.weight[found] / len(tokens)  # the gradient at every token: its mean, too
    made = explain(model, image)
    assert made.target == found
    assert made.maps[-1] is not None
    assert torch.allclose(made.maps[-1].flatten(), (tokens @ channels).clamp(min=0), atol=1e-6)


def test_blocks_as_data(tmp_path: Path) -> None:
    model = small_vit()
    scores = pmvit.measure(model, [], method="scored", scorer="random")
    plan = pmvit.plan(scores, keep=0.5, prune=0.1)
    small: Any = pmvit.compress(model, plan)
    blocks = json.loads(json.dumps(describe_blocks(small, scores)))
    assert [block["name"] for block in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    for number, block in enumerate(blocks):
        layer = plan.layers[number]
        assert (block["grid"], block["prefix"], block["windows"]) == ([6, 6], 1, None)
        assert (block["groups"], block["centres"]) == (list(layer.groups), list(layer.centres))
        states = {state: block["states"].count(state) for state in ("kept", "merged", "pruned")}
        assert states == {state: block[state] for state in states}
        assert sum(states.values()) == block["patches"] == 36
        assert [block["states"][centre] for centre in block["centres"]] == ["kept"] * block["kept"]
        assert block["scores"] == scores.of(number).tolist()
        assert block["weights"] == pytest.approx(layer.weights)
    with torch.no_grad():
        small.blocks[0].merge_weights.mul_(3)
    assert describe_blocks(small)[0]["weights"] == pytest.approx([3 * weight for weight in plan.layers[0].weights])
    swin = pmvit.compress(
        small_swin(), pmvit.plan(pmvit.measure(small_swin(), [], method="scored", scorer="random"), keep=0.6)
    )
    described = describe_blocks(swin)
    assert [block["grid"] for block in described] == [[28, 28], [28, 28], [14, 14], [14, 14]]
    assert described[1]["windows"] == {"size": [7, 7], "shift": [3, 3]}
    assert [block.layout.grid for block in blocks_of(swin)] == [(28, 28), (28, 28), (14, 14), (14, 14)]


@pytest.mark.parametrize("learn", ["group", "dense"])
@pytest.mark.parametrize("reconstruct", ["pinv", "residual"])
def test_weights_are_those_of_the_model(learn: Any, reconstruct: Any) -> None:
    model = small_vit()
    plan = small_plan(model, reconstruct=reconstruct)
    block, *_ = blocks_of(pmvit.compress(model, plan, learn=learn))
    assert block.layer.weights == pytest.approx(plan.layers[0].weights)
    sizes = [sum(block.layer.weights[token] ** 2 for token in members) for members in block.layer.members()]
    for token, group in enumerate(block.layer.groups):
        expected = 0.0 if group < 0 else block.layer.weights[token] / sizes[group] if reconstruct == "pinv" else 1.0
        assert block.returns[token] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["timm Swin", "Segmenter", "YOLOS"])
def test_pictures_of_any_model(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    small = pmvit.compress(
        model, pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.5, prune=0.1)
    )
    write_image(tmp_path / "a.png", size=(90, 70), seed=0)
    made = pmvit.visualize(small, tmp_path / "a.png", tmp_path / "out", formats="png", progress=False)
    (written,) = made.images.values()
    assert [path.name for path in (*made.maps, *written)] == ["maps.png", "1-a-blocks.png", "1-a-cam.png"]
    for path in (*made.maps, *written):
        with Image.open(path) as picture:
            assert min(picture.size) > 300


def test_the_command(tmp_path: Path) -> None:
    model = small_vit()
    scores = pmvit.measure(model, [], method="scored", scorer="random")
    saved = tmp_path / "saved"
    pmvit.save(pmvit.compress(model, pmvit.plan(scores, keep=0.5, prune=0.1)), saved)
    for number in range(5):
        write_image(tmp_path / "images" / f"{number}.png", size=(110, 96), seed=number)
    (tmp_path / "images" / "1.png").write_bytes(b"no image")
    folders = [str(saved), "--data", str(tmp_path / "images"), "-o"]
    result = CliRunner().invoke(app, ["visualize", *folders, str(tmp_path / "all"), "--limit", "3", "--blocks", "0,-1"])
    assert result.exit_code == 0, result.output
    names = {
        f"{stem}.{kind}"
        for stem in ("maps", "1-0-blocks", "1-0-cam", "3-3-blocks", "3-3-cam")
        for kind in ("png", "svg")
    }
    assert {path.name for path in (tmp_path / "all").iterdir()} == names
    assert "pass --scores" in result.output
    assert "1 broken image skipped" in result.output
    drawn = ElementTree.parse(tmp_path / "all" / "maps.svg").getroot()  # noqa: S314  # our own file
    texts = [str(element.text) for element in drawn.iter() if element.text]
    assert [text.split(":")[0] for text in texts if text.startswith("block")] == ["block 0", "block 2"]
    assert "score" not in texts
    scores.save(saved / "scores.json")
    only = ["visualize", str(saved), "-o", str(tmp_path / "maps"), "--what", "maps", "--format", "svg", "--json"]
    result = CliRunner().invoke(app, only)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["maps"] == [str(tmp_path / "maps" / "maps.svg")]
    assert ">score<" in (tmp_path / "maps" / "maps.svg").read_text()


def test_what_cannot_be_drawn_is_said_in_a_line(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", size=(96, 96), seed=0)
    broken = tmp_path / "b.png"
    broken.write_bytes(b"no image")
    small = compressed()
    other = pmvit.measure(small_vit(img_size=64), [], method="scored", scorer="random")
    wrong: list[tuple[nn.Module, dict[str, Any], str]] = [
        (small_vit(), {}, "expected a compressed model, got one that is not"),
        (tome(small_vit(), 4), {}, "got one with ToMe: it chooses tokens anew for every image"),
        (small, {"what": ("cams",)}, "what: expected some of blocks, cam, maps; got 'cams'"),
        (small, {"formats": "pdf"}, "formats: expected one of png, svg, both; got 'pdf'"),
        (small, {"blocks": (3,)}, r"blocks: expected blocks of 0 \.\.\. 2, got 3"),
        (small, {"limit": 0}, "limit: expected 1 or more, got 0"),
        (small, {"data": None}, "data: expected a folder or an image"),
        (small, {"data": broken}, r"expected an image that can be read, got none: .*b\.png"),
        (small, {"output": broken}, "expected a folder or a new name"),
        (
            small,
            {"scores": other},
            "scores of 3 blocks of 6 x 6 patches.*got some of 3 blocks of 4 x 4 patches",
        ),
        (small, {"original": small_vit(img_size=64)}, "original: expected a model with the same blocks"),
    ]
    for model, options, message in wrong:
        arguments = {"data": tmp_path / "a.png", "output": tmp_path / "out", "what": ("blocks",), **options}
        with pytest.raises(pmvit.PmvitError, match=message) as raised:
            pmvit.visualize(model, progress=False, **arguments)
        assert "\n" not in str(raised.value)


def test_an_original_is_named_as_for_every_other_verb(tmp_path: Path) -> None:
    """As `evaluate` takes it: here a folder that another library saved, which pmvit.load does not open."""
    model: Any = hugging_face("ViT").eval()
    model.save_pretrained(tmp_path / "original")
    small: Any = pmvit.compress(model, small_plan(model))
    with torch.no_grad():
        small.classifier.bias.add_(1)
    pmvit.save(small, tmp_path / "tuned")
    Image.new("RGB", (48, 48), (120, 60, 30)).save(tmp_path / "a.png")
    words = ("visualize", "tuned", "--data", "a.png", "--what", "cam", "--blocks", "0", "--format", "svg", "-o")
    for original, drawn in (((), ">uncompressed<"), (("--original", "original"), ">original<")):
        result = pmvit_here(*words, str(len(original)), *original, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert drawn in (tmp_path / str(len(original)) / "1-a-cam.svg").read_text(encoding="utf-8")
