"""Models of Hugging Face transformers in use: folders, saving, training, exporting."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.data.opening import open_loader
from pmvit.evaluation.classification import Evaluation
from pmvit.hosts import TokenLayout, host_of
from pmvit.hosts.outputs import num_classes_of, predict
from pmvit.loading import create_model
from pmvit.planning import Plan
from scripts.sweep_models import reduced_hf
from tests.helpers import small_plan
from tests.hosts.hf_models import FAMILIES, images_for, make, vit
from tests.hosts.layouts import check_same_as_timm, hugging_face_vit

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_come_back(family: str, tmp_path: Path) -> None:
    model = make(family)
    small = pmvit.compress(model, small_plan(model))
    pmvit.save(small, tmp_path / "saved")
    loaded = pmvit.load(tmp_path / "saved")
    images = images_for(model)
    assert type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(predict(loaded, images), predict(small, images))
        assert torch.equal(predict(pmvit.decompress(loaded), images), predict(model, images))


def test_a_folder_of_transformers(tmp_path: Path, pictures: Path) -> None:
    """Load by folder, prepare images as its processor says, compress, save, load."""
    model = vit()
    model.save_pretrained(tmp_path / "hub")
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"shortest_edge": 120},
        "crop_size": {"height": 96, "width": 96},
        "do_center_crop": True,
        "resample": 2,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
    }
    (tmp_path / "hub/preprocessor_config.json").write_text(json.dumps(processor))
    for name in (str(tmp_path / "hub"), f"hf:{tmp_path / 'hub'}"):
        loaded = create_model(name)
        assert type(loaded) is type(model)
        assert num_classes_of(loaded) == 7
        assert host_of(loaded).data_config() == {
            "input_size": [3, 96, 96],
            "interpolation": "bilinear",
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "crop_pct": 0.8,
            "crop_mode": "center",
        }
    batches = list(open_loader(loaded, pictures, batch_size=16, workers=0))
    scores = pmvit.measure(loaded, batches, method="scored", progress=False)
    small = pmvit.compress(loaded, pmvit.plan(scores, keep=0.6))
    pmvit.save(small, tmp_path / "small")
    again = pmvit.load(tmp_path / "small")
    assert host_of(again).data_config() == host_of(loaded).data_config()
    assert pmvit.evaluate(again, batches, reference=loaded, progress=False).agreement is not None


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    model = vit()
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "whole/pytorch_model.bin")  # never unpickled
    with pytest.raises(pmvit.PmvitError, match="weights in safetensors"):
        create_model(str(tmp_path / "whole"))
    with pytest.raises(pmvit.PmvitError, match="got trust_remote_code"):
        create_model(f"hf:{tmp_path / 'whole'}", trust_remote_code=True)
    with pytest.raises(pmvit.PmvitError, match="leave them out"):
        create_model(f"hf:{tmp_path / 'whole'}", weights="other.safetensors")
    config = json.loads((tmp_path / "whole/config.json").read_text())
    (tmp_path / "whole/config.json").write_text(json.dumps({**config, "architectures": ["os.system"]}))
    with pytest.raises(pmvit.PmvitError, match=r"expected one of transformers' models, got 'os\.system'"):
        create_model(str(tmp_path / "whole"))


def test_dinov2_takes_the_size_of_its_processor(tmp_path: Path) -> None:
    """Its configuration names the size of its position embedding, which fits any image."""
    make("dinov2").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 80}, "crop_size": 64}))
    model = create_model(str(tmp_path))
    assert host_of(model).layout == TokenLayout((4, 4), 1)
    small = pmvit.compress(model, small_plan(model))
    assert predict(small, images_for(model)).shape == (3, 7)
    pmvit.save(small, tmp_path / "saved")
    assert host_of(pmvit.load(tmp_path / "saved")).layout.grid == (4, 4)


def test_the_trainer_of_transformers_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    small = pmvit.compress(vit(), small_plan(vit()))
    before = copy.deepcopy(small.state_dict())
    data = [{"pixel_values": torch.randn(3, 96, 96), "labels": index} for index in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    transformers.Trainer(model=small, args=arguments, train_dataset=data).train()
    assert isinstance(small, transformers.PreTrainedModel)
    changed = {name for name, value in small.state_dict().items() if not torch.equal(value, before[name])}
    assert any("merge_weights" in name for name in changed)
    assert any(".block.attention" in name for name in changed)


def test_save_pretrained_refuses_to_lose_the_compression(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = make("vit")
    metric = pmvit.measure(model, [images_for(model)], method="adaptive", rank=8, progress=False)
    for what in (small_plan(model), pmvit.plan(metric, keep=0.7)):
        small: Any = pmvit.compress(model, what)
        again = copy.deepcopy(small)
        for inner in (small, small.base_model, again):
            for save in (inner.save_pretrained, inner.push_to_hub):
                with pytest.raises(pmvit.PmvitError, match=r"use pmvit\.save\(model, folder\)") as said:
                    save(str(tmp_path / "theirs"))
                assert "\n" not in str(said.value)
        assert not (tmp_path / "theirs").exists()
        assert again.save_pretrained is not model.save_pretrained
        for plain in map(pmvit.decompress, (small, again)):
            assert {"save_pretrained", "push_to_hub"} & (set(vars(plain)) | set(vars(plain.base_model))) == set()
            plain.save_pretrained(tmp_path / "plain")
            found = type(model).from_pretrained(tmp_path / "plain")
            assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.state_dict().items())
    small = pmvit.compress(model, small_plan(model))
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True)
    with pytest.raises(pmvit.PmvitError, match=r"use pmvit\.save"):
        transformers.Trainer(model=small, args=arguments).save_model()
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == []
    both = reduced_hf("CLIPModel", "CLIPConfig", {})
    clip: Any = pmvit.compress(both, small_plan(both))
    with pytest.raises(pmvit.PmvitError, match=r"use pmvit\.save"):
        clip.vision_model.save_pretrained(tmp_path / "theirs")
    clip.text_model.save_pretrained(tmp_path / "text")  # it is as it was


def test_embeddings_are_tuned_towards_the_original(tmp_path: Path, pictures: Path) -> None:
    model = make("clip")
    small = pmvit.compress(model, small_plan(model))
    options: dict[str, Any] = {
        "epochs": 1,
        "batch_size": 16,
        "workers": 0,
        "progress": False,
        "output": tmp_path / "run",
    }
    with pytest.raises(pmvit.PmvitError, match="tune it with labels=False"):
        pmvit.finetune(small, teacher=model, train=pictures, val=pictures, **options)
    options["output"] = tmp_path / "other"
    tuned = pmvit.finetune(small, teacher=model, train=pictures, val=pictures, labels=False, lr=1e-3, **options)
    assert isinstance(tuned.best, Evaluation)
    assert tuned.best.cosine is not None


@pytest.mark.parametrize("family", ["vit", "dinov2"])
def test_optimised_exported_and_benchmarked(family: str, tmp_path: Path) -> None:
    model = make(family)
    small = pmvit.compress(model, small_plan(model))
    images = images_for(model)
    with torch.no_grad():
        assert torch.allclose(predict(pmvit.optimize_for_inference(small), images), predict(small, images), atol=1e-4)
    assert pmvit.flops(small).macs < pmvit.flops(model).macs
    assert pmvit.export(small, tmp_path / "model.pt2").max_error < 1e-5
    if family == "vit":
        pytest.importorskip("onnxruntime")
        assert pmvit.export(small, tmp_path / "model.onnx").max_error < 1e-5
    rows = pmvit.benchmark(small, batches=[2], rounds=2, runtimes=["eager"], progress=False).rows
    assert all(row.failure is None for row in rows if row.variant != "tome")


def test_nobody_needs_transformers() -> None:
    """`import pmvit` does not import it, and a missing one is one line."""
    code = (
        "import sys, pmvit, pmvit.loading, pmvit.hosts\n"
        "assert not {'transformers', 'segmentation_models_pytorch'} & set(sys.modules)\n"
        "sys.modules['transformers'] = None\n"
        "try: pmvit.loading.create_model('hf:owner/name')\n"
        "except pmvit.PmvitError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'pmvit[hf]'" in result.stdout


@pytest.mark.data
def test_the_real_vit_tiny_is_the_same_in_the_layout_of_transformers(
    vit_tiny: nn.Module, real_images: Tensor, vit_tiny_plan: Plan
) -> None:
    check_same_as_timm(hugging_face_vit(vit_tiny), vit_tiny, vit_tiny_plan, real_images)
