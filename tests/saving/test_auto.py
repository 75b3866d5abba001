"""transformers opens what pmvit saved through the classes that it lets one register, and no other way makes it up."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pmvit
from pmvit.compression import compression_of
from pmvit.loading import create_model
from pmvit.saving.auto import register_auto_classes
from tests.hub_server import Hub

transformers = pytest.importorskip("transformers")
SAVED = Path(__file__).parents[1] / "fixtures" / "saved_hf"


@pytest.fixture
def registered() -> Iterator[None]:
    from transformers.models.auto import configuration_auto, modeling_auto

    autos = [auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")]
    contents = [configuration_auto.CONFIG_MAPPING._extra_content]
    contents += [auto._model_mapping._extra_content for auto in autos]
    before = [dict(content) for content in contents]
    register_auto_classes()
    register_auto_classes()
    yield
    for content, held in zip(contents, before, strict=True):
        content.clear()
        content.update(held)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pmvit.save(pmvit.load(SAVED), tmp_path / "out-vit")
    return tmp_path / "out-vit"


@pytest.mark.usefixtures("registered")
def test_the_auto_class_gives_the_compressed_model(saved: Path, tmp_path: Path) -> None:
    expected = pmvit.load(saved)
    model = transformers.AutoModelForImageClassification.from_pretrained(saved)
    assert type(model) is transformers.ViTForImageClassification
    assert compression_of(model) is not None
    size = model.config.image_size
    image = torch.randn(1, 3, size, size)
    with torch.inference_mode():
        assert torch.equal(model(image).logits, expected(image).logits)
    half = transformers.AutoModelForImageClassification.from_pretrained(saved, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    classifier = transformers.AutoModelForImageClassification
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (classifier, {"num_labels": 3}, "takes revision and dtype, and not num_labels"),
        (classifier, {"device_map": "auto"}, "and not device_map"),
        (transformers.AutoModel, {}, "holds a ViTForImageClassification, which is not what AutoModel gives"),
    ]
    for auto, options, message in refused:
        with pytest.raises(pmvit.PmvitError, match=message):
            auto.from_pretrained(saved, **options)
    shutil.copytree(SAVED.parent / "saved_original", tmp_path / "of-timm")
    pmvit.save(pmvit.load(tmp_path / "of-timm"), tmp_path / "of-timm")
    with pytest.raises(pmvit.PmvitError, match="which is not what AutoModel gives: open it with"):
        transformers.AutoModel.from_pretrained(tmp_path / "of-timm")


@pytest.mark.usefixtures("registered")
def test_on_the_hub_it_is_opened_by_its_name_and_revision(hub: Hub) -> None:
    first = pmvit.push_to_hub(pmvit.load(SAVED), "me/vit")
    pmvit.push_to_hub(pmvit.decompress(pmvit.load(SAVED)), "me/vit")
    for revision, is_compressed in ((first.oid, True), (None, False)):
        model = transformers.AutoModelForImageClassification.from_pretrained("me/vit", revision=revision)
        assert (compression_of(model) is not None) is is_compressed
    with pytest.raises(pmvit.PmvitError, match="me/vit holds a model that pmvit saved: open it as hf-hub:me/vit"):
        create_model("hf:me/vit")


def test_without_it_transformers_refuses_the_folder(saved: Path) -> None:
    """Its classes take what fits of other models' weights, and fill up the rest with random numbers."""
    with pytest.raises(ValueError, match="model type `pmvit`"):
        transformers.AutoModelForImageClassification.from_pretrained(saved)
    for kind in (transformers.ViTForImageClassification, transformers.ViTModel, transformers.Dinov2Model):
        with pytest.raises(OSError, match=r"open-it-with-pmvit\.load\.safetensors"):
            kind.from_pretrained(saved)
